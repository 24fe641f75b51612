// The int8 micro-GEMM: quantized rows times 2 x 16 output channels, per instruction set.
//
// A weight is packed as [blocks of 16 channels][groups of 4 columns][16 channels][4 columns]: 64 bytes feed one
// VNNI instruction, and 16 groups (1 KiB) are one AMX tile.
#pragma once

#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kChannels = 16;                // channels of a packed block
constexpr int kPairChannels = 2 * kChannels;  // output channels of one call
constexpr int kGroup = 4;                    // columns of a packed group

struct GemmInput {
    const int8_t* x;  // rows of x, in the GEMM's layout
    int64_t x_stride;
    const int8_t* first;  // a packed block, num_groups * 64 bytes
    const int8_t* second;
    int64_t num_groups;
    const int8_t* ahead_first;  // the blocks that come next, to be asked for meanwhile; null: none
    const int8_t* ahead_second;
    const int32_t* start;  // [32] what the sums start from; for flipped activations -128 * (sum of weights)
};

// A GEMM has
//   kMaxRows      rows of one call
//   kRowMultiple  x has readable rows up to a multiple of this
//   kFlip         what activation bytes are xor-ed with: VNNI wants them unsigned
//   place()       where column `column` of row `row` of x lies; 16 columns from a multiple of 16 lie together
//   Session       what a thread holds while it multiplies
//   run()         sums of `rows` rows to result [rows][32]; calls background(n) in between with n adding up to at
//                 least kMaxRows, so that vector units finish earlier rows while tiles are at work, or not at all

struct NoSession {};

// Asks for `lines` cache lines of the next blocks, into the second-level cache: the first is full of the current ones.
inline void prefetch_ahead(const GemmInput& input, int64_t offset, int lines) {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(input.ahead_first + offset + i * 64, 0, 2);
    for (int i = 0; i < lines; ++i) __builtin_prefetch(input.ahead_second + offset + i * 64, 0, 2);
}

struct RowMajor {
    static int64_t place(int64_t row, int64_t column, int64_t padded_columns) {
        return row * padded_columns + column;
    }
};

}  // namespace QUIRE_ISA
}  // namespace quire

#if defined(__AVX512VNNI__)
#include "gemm_avx512.h"
#if defined(__AMX_INT8__)
#include "gemm_amx.h"
#endif
#elif defined(__AVX2__)
#include "gemm_avx2.h"
#else
#include "gemm_generic.h"
#endif
