// See gemm.h. Without VNNI, bytes are multiplied as |x| * (w with the sign of x): two such products stay within
// 16 bits because neither factor is ever -128.
#pragma once

namespace quire {
namespace QUIRE_ISA {

template <int kRows>
inline void gemm_rows(const GemmInput& input, int32_t* result) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[kRows][4];
    for (int row = 0; row < kRows; ++row) {
        for (int part = 0; part < 4; ++part) sums[row][part] = _mm256_setzero_si256();
    }
    for (int64_t group = 0; group < input.num_groups; ++group) {
        const __m256i* first = reinterpret_cast<const __m256i*>(input.first + group * kChannels * kGroup);
        const __m256i* second = reinterpret_cast<const __m256i*>(input.second + group * kChannels * kGroup);
        const __m256i weights[4] = {_mm256_loadu_si256(first), _mm256_loadu_si256(first + 1),
                                    _mm256_loadu_si256(second), _mm256_loadu_si256(second + 1)};
        for (int row = 0; row < kRows; ++row) {
            int32_t bytes;
            std::memcpy(&bytes, input.x + row * input.x_stride + group * kGroup, sizeof bytes);
            const __m256i x = _mm256_set1_epi32(bytes), magnitude = _mm256_abs_epi8(x);
            for (int part = 0; part < 4; ++part) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(weights[part], x));
                sums[row][part] = _mm256_add_epi32(sums[row][part], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    for (int row = 0; row < kRows; ++row) {
        for (int part = 0; part < 4; ++part) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(result + row * kPairChannels + part * 8),
                                sums[row][part]);
        }
    }
}

inline void gemm_avx2(const GemmInput& input, int64_t rows, int32_t* result) {
    if (rows == 2) gemm_rows<2>(input, result);
    else gemm_rows<1>(input, result);
}

struct Avx2Gemm : RowMajor {
    static constexpr int64_t kMaxRows = 2, kRowMultiple = 1;
    static constexpr int8_t kFlip = 0;
    using Session = NoSession;

    template <class Background>
    static void run(const GemmInput& input, int64_t rows, int32_t* result, Background&) {
        gemm_avx2(input, rows, result);
    }
};

// Calls function(GEMM) with the best GEMM for this number of rows.
template <class Function>
inline void with_gemm(int64_t, const Function& function) {
    function(Avx2Gemm{});
}

}  // namespace QUIRE_ISA
}  // namespace quire
