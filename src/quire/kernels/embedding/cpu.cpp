// Rows of a table, widened to fp32 and scaled; zeros for an id of -1.
#include <algorithm>

#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

template <class Element>
inline void widen_row(const Element* source, float* target, int64_t width, float scale) {
    for (int64_t i = 0; i < width; i += kLanes) {
        store_part(target + i, multiply(load_part(source + i, width - i), broadcast(scale)), width - i);
    }
}

// Arguments: table, row stride, dtype, ids, whether ids are 64 bits wide, tokens, width, out, out stride, scale.
inline void gather(const int64_t* words) {
    const Arguments a{words};
    const char* table = a.pointer<const char>(0);
    const int64_t row_stride = a.integer(1), dtype = a.integer(2), wide_ids = a.integer(4);
    const int64_t tokens = a.integer(5), width = a.integer(6), out_stride = a.integer(8);
    const int32_t* narrow = a.pointer<const int32_t>(3);
    const int64_t* wide = a.pointer<const int64_t>(3);
    float* out = a.pointer<float>(7);
    const float scale = a.real(9);
    parallel_for(tokens, 32, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t id = wide_ids != 0 ? wide[token] : narrow[token];
            const int64_t start = id * row_stride;
            float* target = out + token * out_stride;
            if (id < 0) std::fill_n(target, width, 0.0f);
            else if (dtype == 0) widen_row(reinterpret_cast<const float*>(table) + start, target, width, scale);
            else if (dtype == 1) widen_row(reinterpret_cast<const Half*>(table) + start, target, width, scale);
            else widen_row(reinterpret_cast<const BFloat*>(table) + start, target, width, scale);
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
