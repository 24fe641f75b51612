// Copies of whole blocks.
#include "../cpp/pool.h"

#include <cstring>

namespace quire {
namespace QUIRE_ISA {

// Arguments: pool, block stride in bytes, block bytes, sources, targets, count. No target is a source.
inline void copy_blocks(const int64_t* words) {
    const Arguments arguments{words};
    char* pool = arguments.pointer<char>(0);
    const int64_t stride = arguments.integer(1), num_bytes = arguments.integer(2), count = arguments.integer(5);
    const int64_t* sources = arguments.pointer<const int64_t>(3);
    const int64_t* targets = arguments.pointer<const int64_t>(4);
    parallel_for(count, 1, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            std::memcpy(pool + targets[i] * stride, pool + sources[i] * stride, static_cast<size_t>(num_bytes));
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
