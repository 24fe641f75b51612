// See gemm.h. VNNI multiplies unsigned by signed bytes, so activations come with their top bit flipped (+128)
// and the sums start from -128 * (sum of weights).
#pragma once

namespace quire {
namespace QUIRE_ISA {

#if defined(__AMX_INT8__)
constexpr bool kStreams = false;  // not measured there
#else
constexpr bool kStreams = true;
#endif

// Two blocks that follow one another, one after the other: one stream comes faster from memory than two that are side by
// side. The second-level cache is asked for what comes 16 KiB later.
template <int kRows>
inline void gemm_stream(const GemmInput& input, int32_t* result) {
    const int8_t* weights = input.first;
    for (int half = 0; half < 2; ++half) {
        __m512i sums[kRows];
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) sums[row] = _mm512_loadu_si512(input.start + half * kChannels);
        for (int64_t group = 0; group < input.num_groups; ++group, weights += kChannels * kGroup) {
            const __m512i block = _mm512_loadu_si512(weights);
            __builtin_prefetch(weights + (16 << 10), 0, 2);
#pragma GCC unroll 12
            for (int row = 0; row < kRows; ++row) {
                int32_t bytes;
                std::memcpy(&bytes, input.x + row * input.x_stride + group * kGroup, sizeof bytes);
                sums[row] = _mm512_dpbusd_epi32(sums[row], _mm512_set1_epi32(bytes), block);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
            _mm512_storeu_si512(result + row * kPairChannels + half * kChannels, sums[row]);
        }
    }
}

// Loops over rows are unrolled before sums are given registers, also where GCC does not inline this.
template <int kRows>
inline void gemm_rows(const GemmInput& input, int32_t* result) {
    const bool from_memory = kRows == 1 || (kStreams && input.ahead_first != nullptr);  // else earlier rows have read them
    if (from_memory && input.second == input.first + input.num_groups * kChannels * kGroup) {
        return gemm_stream<kRows>(input, result);
    }
    __m512i sums[kRows][2];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        sums[row][0] = _mm512_loadu_si512(input.start);
        sums[row][1] = _mm512_loadu_si512(input.start + kChannels);
    }
    const int8_t* first = input.first;
    const int8_t* second = input.second;
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
