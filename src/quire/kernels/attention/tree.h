// Many queries of one request over its segments: a prompt's, which see all before them, and a token tree's.
#pragma once

#include "narrow.h"
#include "state.h"
#include "wide.h"

namespace quire {
namespace QUIRE_ISA {

// A thread's memory for one wide item.
struct WideScratch {
    State* current;
    State* total;
    int64_t* positions;
    float* queries;
    WideTile tile;

    WideScratch(int64_t num_rows, int64_t padded_dim) {
        const int64_t floats = State::floats(padded_dim);
        const size_t table_bytes = static_cast<size_t>((2 * num_rows * sizeof(State) + num_rows * 8 + 63) / 64 * 64);
        const int64_t total_floats = num_rows * (2 * floats + padded_dim) + WideTile::floats(padded_dim);
        char* memory = static_cast<char*>(thread_scratch(table_bytes + static_cast<size_t>(total_floats) * 4));
        current = reinterpret_cast<State*>(memory);
        total = current + num_rows;
        positions = reinterpret_cast<int64_t*>(total + num_rows);
        float* next = reinterpret_cast<float*>(memory + table_bytes);
        for (int64_t row = 0; row < 2 * num_rows; ++row, next += floats) {
            current[row].memory = next;
            current[row].clear(padded_dim);
        }
        queries = next;
        for (int64_t i = 0; i < num_rows * padded_dim; i += kLanes) store(queries + i, zeros());
        tile = {queries + num_rows * padded_dim, queries + num_rows * padded_dim + padded_dim * kTilePositions};
    }

    // What was computed of a segment joins what came before it.
    void join_segment(int64_t padded_rows, int64_t padded_dim, bool is_first) const {
        for (int64_t row = 0; row < padded_rows; ++row) {
            if (is_first) {
                const State swapped = total[row];
                total[row] = current[row];
                current[row] = swapped;
            } else {
                join(total[row], current[row], padded_dim);
                current[row].clear(padded_dim);
            }
        }
    }
};

// The queries in `scratch`, of which the first sees positions from `seen` on, over everything before `end`.
template <class Element>
inline void attend_wide(const AttentionProblem& p, const int32_t* table, int64_t kv_head, int64_t padded_rows,
                        const WideScratch& scratch, int64_t seen, int64_t end) {
    const int64_t padded_dim = p.padded_dim();
    bool is_first = true;
    for (int64_t segment = seen / kSegmentPositions * kSegmentPositions; segment < end; segment += kSegmentPositions) {
        const int64_t segment_end = segment + kSegmentPositions < end ? segment + kSegmentPositions : end;
        wide_segment<Element>(p, table, kv_head, padded_rows, scratch.queries, scratch.positions, scratch.current,
                              seen > segment ? seen : segment, segment_end, scratch.tile);
        scratch.join_segment(padded_rows, padded_dim, is_first);
        is_first = false;
    }
}

// A token tree's queries. Positions before the tree's own tile are the same for all, and are taken as a prompt's are; from
// there on each query has its own path. The order of sums follows positions, so the bits are those of a decode.
template <class Element>
inline void attend_tree(const AttentionProblem& p, const int32_t* table, int64_t kv_head, int64_t first_token,
                        int64_t num_rows, int64_t padded_rows, const WideScratch& scratch) {
    const int64_t padded_dim = p.padded_dim(), group = p.group(), tokens = num_rows / group;
    const int64_t tree_start = p.tree_starts[first_token];
    int64_t end = 0, seen = tree_start;
    for (int64_t row = 0; row < padded_rows; ++row) {
        const int64_t token = first_token + (row < num_rows ? row : num_rows - 1) / group;
        const int64_t position = tree_start - 1 + __builtin_popcountll(static_cast<uint64_t>(p.ancestors[token]));
        scratch.positions[row] = position;
        if (position >= end) end = position + 1;
        if (p.first_seen(position) < seen) seen = p.first_seen(position);
    }
    // With a window, what is shared differs too.
    const int64_t shared_end = p.window > 0 ? 0 : tree_start / kTilePositions * kTilePositions;
    bool is_first = true;
    for (int64_t segment = seen / kSegmentPositions * kSegmentPositions; segment < end; segment += kSegmentPositions) {
        const int64_t segment_end = segment + kSegmentPositions < end ? segment + kSegmentPositions : end;
        const int64_t split = shared_end < segment ? segment : shared_end < segment_end ? shared_end : segment_end;
        if (segment < split) {
            wide_segment<Element>(p, table, kv_head, padded_rows, scratch.queries, scratch.positions, scratch.current,
                                  segment, split, scratch.tile);
        }
        for (int64_t token = 0; token < tokens; ++token) {
            const int64_t row = token * group, position = scratch.positions[row];
            const int64_t first = p.first_seen(position) > split ? p.first_seen(position) : split;
            const int64_t last = position + 1 < segment_end ? position + 1 : segment_end;
            if (first >= last) continue;
            const Where path(table, tree_start, static_cast<uint64_t>(p.ancestors[first_token + token]));
            narrow_segment<Element>(p, path, kv_head, group, scratch.queries + row * padded_dim,
                                    scratch.positions + row, scratch.current + row, first, last,
                                    TileRows<Element>());
        }
        scratch.join_segment(padded_rows, padded_dim, is_first);
        is_first = false;
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
