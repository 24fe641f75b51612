// Few queries over one segment (a decode): keys and values are read where they lie, once for up to four queries.
#pragma once

#include "state.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kNarrowRows = 4;

// Rows of a page tensor for the positions of one tile.
template <class Element>
struct TileRows {
    const Element* row[kTilePositions] = {};
    int64_t count = 0;

    void find(const AttentionProblem& p, const PagedTensor& pages, const Where& where, int64_t kv_head,
              int64_t start, int64_t end) {
        count = end - start;
        const int32_t* table = where.table;
        const Element* data = static_cast<const Element*>(pages.data) + kv_head * pages.head_stride;
        if (where.has_tree_before(end)) return find_in_tree(p, pages, where, data, start);
        int64_t logical = start / p.block_size, offset = start - logical * p.block_size;
        const Element* slot = data + table[logical] * pages.block_stride + offset * pages.slot_stride;
        if (pages.scales != nullptr) __builtin_prefetch(pages.scales_of(table[logical], kv_head));
        for (int64_t i = 0; i < count; ++i) {
            row[i] = slot;
            slot += pages.slot_stride;
            if (++offset == p.block_size && i + 1 < count) {
                offset = 0;
                slot = data + table[++logical] * pages.block_stride;
                if (pages.scales != nullptr) __builtin_prefetch(pages.scales_of(table[logical], kv_head));
            }
        }
    }

    void find_in_tree(const AttentionProblem& p, const PagedTensor& pages, const Where& where, const Element* data,
                      int64_t start) {
        Places places(where, start);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t place = places.next();
            row[i] = data + where.table[place / p.block_size] * pages.block_stride +
                     place % p.block_size * pages.slot_stride;
        }
    }
};

// Pages lie scattered, so the hardware does not foresee the next row: it is asked for while another is at work.
template <class Element>
inline void prefetch_row(const Element* row, int64_t head_dim) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t i = 0; i < head_dim * static_cast<int64_t>(sizeof(Element)); i += 64) __builtin_prefetch(bytes + i);
}

// Scores of kRows queries with up to 64 keys; those from keys.count on are left as they are.
template <int kRows, class Element>
inline void narrow_scores(const float* queries, int64_t padded_dim, int64_t head_dim, const TileRows<Element>& keys,
                          const TileRows<Element>& ahead, float* scores) {
    Floats products[kRows][kLanes];
    const int64_t whole = head_dim / kLanes * kLanes;
    for (int64_t first = 0; first < keys.count; first += kLanes) {
        const int64_t left = keys.count - first;
        for (int j = 0; j < kLanes; ++j) {
            const int64_t position = first + (j < left ? j : left - 1);
            const Element* key = keys.row[position];
            prefetch_row(ahead.row[position], head_dim);
            Floats sums[kRows];
            for (int row = 0; row < kRows; ++row) sums[row] = zeros();
            for (int64_t i = 0; i < whole; i += kLanes) {
                const Floats vector = load(key + i);
                for (int row = 0; row < kRows; ++row) {
                    sums[row] = fused(load(queries + row * padded_dim + i), vector, sums[row]);
                }
            }
            if (whole < head_dim) {
                const Floats vector = load_part(key + whole, head_dim - whole);
                for (int row = 0; row < kRows; ++row) {
                    sums[row] = fused(load(queries + row * padded_dim + whole), vector, sums[row]);
                }
            }
            for (int row = 0; row < kRows; ++row) products[row][j] = sums[row];
        }
        for (int row = 0; row < kRows; ++row) {
            store(scores + row * kTilePositions + first, sums_of(products[row]));
        }
    }
}

// Adds probability * value over the positions of a tile, for kVectors * 16 elements of head_dim from `start` on.
template <int kRows, int kVectors, bool kPart, class Element>
inline void narrow_values_part(const State* states, const float* probabilities, const TileRows<Element>& values,
                               const TileRows<Element>& ahead, int64_t start, int64_t head_dim) {
    Floats sums[kRows][kVectors];
    for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kVectors; ++i) sums[row][i] = load(states[row].values() + start + i * kLanes);
    }
    for (int64_t j = 0; j < values.count; ++j) {
        if (start == 0) prefetch_row(ahead.row[j], head_dim);
        Floats probability[kRows];
        for (int row = 0; row < kRows; ++row) {
            probability[row] = broadcast(probabilities[row * kTilePositions + j]);
        }
        for (int i = 0; i < kVectors; ++i) {
            const Element* element = values.row[j] + start + i * kLanes;
            const Floats value = kPart ? load_part(element, head_dim - start - i * kLanes) : load(element);
            for (int row = 0; row < kRows; ++row) sums[row][i] = fused(probability[row], value, sums[row][i]);
        }
    }
    for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kVectors; ++i) store(states[row].values() + start + i * kLanes, sums[row][i]);
    }
}

template <int kRows, class Element>
inline void narrow_values(const State* states, const float* probabilities, const TileRows<Element>& values,
                          const TileRows<Element>& ahead, int64_t head_dim) {
    int64_t start = 0;
    for (; start + 4 * kLanes <= head_dim; start += 4 * kLanes) {
        narrow_values_part<kRows, 4, false>(states, probabilities, values, ahead, start, head_dim);
    }
    for (; start < head_dim; start += kLanes) {
        narrow_values_part<kRows, 1, true>(states, probabilities, values, ahead, start, head_dim);
    }
}

// kRows queries, at `positions`, over positions [start, end) of one segment. `following` are the keys that the thread
// will read after these.
template <int kRows, class Element>
inline void narrow_rows(const AttentionProblem& p, const Where& table, int64_t kv_head, int64_t first_row,
                        const float* queries, const int64_t* positions, const State* states, int64_t start, int64_t end,
                        const TileRows<Element>& following) {
    const int64_t padded_dim = p.padded_dim();
    alignas(64) float scores[kRows * kTilePositions];
    TileRows<Element> keys, values, next;
    TileScales scales;
    const bool has_scales = sizeof(Element) == 1;
    const int64_t first_tile = start / kTilePositions * kTilePositions;
    const auto end_of = [&](int64_t tile) { return tile + kTilePositions < end ? tile + kTilePositions : end; };
    keys.find(p, p.k, table, kv_head, first_tile, end_of(first_tile));
    for (int64_t tile = first_tile; tile < end; tile += kTilePositions) {
        const int64_t tile_end = end_of(tile), next_tile = tile + kTilePositions;
        values.find(p, p.v, table, kv_head, tile, tile_end);
        narrow_scores<kRows>(queries, padded_dim, p.head_dim, keys, values, scores);
        if (has_scales) scales.read(p, table, kv_head, tile, tile_end);
        for (int row = 0; row < kRows; ++row) {
            const int64_t last = positions[row] + 1 < tile_end ? positions[row] + 1 : tile_end;
            adjust_scores(p, scores + row * kTilePositions, kv_head, first_row + row, positions[row], tile,
                          has_scales ? &scales : nullptr);
            absorb_scores(states[row], scores + row * kTilePositions, p.first_seen(positions[row]) - tile,
                          last - tile, padded_dim, has_scales ? &scales : nullptr, p.adjusts());
        }
        if (next_tile < end) {
            next = keys;  // a shorter last tile still needs somewhere to point
            next.find(p, p.k, table, kv_head, next_tile, end_of(next_tile));
            narrow_values<kRows>(states, scores, values, next, p.head_dim);
            keys = next;
        } else {
            narrow_values<kRows>(states, scores, values, following, p.head_dim);
        }
    }
}

template <class Element>
inline void narrow_segment(const AttentionProblem& p, const Where& table, int64_t kv_head, int64_t num_rows,
                           const float* queries, const int64_t* positions, const State* states, int64_t start,
                           int64_t end, const TileRows<Element>& following) {
    for (int64_t row = 0; row < num_rows; row += kNarrowRows) {
        const float* q = queries + row * p.padded_dim();
        const int64_t* at = positions + row;
        switch (num_rows - row) {
            case 1: narrow_rows<1, Element>(p, table, kv_head, row, q, at, states + row, start, end, following); break;
            case 2: narrow_rows<2, Element>(p, table, kv_head, row, q, at, states + row, start, end, following); break;
            case 3: narrow_rows<3, Element>(p, table, kv_head, row, q, at, states + row, start, end, following); break;
            default: narrow_rows<4, Element>(p, table, kv_head, row, q, at, states + row, start, end, following); break;
        }
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
