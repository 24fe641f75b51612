// Many queries (a prompt): tiles of keys are transposed and widened once and serve all queries of a block.
#pragma once

#include "narrow.h"
#include "state.h"

namespace quire {
namespace QUIRE_ISA {

#ifdef __AVX512F__
constexpr int kWideRows = 6;      // queries at a time: more products than loads, and their sums fit in the registers
constexpr int kScoreVectors = 2;  // of keys
#else
constexpr int kWideRows = 4;      // there are half as many registers, of half the size
constexpr int kScoreVectors = 1;
#endif
constexpr int kFoldLevels = 3;  // pairs of lanes: 1 << kFoldLevels

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

struct ScoreSums { Floats of[kWideRows][kScoreVectors]; };

template <class Operation>
__attribute__((always_inline)) inline void each_sum(Operation operation) {
#pragma GCC unroll 8
    for (int row = 0; row < kWideRows; ++row) {
#pragma GCC unroll 8
        for (int i = 0; i < kScoreVectors; ++i) operation(row, i);
    }
}

// The products of one lane of head_dim, summed in order, of kWideRows queries with vectors of keys.
template <int kDim>
__attribute__((always_inline)) inline ScoreSums lane_products(const float* queries, int64_t padded_dim,
                                                              const float* keys) {
    const int64_t dim = kDim > 0 ? kDim : padded_dim;
    ScoreSums sums;
    each_sum([&](int row, int i) { sums.of[row][i] = zeros(); });
#pragma GCC unroll 8
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats key[kScoreVectors];
#pragma GCC unroll 8
        for (int j = 0; j < kScoreVectors; ++j) key[j] = load(keys + i * kTilePositions + j * kLanes);
        each_sum([&](int row, int j) {
            sums.of[row][j] = fused(broadcast(queries[row * dim + i]), key[j], sums.of[row][j]);
        });
    }
    return sums;
}

// Scores of kWideRows queries with the first `count` keys of a tile. Lanes of head_dim are folded in the order of `sum`:
// first pairs at a distance of half the lanes, then their sums in the order of a binary counter's carries. Sums that wait for
// their other half are in memory: registers hold the two lanes being added. kDim is padded_dim where it is known when compiling, else 0.
template <int kDim>
inline void wide_scores(const float* queries, int64_t padded_dim, const float* keys, int64_t count, float* scores) {
    constexpr int kHalf = kLanes / 2;
    static constexpr int kPairLanes[1 << kFoldLevels] = {0, 4, 2, 6, 1, 5, 3, 7};
    alignas(64) float waiting[kFoldLevels][kWideRows][kScoreVectors * kLanes];
    for (int64_t first = 0; first < count; first += kScoreVectors * kLanes) {
        for (int pair = 0; pair < 1 << kFoldLevels; ++pair) {
            const int lane = kPairLanes[pair];
            const float *q = queries + lane, *k = keys + lane * kTilePositions + first;
            ScoreSums sums = lane_products<kDim>(q, padded_dim, k);
            const ScoreSums other = lane_products<kDim>(q + kHalf, padded_dim, k + kHalf * kTilePositions);
            each_sum([&](int row, int i) { sums.of[row][i] = add(sums.of[row][i], other.of[row][i]); });
            int level = 0;
            for (; pair >> level & 1; ++level) {
                each_sum([&](int row, int i) {
                    sums.of[row][i] = add(load(waiting[level][row] + i * kLanes), sums.of[row][i]);
                });
            }
            float* target = level < kFoldLevels ? waiting[level][0] : scores + first;
            const int64_t stride = level < kFoldLevels ? kScoreVectors * kLanes : kTilePositions;
            each_sum([&](int row, int i) { store(target + row * stride + i * kLanes, sums.of[row][i]); });
        }
    }
}

// Adds probability * value over the first `count` positions of a tile to kVectors vectors of kWideRows queries, from
// `start` on; says where it stopped.
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

// Adds probability * value over the first `count` positions of a tile, for kWideRows queries.
inline void wide_values(const State* states, const float* probabilities, const float* values, int64_t padded_dim,
                        int64_t count) {
    int64_t start = wide_columns<4>(states, probabilities, values, padded_dim, count, 0);
    start = wide_columns<2>(states, probabilities, values, padded_dim, count, start);
    wide_columns<1>(states, probabilities, values, padded_dim, count, start);
}

// `num_rows` queries (a multiple of kWideRows), at rising `positions`, over positions [start, end) of one segment.
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
