// Threads that spin briefly and then sleep. Nothing here depends on the instruction set.
#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
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

// Long enough to bridge two operations of a step, short enough to be no burden on an idle machine.
constexpr auto kSpinTime = std::chrono::microseconds(80);
constexpr int kPausesPerClock = 32;
constexpr int kPausesBeforeYield = 4000;
constexpr uint64_t kClosed = 0xffffffffu;  // a chunk number that no job has

// A ticket is (epoch << 32 | next chunk). Claiming compares the epoch, so a thread that woke too late for its
// job can never take a chunk of the next one.
struct Pool {
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> chunks{0};
    std::atomic<int64_t> unfinished{0};
    std::atomic<Work> work{nullptr};
    std::atomic<const void*> context{nullptr};
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> grain{1};

    std::mutex sleep_mutex;
    std::condition_variable wake;
    std::atomic<int> sleeping{0};
    std::atomic<int> wanted_workers{0};
    int num_workers = 0;
};

Pool* pool = new Pool;  // never destroyed: workers outlive static destructors
int thread_count = 1;
thread_local bool inside_work = false;

uint64_t epoch_of(uint64_t ticket) { return ticket >> 32; }

void run_chunks(Pool& p, uint64_t epoch) {
    const Work work = p.work.load(std::memory_order_relaxed);
    const void* context = p.context.load(std::memory_order_relaxed);
    const int64_t count = p.count.load(std::memory_order_relaxed);
    const int64_t grain = p.grain.load(std::memory_order_relaxed);
    const int64_t chunks = p.chunks.load(std::memory_order_acquire);
    uint64_t ticket = p.ticket.load(std::memory_order_acquire);
    for (;;) {
        const int64_t chunk = static_cast<int64_t>(ticket & 0xffffffffu);
        if (epoch_of(ticket) != epoch || chunk >= chunks) return;
        if (!p.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
        const int64_t begin = chunk * grain;
        work(context, begin, begin + grain < count ? begin + grain : count);
        p.unfinished.fetch_sub(1, std::memory_order_acq_rel);
        ticket = p.ticket.load(std::memory_order_acquire);
    }
}

// Returns the new epoch, or the old one when this worker is no longer wanted.
uint64_t wait_for_job(Pool& p, uint64_t seen, int index) {
    const auto wanted = [&] { return index < p.wanted_workers.load(std::memory_order_relaxed); };
    const auto fresh = [&] { return epoch_of(p.ticket.load(std::memory_order_acquire)) != seen && wanted(); };
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    while (std::chrono::steady_clock::now() < deadline) {
        for (int i = 0; i < kPausesPerClock; ++i) {
            if (fresh()) return epoch_of(p.ticket.load(std::memory_order_acquire));
            QUIRE_PAUSE();
        }
    }
    std::unique_lock<std::mutex> lock(p.sleep_mutex);
    p.sleeping.fetch_add(1, std::memory_order_seq_cst);
    p.wake.wait(lock, fresh);
    p.sleeping.fetch_sub(1, std::memory_order_seq_cst);
    return epoch_of(p.ticket.load(std::memory_order_acquire));
}

void worker_main(Pool* p, int index) {
    inside_work = true;
    uint64_t seen = 0;
    for (;;) {
        seen = wait_for_job(*p, seen, index);
        run_chunks(*p, seen);
    }
}

void start_workers(Pool& p) {
    const int wanted = thread_count - 1;
    p.wanted_workers.store(wanted, std::memory_order_relaxed);
    for (; p.num_workers < wanted; ++p.num_workers) {
        std::thread(worker_main, &p, p.num_workers).detach();
    }
}

// After fork only the forking thread lives: the child starts from an empty pool.
void forget_workers() { pool = new Pool; }

const int fork_handler = pthread_atfork(nullptr, nullptr, forget_workers);

struct Buffer {
    void* memory = nullptr;
    size_t size = 0;
    void* at_least(size_t num_bytes) {
        if (num_bytes > size) {
            std::free(memory);
            size = (num_bytes + num_bytes / 2 + 4095) / 4096 * 4096;
            memory = std::aligned_alloc(4096, size);
            if (memory == nullptr) throw std::bad_alloc();
        }
        return memory;
    }
    ~Buffer() { std::free(memory); }
};

thread_local Buffer thread_buffer;
Buffer* shared_buffer = new Buffer;

}  // namespace

void run_parallel(int64_t count, int64_t grain, Work work, const void* context) {
    if (inside_work) {
        work(context, 0, count);
        return;
    }
    Pool& p = *pool;
    start_workers(p);
    const int64_t chunks = (count + grain - 1) / grain;
    // Closed before the job changes: a worker that is late for the last job would otherwise find the next one's
    // numbers behind the last one's ticket, and run a chunk that is not counted.
    const uint64_t last = epoch_of(p.ticket.load(std::memory_order_relaxed));
    p.ticket.store(last << 32 | kClosed, std::memory_order_seq_cst);
    p.work.store(work, std::memory_order_relaxed);
    p.context.store(context, std::memory_order_relaxed);
    p.count.store(count, std::memory_order_relaxed);
    p.grain.store(grain, std::memory_order_relaxed);
    p.unfinished.store(chunks, std::memory_order_relaxed);
    p.chunks.store(chunks, std::memory_order_release);
    const uint64_t epoch = (last + 1) & 0xffffffffu;
    p.ticket.store(epoch << 32, std::memory_order_seq_cst);
    if (p.sleeping.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(p.sleep_mutex); }
        p.wake.notify_all();
    }
    inside_work = true;
    run_chunks(p, epoch);
    inside_work = false;
    for (int spins = 0; p.unfinished.load(std::memory_order_acquire) > 0; ++spins) {
        QUIRE_PAUSE();
        if (spins > kPausesBeforeYield) std::this_thread::yield();
    }
}

int num_threads() { return thread_count; }
void set_num_threads(int count) { thread_count = count < 1 ? 1 : count; }

void* thread_scratch(size_t num_bytes) { return thread_buffer.at_least(num_bytes); }
void* shared_scratch(size_t num_bytes) { return shared_buffer->at_least(num_bytes); }

}  // namespace quire
