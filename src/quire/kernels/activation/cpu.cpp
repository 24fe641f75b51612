// silu(gate) * up, gelu(gate) * up, and GELU.
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

// x * (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Floats gelu_tanh_of(Floats x) {
    const Floats inner = fused(multiply(x, x), broadcast(0.044715f), broadcast(1.0f));
    const Floats power = multiply(multiply(x, inner), broadcast(-1.5957691f));
    return divide(x, add(broadcast(1.0f), exponential(power)));
}

// gate_times(gate, up) of every pair. Arguments: x, x stride, rows, F, out, out stride.
template <typename GateTimes>
inline void gated(const int64_t* words, GateTimes gate_times) {
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
                const Floats y = gate_times(load_part(gate + i, width - i), load_part(up + i, width - i));
                store_part(out + row * out_stride + i, y, width - i);
            }
        }
    });
}

inline void silu_mul(const int64_t* words) {
    gated(words, [](Floats gate, Floats up) { return silu_times(gate, up); });
}

inline void gelu_mul(const int64_t* words) {
    gated(words, [](Floats gate, Floats up) { return multiply(gelu_of(gate), up); });
}

inline void gelu_tanh_mul(const int64_t* words) {
    gated(words, [](Floats gate, Floats up) { return multiply(gelu_tanh_of(gate), up); });
}

}  // namespace QUIRE_ISA
}  // namespace quire
