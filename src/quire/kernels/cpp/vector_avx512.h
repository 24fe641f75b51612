// Sixteen floats in one AVX-512 register. See vector.h.
#pragma once

#include <immintrin.h>

namespace quire {
namespace QUIRE_ISA {

struct Floats { __m512 v; };

inline Floats load(const float* source) { return {_mm512_loadu_ps(source)}; }
inline Floats load(const Half* source) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))};
}
inline Floats load(const BFloat* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Floats load(const int8_t* source) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))))};
}
inline void store(float* target, Floats a) { _mm512_storeu_ps(target, a.v); }
inline void store(Half* target, Floats a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat* target, Floats a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats subtract(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
// Lanes `distance` apart become their sum and their difference.
template <int distance>
inline Floats butterfly(Floats a) {
    constexpr __mmask16 second = distance == 1 ? 0xaaaa : distance == 2 ? 0xcccc : distance == 4 ? 0xf0f0 : 0xff00;
    const __m512 other = distance == 1   ? _mm512_permute_ps(a.v, 0xb1)
                         : distance == 2 ? _mm512_permute_ps(a.v, 0x4e)
                         : distance == 4 ? _mm512_shuffle_f32x4(a.v, a.v, 0xb1)
                                         : _mm512_shuffle_f32x4(a.v, a.v, 0x4e);
    return {_mm512_mask_sub_ps(_mm512_add_ps(a.v, other), second, other, a.v)};
}
inline Floats multiply(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats divide(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats round_even(Floats a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for whole n in [-126, 127].
inline Floats power_of_two(Floats n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
// a * 2^n, where the lowest bits of `shifted` are n.
inline Floats add_to_exponent(Floats a, Floats shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), exponent))};
}
// a where x >= limit, else zero.
inline Floats keep_at_least(Floats x, Floats limit, Floats a) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), a.v)};
}
// One bit per lane where a >= b.
inline uint32_t lanes_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// Lanes first .. last - 1 of a, the others -infinity.
inline Floats keep_lanes(Floats a, int first, int last) {
    const uint32_t mask = ((1u << last) - 1u) & ~((1u << first) - 1u);
    return {_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), static_cast<__mmask16>(mask), a.v)};
}
// Whole floats in [-128, 127] to bytes, xor-ed with `flip`.
inline void store_bytes(int8_t* target, Floats a, int8_t flip) {
    const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm_xor_si128(bytes, _mm_set1_epi8(flip)));
}
inline Floats load_ints(const int32_t* source) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(source))}; }

inline __m256 low_half(__m512 a) { return _mm512_castps512_ps256(a); }
inline __m256 high_half(__m512 a) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(low_half(a.v), high_half(a.v));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }

// Lane j of the result is sum(rows[j]).
inline Floats sums_of(const Floats (&rows)[kLanes]) {
    __m512 eights[8], fours[4], twos[2];
    for (int i = 0; i < 8; ++i) {
        const __m512 a = rows[i].v, b = rows[i + 8].v;
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 a = eights[i], b = eights[i + 4];
        fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(fours[i]), b = _mm512_castps_pd(fours[i + 2]);
        twos[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 ones = _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88),
                                      _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
    // Four lanes of 128 bits hold rows {0, 2, 1, 3}, each plus {0, 8, 4, 12}.
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return {_mm512_permutexvar_ps(order, ones)};
}

// rows[i] lane j becomes rows[j] lane i.
inline void transpose(Floats (&rows)[kLanes]) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int half = 0; half < 2; ++half) {
            const __m512d x = _mm512_castps_pd(a[i + half]), y = _mm512_castps_pd(a[i + half + 2]);
            b[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            b[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i].v = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        rows[i + 8].v = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
        rows[i + 4].v = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 12].v = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
