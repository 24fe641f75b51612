// silu(gate) * up.
#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

// Arguments: x, x stride, rows, F, out, out stride.
inline void silu_mul(const int64_t* words) {
    const Arguments arguments{words};
    const float* x = arguments.pointer<const float>(0);
    const int64_t x_stride = arguments.integer(1), rows = arguments.integer(2), width = arguments.integer(3);
    float* out = arguments.pointer<float>(4);
    const int64_t out_stride = arguments.integer(5);
    const int64_t grain = width > 8192 ? 1 : 8192 / (width > 0 ? width : 1) + 1;
    parallel_for(rows, grain, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* gate = x + row * x_stride;
            const float* up = gate + width;
            for (int64_t i = 0; i < width; i += kLanes) {
                const Floats y = silu_times(load_part(gate + i, width - i), load_part(up + i, width - i));
                store_part(out + row * out_stride + i, y, width - i);
            }
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
