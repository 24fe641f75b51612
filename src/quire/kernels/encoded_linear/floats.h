// Rows that a quantized model keeps in floats, times x in float32: even and odd columns are summed apart, in order.
#pragma once

#include "tile.h"

namespace quire {
namespace QUIRE_ISA {

struct FloatInput {
    const uint8_t* first;  // a packed block: [columns][16]
    const uint8_t* second;
    int64_t columns;
    const float* x;
    int64_t x_stride;
    float* sums;  // [rows][32]
};

template <class Element, int kRows>
inline void float_rows(const FloatInput& input) {
    Floats totals[kRows][2][2];
    for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 4; ++i) totals[row][i / 2][i % 2] = zeros();
    }
    const Element* first = reinterpret_cast<const Element*>(input.first);
    const Element* second = reinterpret_cast<const Element*>(input.second);
    const auto add_column = [&](int64_t column, int odd) {
        const Floats a = load(first + column * kTileChannels), b = load(second + column * kTileChannels);
        for (int row = 0; row < kRows; ++row) {
            const Floats x = broadcast(input.x[row * input.x_stride + column]);
            totals[row][0][odd] = fused(a, x, totals[row][0][odd]);
            totals[row][1][odd] = fused(b, x, totals[row][1][odd]);
        }
    };
    int64_t column = 0;
    for (; column + 2 <= input.columns; column += 2) {
        prefetch_stream<(kRows > 1)>(first + column * kTileChannels, 2 * kTileChannels * sizeof(Element));
        prefetch_stream<(kRows > 1)>(second + column * kTileChannels, 2 * kTileChannels * sizeof(Element));
        add_column(column, 0);
        add_column(column + 1, 1);
    }
    if (column < input.columns) add_column(column, 0);
    for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 2; ++i) {
            store(input.sums + row * 32 + i * kTileChannels, add(totals[row][i][0], totals[row][i][1]));
        }
    }
}

template <class Element>
inline void float_gemm(FloatInput input, int64_t rows) {
    constexpr int kMost = 4;
    for (; rows >= kMost; rows -= kMost, input.x += kMost * input.x_stride, input.sums += kMost * 32) {
        float_rows<Element, kMost>(input);
    }
    for (; rows > 0; --rows, input.x += input.x_stride, input.sums += 32) float_rows<Element, 1>(input);
}

inline void float_gemm(const FloatInput& input, int64_t rows, int64_t coding) {
    if (coding == kFloat32) float_gemm<float>(input, rows);
    else if (coding == kFloat16) float_gemm<Half>(input, rows);
    else float_gemm<BFloat>(input, rows);
}

}  // namespace QUIRE_ISA
}  // namespace quire
