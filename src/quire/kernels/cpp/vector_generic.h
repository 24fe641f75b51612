// Sixteen floats in plain C++, for any CPU and compiler. See vector.h.
#pragma once

#include <cmath>

namespace quire {
namespace QUIRE_ISA {

struct Floats { float lane[kLanes]; };

template <class Function>
inline Floats each(const Function& function) {
    Floats result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
    return result;
}

inline float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
}

inline uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return sign | 0x7e00u | static_cast<uint16_t>((magnitude >> 13) & 0x3ffu);
    if (magnitude >= 0x47800000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {  // subnormal in fp16: let the adder round to multiples of 2^-24
        return sign | static_cast<uint16_t>(bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u);
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return sign | static_cast<uint16_t>((magnitude + 0xfffu + odd - 0x38000000u) >> 13);
}

inline Floats load(const float* source) { return each([=](int i) { return source[i]; }); }
inline Floats load(const Half* source) { return each([=](int i) { return float_of_half(source[i].bits); }); }
inline Floats load(const BFloat* source) {
    return each([=](int i) { return float_of_bits(static_cast<uint32_t>(source[i].bits) << 16); });
}
inline Floats load(const int8_t* source) { return each([=](int i) { return static_cast<float>(source[i]); }); }
inline void store(float* target, Floats a) {
    for (int i = 0; i < kLanes; ++i) target[i] = a.lane[i];
}
inline void store(Half* target, Floats a) {
    for (int i = 0; i < kLanes; ++i) target[i].bits = half_of_float(a.lane[i]);
}
inline void store(BFloat* target, Floats a) {
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t bits = bits_of_float(a.lane[i]);
        target[i].bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
}

inline Floats broadcast(float x) { return each([=](int) { return x; }); }
inline Floats add(Floats a, Floats b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline Floats subtract(Floats a, Floats b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
// Lanes `distance` apart become their sum and their difference.
template <int distance>
inline Floats butterfly(Floats a) {
    return each([&](int i) {
        const float other = a.lane[i ^ distance];
        return (i & distance) != 0 ? other - a.lane[i] : a.lane[i] + other;
    });
}
inline Floats multiply(Floats a, Floats b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
inline Floats divide(Floats a, Floats b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
inline Floats fused(Floats a, Floats b, Floats c) {
    return each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
// The order of the comparison is that of the vector instructions, which matters when a lane is not a number.
inline Floats maximum(Floats a, Floats b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats minimum(Floats a, Floats b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats absolute(Floats a) { return each([&](int i) { return __builtin_fabsf(a.lane[i]); }); }
inline Floats round_even(Floats a) { return each([&](int i) { return __builtin_rintf(a.lane[i]); }); }
inline Floats power_of_two(Floats n) {
    return each([&](int i) {
        return float_of_bits(static_cast<uint32_t>(static_cast<int32_t>(n.lane[i]) + 127) << 23);
    });
}
inline Floats add_to_exponent(Floats a, Floats shifted) {
    return each([&](int i) {
        return float_of_bits(bits_of_float(a.lane[i]) + (bits_of_float(shifted.lane[i]) << 23));
    });
}
inline Floats keep_at_least(Floats x, Floats limit, Floats a) {
    return each([&](int i) { return x.lane[i] >= limit.lane[i] ? a.lane[i] : 0.0f; });
}
inline uint32_t lanes_at_least(Floats a, Floats b) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.lane[i] >= b.lane[i]) << i;
    return mask;
}
inline Floats keep_lanes(Floats a, int first, int last) {
    return each([&](int i) { return i >= first && i < last ? a.lane[i] : -__builtin_inff(); });
}
inline void store_bytes(int8_t* target, Floats a, int8_t flip) {
    for (int i = 0; i < kLanes; ++i) {
        const float x = a.lane[i];
        const int whole = x >= 127.0f ? 127 : x > -128.0f ? static_cast<int>(x) : -128;
        target[i] = static_cast<int8_t>(whole ^ flip);
    }
}
inline Floats load_ints(const int32_t* source) {
    return each([=](int i) { return static_cast<float>(source[i]); });
}

inline float sum(Floats a) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) a.lane[i] += a.lane[i + width];
    }
    return a.lane[0];
}
inline float largest(Floats a) {
    float result = a.lane[0];
    for (int i = 1; i < kLanes; ++i) result = a.lane[i] > result ? a.lane[i] : result;
    return result;
}
inline Floats sums_of(const Floats (&rows)[kLanes]) { return each([&](int i) { return sum(rows[i]); }); }
inline void transpose(Floats (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < i; ++j) {
            const float swapped = rows[i].lane[j];
            rows[i].lane[j] = rows[j].lane[i];
            rows[j].lane[i] = swapped;
        }
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
