// Sixteen floats in two AVX2 registers. See vector.h.
#pragma once

#include <immintrin.h>

namespace quire {
namespace QUIRE_ISA {

struct Floats { __m256 low, high; };

inline Floats load(const float* source) { return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)}; }
inline Floats load(const Half* source) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(source);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline __m256 widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Floats load(const BFloat* source) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(source);
    return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
}
inline Floats load(const int8_t* source) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store(float* target, Floats a) {
    _mm256_storeu_ps(target, a.low);
    _mm256_storeu_ps(target + 8, a.high);
}
inline void store(Half* target, Floats a) {
    __m128i* halves = reinterpret_cast<__m128i*>(target);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256i rounded_to_sixteen_bits(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
}
inline void store(BFloat* target, Floats a) {
    const __m256i mixed = _mm256_packus_epi32(rounded_to_sixteen_bits(a.low), rounded_to_sixteen_bits(a.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm256_permute4x64_epi64(mixed, 0xd8));
}

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats subtract(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
template <int distance>
inline __m256 butterfly(__m256 a) {
    constexpr int second = distance == 1 ? 0xaa : distance == 2 ? 0xcc : 0xf0;
    const __m256 other = distance == 1   ? _mm256_permute_ps(a, 0xb1)
                         : distance == 2 ? _mm256_permute_ps(a, 0x4e)
                                         : _mm256_permute2f128_ps(a, a, 1);
    return _mm256_blend_ps(_mm256_add_ps(a, other), _mm256_sub_ps(other, a), second);
}
// Lanes `distance` apart become their sum and their difference.
template <int distance>
inline Floats butterfly(Floats a) {
    if constexpr (distance == 8) return {_mm256_add_ps(a.low, a.high), _mm256_sub_ps(a.low, a.high)};
    else return {butterfly<distance>(a.low), butterfly<distance>(a.high)};
}
inline Floats multiply(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats divide(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Floats fused(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats maximum(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats minimum(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Floats absolute(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Floats round_even(Floats a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Floats power_of_two(Floats n) { return {power_of_two(n.low), power_of_two(n.high)}; }
inline __m256 add_to_exponent(__m256 a, __m256 shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
inline Floats add_to_exponent(Floats a, Floats shifted) {
    return {add_to_exponent(a.low, shifted.low), add_to_exponent(a.high, shifted.high)};
}
inline Floats keep_at_least(Floats x, Floats limit, Floats a) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_GE_OQ), a.low),
            _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_GE_OQ), a.high)};
}
inline uint32_t lanes_at_least(Floats a, Floats b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
    return static_cast<uint32_t>(low | high << 8);
}
inline __m256 keep_lanes(__m256 a, __m256i lanes, int first, int last) {
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lanes);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lanes);
    const __m256i mask = _mm256_andnot_si256(before, below);
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), a, _mm256_castsi256_ps(mask));
}
inline Floats keep_lanes(Floats a, int first, int last) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {keep_lanes(a.low, lanes, first, last), keep_lanes(a.high, lanes, first - 8, last - 8)};
}
inline void store_bytes(int8_t* target, Floats a, int8_t flip) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm_xor_si128(bytes, _mm_set1_epi8(flip)));
}
inline Floats load_ints(const int32_t* source) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(source);
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256(halves)), _mm256_cvtepi32_ps(_mm256_loadu_si256(halves + 1))};
}

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(Floats a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m256 sums_of_eight(const Floats* rows) {
    __m256 fours[4], twos[2];
    for (int i = 0; i < 4; ++i) {
        const __m256 a = _mm256_add_ps(rows[i].low, rows[i].high);
        const __m256 b = _mm256_add_ps(rows[i + 4].low, rows[i + 4].high);
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; ++i) {
        const __m256d a = _mm256_castps_pd(fours[i]), b = _mm256_castps_pd(fours[i + 2]);
        twos[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                                _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    const __m256 ones = _mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88),
                                      _mm256_shuffle_ps(twos[0], twos[1], 0xdd));
    return _mm256_permutevar8x32_ps(ones, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
}
inline Floats sums_of(const Floats (&rows)[kLanes]) { return {sums_of_eight(rows), sums_of_eight(rows + 8)}; }

// Sixteen rows do not fit the registers, so this goes through memory.
inline void transpose(Floats (&rows)[kLanes]) {
    float from[kLanes][kLanes], to[kLanes][kLanes];
    for (int i = 0; i < kLanes; ++i) store(from[i], rows[i]);
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < kLanes; ++j) to[j][i] = from[i][j];
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = load(to[i]);
}

}  // namespace QUIRE_ISA
}  // namespace quire
