// silu(gate) * up, and GELU.
#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

// x * P(normal < x): max(x, 0) - |x| * tail(|x|), where the tail is Abramowitz and Stegun's 7.1.26, good to 8e-8.
inline Floats gelu_of(Floats x) {
    const Floats size = absolute(x), z = multiply(size, broadcast(0.70710678f));
    const Floats t = divide(broadcast(1.0f), fused(broadcast(0.3275911f), z, broadcast(1.0f)));
    Floats y = fused(broadcast(0.5f * 1.061405429f), t, broadcast(0.5f * -1.453152027f));
    y = fused(y, t, broadcast(0.5f * 1.421413741f));
    y = fused(y, t, broadcast(0.5f * -0.284496736f));
    y = fused(y, t, broadcast(0.5f * 0.254829592f));
    const Floats tail = multiply(multiply(y, t), exponential(subtract(zeros(), multiply(z, z))));
    return subtract(maximum(x, zeros()), multiply(size, tail));
}

// Arguments: x, x stride, rows, width, out, out stride.
inline void gelu(const int64_t* words) {
    const Arguments arguments{words};
    const float* x = arguments.pointer<const float>(0);
    const int64_t x_stride = arguments.integer(1), rows = arguments.integer(2), width = arguments.integer(3);
    float* out = arguments.pointer<float>(4);
    const int64_t out_stride = arguments.integer(5);
    const int64_t grain = width > 8192 ? 1 : 8192 / (width > 0 ? width : 1) + 1;
    parallel_for(rows, grain, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t i = 0; i < width; i += kLanes) {
                const Floats y = gelu_of(load_part(x + row * x_stride + i, width - i));
                store_part(out + row * out_stride + i, y, width - i);
            }
        }
    });
}

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
