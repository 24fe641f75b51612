// Many queries (a prompt): tiles of keys are transposed and widened once and serve all queries of a block.
#pragma once

#include "narrow.h"
#include "state.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kWideRows = 4;

// Sixty-four positions: keys as [padded_dim][64], values as [64][padded_dim]. Positions beyond the context are zero,
// since their slots may hold any bits.
struct WideTile {
    float* keys;
    float* values;

    static int64_t floats(int64_t padded_dim) { return 2 * padded_dim * kTilePositions; }
};

template <class Element>
inline void widen_keys(const TileRows<Element>& rows, int64_t head_dim, int64_t padded_dim, float* keys) {
    for (int64_t first = 0; first < kTilePositions; first += kLanes) {
        for (int64_t i = 0; i < padded_dim; i += kLanes) {
            Floats block[kLanes];
            for (int j = 0; j < kLanes; ++j) {
                const int64_t position = first + j;
                block[j] = position < rows.count ? load_part(rows.row[position] + i, head_dim - i) : zeros();
            }
            transpose(block);
            for (int j = 0; j < kLanes; ++j) store(keys + (i + j) * kTilePositions + first, block[j]);
        }
    }
}

template <class Element>
inline void widen_values(const TileRows<Element>& rows, int64_t head_dim, int64_t padded_dim, float* values) {
    for (int64_t position = 0; position < kTilePositions; ++position) {
        for (int64_t i = 0; i < padded_dim; i += kLanes) {
            const Floats value = position < rows.count ? load_part(rows.row[position] + i, head_dim - i) : zeros();
            store(values + position * padded_dim + i, value);
        }
    }
}

struct FourRows { Floats row[kWideRows]; };

// Lanes kLane, kLane + kStride, ... of head_dim, folded in the order of `sum`: the lane's own products first.
// kDim is padded_dim where it is known when compiling, else 0.
template <int kLane, int kStride, int kDim>
__attribute__((always_inline)) inline FourRows folded_products(const float* queries, int64_t padded_dim,
                                                               const float* keys) {
    FourRows result;
    if constexpr (kStride == kLanes) {
        const int64_t dim = kDim > 0 ? kDim : padded_dim;
        for (int row = 0; row < kWideRows; ++row) result.row[row] = zeros();
        for (int64_t i = kLane; i < dim; i += kLanes) {
            const Floats key = load(keys + i * kTilePositions);
            for (int row = 0; row < kWideRows; ++row) {
                result.row[row] = fused(broadcast(queries[row * dim + i]), key, result.row[row]);
            }
        }
    } else {
        const FourRows low = folded_products<kLane, 2 * kStride, kDim>(queries, padded_dim, keys);
        const FourRows high = folded_products<kLane + kStride, 2 * kStride, kDim>(queries, padded_dim, keys);
        for (int row = 0; row < kWideRows; ++row) result.row[row] = add(low.row[row], high.row[row]);
    }
    return result;
}

// Scores of four queries with the first `count` keys of a tile.
template <int kDim>
inline void wide_scores(const float* queries, int64_t padded_dim, const float* keys, int64_t count, float* scores) {
    for (int64_t first = 0; first < count; first += kLanes) {
        const FourRows folded = folded_products<0, 1, kDim>(queries, padded_dim, keys + first);
        for (int row = 0; row < kWideRows; ++row) store(scores + row * kTilePositions + first, folded.row[row]);
    }
}

// Adds probability * value over the first `count` positions of a tile to kVectors vectors of four queries, from `start`
// on; says where it stopped.
template <int kVectors>
inline int64_t wide_columns(const State* states, const float* probabilities, const float* values, int64_t padded_dim,
                            int64_t count, int64_t start) {
    for (; start + kVectors * kLanes <= padded_dim; start += kVectors * kLanes) {
        Floats sums[kWideRows][kVectors];
        for (int row = 0; row < kWideRows; ++row) {
            for (int i = 0; i < kVectors; ++i) sums[row][i] = load(states[row].values() + start + i * kLanes);
        }
        for (int64_t j = 0; j < count; ++j) {
            Floats value[kVectors];
            for (int i = 0; i < kVectors; ++i) value[i] = load(values + j * padded_dim + start + i * kLanes);
            for (int row = 0; row < kWideRows; ++row) {
                const Floats probability = broadcast(probabilities[row * kTilePositions + j]);
                for (int i = 0; i < kVectors; ++i) sums[row][i] = fused(probability, value[i], sums[row][i]);
            }
        }
        for (int row = 0; row < kWideRows; ++row) {
            for (int i = 0; i < kVectors; ++i) store(states[row].values() + start + i * kLanes, sums[row][i]);
        }
    }
    return start;
}

// Adds probability * value over the first `count` positions of a tile, for four queries.
inline void wide_values(const State* states, const float* probabilities, const float* values, int64_t padded_dim,
                        int64_t count) {
    int64_t start = wide_columns<4>(states, probabilities, values, padded_dim, count, 0);
    start = wide_columns<2>(states, probabilities, values, padded_dim, count, start);
    wide_columns<1>(states, probabilities, values, padded_dim, count, start);
}

// `num_rows` queries (a multiple of four), at rising `positions`, over positions [start, end) of one segment.
template <class Element>
inline void wide_segment(const AttentionProblem& p, const int32_t* table, int64_t kv_head, int64_t num_rows,
                         const float* queries, const int64_t* positions, const State* states, int64_t start,
                         int64_t end, WideTile wide) {
    const int64_t padded_dim = p.padded_dim();
    alignas(64) float scores[kWideRows * kTilePositions];
    TileRows<Element> rows;
    TileScales scales;
    const bool has_scales = sizeof(Element) == 1;
    for (int64_t tile = start / kTilePositions * kTilePositions; tile < end; tile += kTilePositions) {
        const int64_t tile_end = tile + kTilePositions < end ? tile + kTilePositions : end;
        rows.find(p, p.k, table, kv_head, tile, tile_end);
        widen_keys(rows, p.head_dim, padded_dim, wide.keys);
        rows.find(p, p.v, table, kv_head, tile, tile_end);
        widen_values(rows, p.head_dim, padded_dim, wide.values);
        if (has_scales) scales.read(p, table, kv_head, tile, tile_end);
        for (int64_t row = 0; row < num_rows; row += kWideRows) {
            const int64_t furthest = positions[row + kWideRows - 1] + 1;
            const int64_t count = (furthest < tile_end ? furthest : tile_end) - tile;
            if (count <= 0 || p.first_seen(positions[row]) >= tile_end) continue;
            const float* q = queries + row * padded_dim;
            if (padded_dim == 64) wide_scores<64>(q, padded_dim, wide.keys, count, scores);
            else if (padded_dim == 32) wide_scores<32>(q, padded_dim, wide.keys, count, scores);
            else wide_scores<0>(q, padded_dim, wide.keys, count, scores);
            for (int i = 0; i < kWideRows; ++i) {
                const int64_t position = positions[row + i];
                const int64_t last = position + 1 < tile_end ? position + 1 : tile_end;
                adjust_scores(p, scores + i * kTilePositions, kv_head, row + i, position, tile,
                              has_scales ? &scales : nullptr);
                absorb_scores(states[row + i], scores + i * kTilePositions, p.first_seen(position) - tile,
                              last - tile, padded_dim, has_scales ? &scales : nullptr, p.adjusts());
            }
            wide_values(states + row, scores, wide.values, padded_dim, count);
        }
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
