// See gemm.h. VNNI multiplies unsigned by signed bytes, so activations come with their top bit flipped (+128)
// and the sums start from -128 * (sum of weights).
#pragma once

namespace quire {
namespace QUIRE_ISA {

// One row times two blocks that follow one another: one stream from memory, which is faster than two.
inline void gemm_row(const GemmInput& input, int32_t* result) {
    const int8_t* weights = input.first;
    for (int half = 0; half < 2; ++half, result += kChannels) {
        __m512i even = _mm512_loadu_si512(input.start + half * kChannels), odd = _mm512_setzero_si512();
        for (int64_t group = 0; group < input.num_groups; group += 2, weights += 2 * kChannels * kGroup) {
            prefetch_stream<false>(weights, 2 * kChannels * kGroup);
            int32_t bytes[2];
            std::memcpy(bytes, input.x + group * kGroup, sizeof bytes);
            even = _mm512_dpbusd_epi32(even, _mm512_set1_epi32(bytes[0]), _mm512_loadu_si512(weights));
            odd = _mm512_dpbusd_epi32(odd, _mm512_set1_epi32(bytes[1]), _mm512_loadu_si512(weights + 64));
        }
        _mm512_storeu_si512(result, _mm512_add_epi32(even, odd));
    }
}

// Loops over rows are unrolled before sums are given registers, also where GCC does not inline this.
template <int kRows>
inline void gemm_rows(const GemmInput& input, int32_t* result) {
    __m512i sums[kRows][2];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        sums[row][0] = _mm512_loadu_si512(input.start);
        sums[row][1] = _mm512_loadu_si512(input.start + kChannels);
    }
    const int8_t* first = input.first;
    const int8_t* second = input.second;
    if (kRows == 1 && second == first + input.num_groups * kChannels * kGroup) return gemm_row(input, result);
    for (int64_t group = 0; group < input.num_groups; ++group) {
        const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
        prefetch_stream<(kRows > 8)>(first, kChannels * kGroup);
        prefetch_stream<(kRows > 8)>(second, kChannels * kGroup);
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
            int32_t bytes;
            std::memcpy(&bytes, input.x + row * input.x_stride + group * kGroup, sizeof bytes);
            const __m512i x = _mm512_set1_epi32(bytes);
            sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], x, a);
            sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], x, b);
        }
        first += kChannels * kGroup;
        second += kChannels * kGroup;
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        _mm512_storeu_si512(result + row * kPairChannels, sums[row][0]);
        _mm512_storeu_si512(result + row * kPairChannels + kChannels, sums[row][1]);
    }
}

inline void gemm_avx512(const GemmInput& input, int64_t rows, int32_t* result) {
    switch (rows) {
        case 1: return gemm_rows<1>(input, result);
        case 2: return gemm_rows<2>(input, result);
        case 3: return gemm_rows<3>(input, result);
        case 4: return gemm_rows<4>(input, result);
        case 5: return gemm_rows<5>(input, result);
        case 6: return gemm_rows<6>(input, result);
        case 7: return gemm_rows<7>(input, result);
        case 8: return gemm_rows<8>(input, result);
        case 9: return gemm_rows<9>(input, result);
        case 10: return gemm_rows<10>(input, result);
        case 11: return gemm_rows<11>(input, result);
        default: return gemm_rows<12>(input, result);
    }
}

struct VnniGemm : RowMajor {
    static constexpr int64_t kMaxRows = 12, kRowMultiple = 1;
    static constexpr int8_t kFlip = -128;
    using Session = NoSession;

    template <class Background>
    static void run(const GemmInput& input, int64_t rows, int32_t* result, Background&) {
        gemm_avx512(input, rows, result);
    }
};

#if !defined(__AMX_INT8__)
// Calls function(GEMM) with the best GEMM for this number of rows.
template <class Function>
inline void with_gemm(int64_t, const Function& function) {
    function(VnniGemm{});
}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
