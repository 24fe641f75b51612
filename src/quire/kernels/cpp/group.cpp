// Waiting for other processes: spins for a moment, then yields, then sleeps.
#include "group.h"

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#define QUIRE_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define QUIRE_PAUSE() asm volatile("yield")
#else
#define QUIRE_PAUSE() std::atomic_signal_fence(std::memory_order_seq_cst)
#endif

namespace quire {
namespace {

constexpr int kSpins = 1000;                                // some tens of microseconds
constexpr int kYields = 4000;                               // then a rank is far behind: it may take a core
constexpr auto kNap = std::chrono::microseconds(50);

using Counter = std::atomic<int64_t>;

Counter& line(char* memory, int64_t index) { return *reinterpret_cast<Counter*>(memory + index * kLineBytes); }

bool wait_until(Group& group, const Counter& counter, int64_t value) {
    const Counter& aborted = line(group.memory, 0);
    bool reached = true;
    for (int64_t turn = 0; counter.load(std::memory_order_acquire) < value; ++turn) {
        if (turn < kSpins) {
            QUIRE_PAUSE();
            continue;
        }
        group.waiting = 1;
        if (aborted.load(std::memory_order_relaxed) != 0) {
            reached = false;
            break;
        }
        if (turn < kSpins + kYields) std::this_thread::yield();
        else std::this_thread::sleep_for(kNap);
    }
    group.waiting = 0;
    return reached;
}

}  // namespace

bool arrive(Group& group) {
    line(group.memory, 1 + group.rank).store(group.exchanges, std::memory_order_release);
    for (int64_t rank = 0; rank < group.size; ++rank) {
        if (!wait_until(group, line(group.memory, 1 + rank), group.exchanges)) return false;
    }
    return true;
}

char* next_slot(Group& channel) {
    const int64_t number = channel.exchanges + 1;
    const bool ready = channel.rank == 0
                           ? wait_until(channel, line(channel.memory, 2), number - channel.size)
                           : wait_until(channel, line(channel.memory, 1), number);
    if (!ready) return nullptr;
    return channel.memory + kHeaderBytes + (number % channel.size) * channel.capacity;
}

void finish_slot(Group& channel) {
    line(channel.memory, channel.rank == 0 ? 1 : 2).store(++channel.exchanges, std::memory_order_release);
}

}  // namespace quire
