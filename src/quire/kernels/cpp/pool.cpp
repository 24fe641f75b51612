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
constexpr int kMaxThreads = 256;

// One thread's share of a job: (next chunk << 32 | end). What a claim reads of the job was written before the share,
// and stays until the claimed chunk is done, so a thread that woke too late takes part in the next job or in none.
struct alignas(64) Share {
    std::atomic<uint64_t> chunks{0};
};

// Each thread goes through its own share in order, so that weights stream from memory, and then steals chunks of others.
struct Pool {
    Share shares[kMaxThreads];
    std::atomic<uint64_t> job{0};
    std::atomic<int64_t> unfinished{0};
    std::atomic<Work> work{nullptr};
    std::atomic<const void*> context{nullptr};
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> grain{1};
    std::atomic<int> num_shares{0};

    std::mutex sleep_mutex;
    std::condition_variable wake;
    std::atomic<int> sleeping{0};
    std::atomic<int> wanted_workers{0};
    int num_workers = 0;
};

Pool* pool = new Pool;  // never destroyed: workers outlive static destructors
std::atomic<int> usual_count{1};   // of threads that set none of their own
thread_local int own_count = 0;  // 0: none was set
thread_local bool inside_work = false;

void run_share(Pool& p, Share& share) {
    uint64_t chunks = share.chunks.load(std::memory_order_acquire);
    while (chunks >> 32 < (chunks & 0xffffffffu)) {
        const uint64_t after = chunks + (uint64_t{1} << 32);
        if (!share.chunks.compare_exchange_weak(chunks, after, std::memory_order_acq_rel)) continue;
        const int64_t count = p.count.load(std::memory_order_relaxed), grain = p.grain.load(std::memory_order_relaxed);
        const int64_t begin = static_cast<int64_t>(chunks >> 32) * grain;
        p.work.load(std::memory_order_relaxed)(p.context.load(std::memory_order_relaxed), begin,
                                               begin + grain < count ? begin + grain : count);
        p.unfinished.fetch_sub(1, std::memory_order_acq_rel);
        chunks = share.chunks.load(std::memory_order_acquire);
    }
}

void run_shares(Pool& p, int first) {
    const int shares = p.num_shares.load(std::memory_order_relaxed);
    for (int i = 0; i < shares; ++i) run_share(p, p.shares[(first + i) % shares]);
}

// Returns the number of a job that is not `seen`, once there is one and this worker is wanted.
uint64_t wait_for_job(Pool& p, uint64_t seen, int index) {
    const auto fresh = [&] {
        const bool wanted = index < p.wanted_workers.load(std::memory_order_relaxed);
        return wanted && p.job.load(std::memory_order_acquire) != seen;
    };
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    while (std::chrono::steady_clock::now() < deadline) {
        for (int i = 0; i < kPausesPerClock; ++i) {
            if (fresh()) return p.job.load(std::memory_order_acquire);
            QUIRE_PAUSE();
        }
    }
    std::unique_lock<std::mutex> lock(p.sleep_mutex);
    p.sleeping.fetch_add(1, std::memory_order_seq_cst);
    p.wake.wait(lock, fresh);
    p.sleeping.fetch_sub(1, std::memory_order_seq_cst);
    return p.job.load(std::memory_order_acquire);
}

void worker_main(Pool* p, int index) {
    inside_work = true;
    uint64_t seen = 0;
    for (;;) {
        seen = wait_for_job(*p, seen, index);
        run_shares(*p, index + 1);
    }
}

void start_workers(Pool& p, int wanted) {
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
    const int thread_count = num_threads();
    start_workers(p, thread_count - 1);
    const int64_t chunks = (count + grain - 1) / grain;
    p.work.store(work, std::memory_order_relaxed);
    p.context.store(context, std::memory_order_relaxed);
    p.count.store(count, std::memory_order_relaxed);
    p.grain.store(grain, std::memory_order_relaxed);
    p.unfinished.store(chunks, std::memory_order_relaxed);
    p.num_shares.store(thread_count, std::memory_order_relaxed);
    for (int64_t i = 0; i < thread_count; ++i) {
        const auto begin = static_cast<uint64_t>(chunks * i / thread_count);
        const auto end = static_cast<uint64_t>(chunks * (i + 1) / thread_count);
        p.shares[i].chunks.store(begin << 32 | end, std::memory_order_release);
    }
    p.job.fetch_add(1, std::memory_order_seq_cst);
    if (p.sleeping.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(p.sleep_mutex); }
        p.wake.notify_all();
    }
    inside_work = true;
    run_shares(p, 0);
    inside_work = false;
    for (int spins = 0; p.unfinished.load(std::memory_order_acquire) > 0; ++spins) {
        QUIRE_PAUSE();
        if (spins > kPausesBeforeYield) std::this_thread::yield();
    }
}

int num_threads() { return own_count > 0 ? own_count : usual_count.load(std::memory_order_relaxed); }

void set_num_threads(int count) {
    own_count = count < 1 ? 1 : count < kMaxThreads ? count : kMaxThreads;
    usual_count.store(own_count, std::memory_order_relaxed);
}

void* thread_scratch(size_t num_bytes) { return thread_buffer.at_least(num_bytes); }
void* shared_scratch(size_t num_bytes) { return shared_buffer->at_least(num_bytes); }

}  // namespace quire
