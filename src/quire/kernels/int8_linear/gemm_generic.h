// See gemm.h.
#pragma once

namespace quire {
namespace QUIRE_ISA {

inline void gemm_generic(const GemmInput& input, int64_t rows, int32_t* result) {
    for (int64_t row = 0; row < rows; ++row) {
        const int8_t* x = input.x + row * input.x_stride;
        int32_t sums[kPairChannels] = {};
        for (int64_t group = 0; group < input.num_groups; ++group, x += kGroup) {
            const int8_t* first = input.first + group * kChannels * kGroup;
            const int8_t* second = input.second + group * kChannels * kGroup;
            for (int channel = 0; channel < kChannels; ++channel) {
                for (int i = 0; i < kGroup; ++i) {
                    sums[channel] += x[i] * first[channel * kGroup + i];
                    sums[channel + kChannels] += x[i] * second[channel * kGroup + i];
                }
            }
        }
        for (int channel = 0; channel < kPairChannels; ++channel) {
            result[row * kPairChannels + channel] = sums[channel];
        }
    }
}

struct GenericGemm : RowMajor {
    static constexpr int64_t kMaxRows = 1, kRowMultiple = 1;
    static constexpr int8_t kFlip = 0;
    using Session = NoSession;

    template <class Background>
    static void run(const GemmInput& input, int64_t rows, int32_t* result, Background&) {
        gemm_generic(input, rows, result);
    }
};

// Calls function(GEMM) with the best GEMM for this number of rows.
template <class Function>
inline void with_gemm(int64_t, const Function& function) {
    function(GenericGemm{});
}

}  // namespace QUIRE_ISA
}  // namespace quire
