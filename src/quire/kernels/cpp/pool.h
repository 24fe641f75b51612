// The thread pool of all native operations, their scratch memory, and how they read their arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace quire {

// Runs chunk [begin, end) of a job.
using Work = void (*)(const void* context, int64_t begin, int64_t end);

// Runs `work` over [0, count) in chunks of `grain`, on the calling thread and the workers, and returns when
// every chunk is done. Each thread begins with a contiguous share of its own; chunks are claimed one at a time, so a
// delayed thread holds up one chunk at most.
void run_parallel(int64_t count, int64_t grain, Work work, const void* context);

// Of operations that the calling thread runs; a thread that set no number takes the one that was set last.
int num_threads();
void set_num_threads(int count);

// Memory of the calling thread / of the running operation. Valid until the next call with the same kind.
void* thread_scratch(size_t num_bytes);
void* shared_scratch(size_t num_bytes);

template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
    if (count <= 0) return;
    if (count <= grain || num_threads() == 1) {
        body(int64_t{0}, count);
        return;
    }
    run_parallel(
        count, grain,
        [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
        &body);
}

// One operation's arguments: pointers, integers and doubles, each in 64 bits.
struct Arguments {
    const int64_t* words;

    template <class Element>
    Element* pointer(int index) const {
        return reinterpret_cast<Element*>(static_cast<uintptr_t>(words[index]));
    }
    int64_t integer(int index) const { return words[index]; }
    float real(int index) const {
        double value;
        std::memcpy(&value, &words[index], sizeof value);
        return static_cast<float>(value);
    }
};

using Operation = void (*)(const int64_t* arguments);

struct NamedOperation {
    const char* name;
    Operation run;
};

}  // namespace quire
