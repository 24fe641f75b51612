// Paged attention: cuts a ragged batch into items, each a (request, KV head, part), and runs them on all threads.
#pragma once

#include "narrow.h"
#include "state.h"
#include "tree.h"
#include "wide.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kBlockTokens = 64;      // queries of a prompt that share widened tiles, times the group
constexpr int64_t kFewestTokens = 4;      // the same, where more would leave a thread without work
constexpr int64_t kManyItems = 4;         // per thread: from here on, an uneven end costs little
constexpr int64_t kFewestWideRows = 12;   // query rows from which widening a tile pays
constexpr int64_t kLargestHeadDim = 1024;
constexpr int64_t kWorkAlone = 1 << 12;   // scores below which one thread does it all

// `part` is a block of query tokens when wide, a segment of positions when narrow. `wide` is how many tokens a block has,
// 0: the item is narrow.
struct AttentionItem {
    int32_t row, kv_head, part, wide;
    int64_t states;  // where a narrow item's states start, in floats
};

struct AttentionPlan {
    AttentionItem* items;
    int64_t num_items;
    float* states;
    int64_t num_scores;
};

// At least one, so that a request without context still gets its zeros.
inline int64_t segments_of(int64_t context_len) {
    return context_len <= 0 ? 1 : (context_len + kSegmentPositions - 1) / kSegmentPositions;
}

// A token tree's queries are taken together as a prompt's are, however few they are.
inline bool is_wide(const AttentionProblem& p, int64_t row) {
    const int64_t first = p.query_starts[row], num_queries = p.query_starts[row + 1] - first;
    return num_queries * p.group() >= kFewestWideRows || (num_queries > 0 && p.tree_start(first) >= 0);
}

// How many queries of a request share widened tiles: fewer, in parts of one size, where the items of all would not come
// out even over the threads. A draft of one request with three KV heads is three items, which keep two threads as busy as
// four would.
inline int64_t block_tokens_of(const AttentionProblem& p, int64_t queries, int64_t num_requests) {
    if (queries == 0) return kBlockTokens;  // a padded row: there is nothing to divide
    const int64_t blocks = (queries + kBlockTokens - 1) / kBlockTokens, threads = num_threads();
    const int64_t items = blocks * p.num_kv_heads * num_requests;
    if (items >= kManyItems * threads) return kBlockTokens;
    int64_t split = 1;
    while (items * split % threads != 0) ++split;
    const int64_t even = (queries + blocks * split - 1) / (blocks * split);
    return even > kFewestTokens ? even : kFewestTokens;
}

inline AttentionPlan make_plan(const AttentionProblem& p, int64_t num_requests) {
    const int64_t state_floats = State::floats(p.padded_dim());
    int64_t num_items = 0, num_state_floats = 0, num_scores = 0;
    for (int64_t row = 0; row < num_requests; ++row) {
        const int64_t queries = p.query_starts[row + 1] - p.query_starts[row];
        const int64_t segments = segments_of(p.context_lens[row]);
        const bool wide = is_wide(p, row);
        const int64_t block = block_tokens_of(p, queries, num_requests);
        num_items += p.num_kv_heads * (wide ? (queries + block - 1) / block : segments);
        num_state_floats += wide ? 0 : p.num_heads * queries * segments * state_floats;
        num_scores += p.num_heads * queries * p.context_lens[row];
    }
    const size_t item_bytes = (static_cast<size_t>(num_items) * sizeof(AttentionItem) + 63) / 64 * 64;
    char* memory = static_cast<char*>(
        shared_scratch(item_bytes + static_cast<size_t>(num_state_floats) * sizeof(float)));
    AttentionPlan plan{reinterpret_cast<AttentionItem*>(memory), 0, reinterpret_cast<float*>(memory + item_bytes),
                       num_scores};
    int64_t states = 0;
    for (int64_t row = 0; row < num_requests; ++row) {
        const int64_t queries = p.query_starts[row + 1] - p.query_starts[row];
        const bool wide = is_wide(p, row);
        if (queries == 0) continue;
        const int64_t block = block_tokens_of(p, queries, num_requests);
        const int64_t parts = wide ? (queries + block - 1) / block : segments_of(p.context_lens[row]);
        // The last queries see the most: they go first, so that the end of the job is even.
        for (int64_t part = parts - 1; part >= 0; --part) {
            for (int64_t head = 0; head < p.num_kv_heads; ++head) {
                plan.items[plan.num_items++] = {static_cast<int32_t>(row), static_cast<int32_t>(head),
                                                static_cast<int32_t>(part), wide ? static_cast<int32_t>(block) : 0,
                                                states + (part * p.num_kv_heads + head) * queries * p.group() *
                                                             state_floats};
            }
        }
        states += wide ? 0 : p.num_heads * queries * parts * state_floats;
    }
    return plan;
}

// Queries of one KV head's group, scaled so that probabilities are powers of two; rows are (token, head of group).
inline void scale_queries(const AttentionProblem& p, int64_t first_token, int64_t num_rows, int64_t kv_head,
                          float* queries) {
    const Floats factor = broadcast(p.scale * kLog2E);
    const int64_t group = p.group(), padded_dim = p.padded_dim();
    for (int64_t row = 0; row < num_rows; ++row) {
        const float* q = p.q + (first_token + row / group) * p.q_token_stride +
                         (kv_head * group + row % group) * p.q_head_stride;
        for (int64_t i = 0; i < p.head_dim; i += kLanes) {
            store(queries + row * padded_dim + i, multiply(load_part(q + i, p.head_dim - i), factor));
        }
    }
}

inline float* result_of(const AttentionProblem& p, int64_t first_token, int64_t row, int64_t kv_head) {
    const int64_t group = p.group();
    return p.out + (first_token + row / group) * p.out_stride + (kv_head * group + row % group) * p.head_dim;
}

// The first keys that a narrow item will read.
template <class Element>
inline TileRows<Element> first_keys(const AttentionProblem& p, const AttentionItem& item) {
    TileRows<Element> rows;
    const int64_t context_len = p.context_lens[item.row], start = item.part * kSegmentPositions;
    const int64_t end = start + kTilePositions < context_len ? start + kTilePositions : context_len;
    if (item.wide == 0 && start < end) {
        rows.find(p, p.k, p.block_tables + item.row * p.table_stride, item.kv_head, start, end);
    }
    return rows;
}

template <class Element>
inline void run_narrow(const AttentionProblem& p, const AttentionPlan& plan, const AttentionItem& item,
                       const AttentionItem& next) {
    const int64_t first_token = p.query_starts[item.row];
    const int64_t queries = p.query_starts[item.row + 1] - first_token, num_rows = queries * p.group();
    const int64_t context_len = p.context_lens[item.row], padded_dim = p.padded_dim();
    alignas(64) float scaled[kFewestWideRows * kLargestHeadDim];
    int64_t positions[kFewestWideRows];
    State states[kFewestWideRows];
    float* memory = plan.states + item.states;
    for (int64_t row = 0; row < num_rows; ++row) {
        positions[row] = context_len - queries + row / p.group();
        states[row].memory = memory + row * State::floats(padded_dim);
        states[row].clear(padded_dim);
    }
    scale_queries(p, first_token, num_rows, item.kv_head, scaled);
    const int64_t start = item.part * kSegmentPositions, segment_end = start + kSegmentPositions;
    const int64_t end = segment_end < context_len ? segment_end : context_len;
    const int64_t seen = p.first_seen(positions[0]);
    if (seen < end) {
        narrow_segment<Element>(p, p.block_tables + item.row * p.table_stride, item.kv_head, num_rows, scaled,
                                positions, states, seen > start ? seen : start, end, first_keys<Element>(p, next));
    }
    if (context_len > kSegmentPositions) return;  // joined once all segments are there
    for (int64_t row = 0; row < num_rows; ++row) {
        write_result(states[row], result_of(p, first_token, row, item.kv_head), p.head_dim,
                     p.sink_of(item.kv_head, row));
    }
}

// Joins a narrow request's segments for one KV head; called for its first segment's item.
inline void join_segments(const AttentionProblem& p, const AttentionPlan& plan, const AttentionItem& item) {
    const int64_t first_token = p.query_starts[item.row], padded_dim = p.padded_dim();
    const int64_t num_rows = (p.query_starts[item.row + 1] - first_token) * p.group();
    const int64_t segments = segments_of(p.context_lens[item.row]), floats = State::floats(padded_dim);
    for (int64_t row = 0; row < num_rows; ++row) {
        const State total{plan.states + item.states + row * floats};
        for (int64_t segment = 1; segment < segments; ++segment) {
            const int64_t step = p.num_kv_heads * num_rows * floats;
            join(total, State{total.memory + segment * step}, padded_dim);
        }
        write_result(total, result_of(p, first_token, row, item.kv_head), p.head_dim, p.sink_of(item.kv_head, row));
    }
}

template <class Element>
inline void run_wide(const AttentionProblem& p, const AttentionItem& item) {
    const int64_t start_token = p.query_starts[item.row], padded_dim = p.padded_dim();
    const int64_t queries = p.query_starts[item.row + 1] - start_token;
    const int64_t first = static_cast<int64_t>(item.part) * item.wide;
    const int64_t tokens = queries - first < item.wide ? queries - first : item.wide;
    const int64_t num_rows = tokens * p.group();
    const int64_t padded_rows = (num_rows + kWideRows - 1) / kWideRows * kWideRows;
    const WideScratch scratch(padded_rows, padded_dim);
    const int64_t first_position = p.context_lens[item.row] - queries + first;
    const int32_t* table = p.block_tables + item.row * p.table_stride;
    scale_queries(p, start_token + first, num_rows, item.kv_head, scratch.queries);
    if (p.tree_start(start_token) >= 0) {
        attend_tree<Element>(p, table, item.kv_head, start_token + first, num_rows, padded_rows, scratch);
    } else {
        for (int64_t row = 0; row < padded_rows; ++row) {
            scratch.positions[row] = first_position + (row < num_rows ? row : num_rows - 1) / p.group();
        }
        attend_wide<Element>(p, table, item.kv_head, padded_rows, scratch, p.first_seen(first_position),
                             first_position + tokens);
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        write_result(scratch.total[row], result_of(p, start_token + first, row, item.kv_head), p.head_dim,
                     p.sink_of(item.kv_head, row));
    }
}

template <class Element>
inline void run_attention(const AttentionProblem& p, int64_t num_requests) {
    const AttentionPlan plan = make_plan(p, num_requests);
    const int64_t even = plan.num_items / (16 * num_threads()) + 1;
    const int64_t grain = plan.num_scores < kWorkAlone ? plan.num_items : even;
    parallel_for(plan.num_items, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            if (plan.items[i].wide != 0) run_wide<Element>(p, plan.items[i]);
            else run_narrow<Element>(p, plan, plan.items[i], plan.items[i + 1 < plan.num_items ? i + 1 : i]);
        }
    });
    for (int64_t i = 0; i < plan.num_items; ++i) {
        const AttentionItem& item = plan.items[i];
        if (item.wide == 0 && item.part == 0 && p.context_lens[item.row] > kSegmentPositions) {
            join_segments(p, plan, item);
        }
    }
}

// Arguments: q, token stride, head stride, heads, kv heads, head_dim, dtype, block size, k pages, its three strides,
// v pages, its three strides, query_starts, context_lens, requests, block_tables, its stride, scale, window, out,
// out stride, tree_starts, ancestors (both null where there are no trees), k scales, v scales (both null unless pages
// are int8), two strides of both, soft cap, slopes (null: none), reach of the table that slopes are (0: they are none),
// sinks (null: none).
inline void paged_attention(const int64_t* words) {
    const Arguments a{words};
    const AttentionProblem problem{
        a.pointer<const float>(0), a.integer(1), a.integer(2),
        {a.pointer<const void>(8), a.integer(9), a.integer(10), a.integer(11), a.pointer<const BFloat>(27),
         a.integer(29), a.integer(30)},
        {a.pointer<const void>(12), a.integer(13), a.integer(14), a.integer(15), a.pointer<const BFloat>(28),
         a.integer(29), a.integer(30)},
        a.integer(7), a.integer(3), a.integer(4), a.integer(5),
        a.pointer<const int32_t>(16), a.pointer<const int32_t>(17), a.pointer<const int32_t>(19), a.integer(20),
        a.real(21), a.integer(22), a.pointer<float>(23), a.integer(24),
        a.pointer<const int32_t>(25), a.pointer<const int64_t>(26), a.real(31), a.pointer<const float>(32),
        a.integer(33), a.pointer<const float>(34)};
    const int64_t dtype = a.integer(6), requests = a.integer(18);
    if (dtype == 0) run_attention<float>(problem, requests);
    else if (dtype == 1) run_attention<Half>(problem, requests);
    else if (dtype == 2) run_attention<BFloat>(problem, requests);
    else run_attention<int8_t>(problem, requests);
}

}  // namespace QUIRE_ISA
}  // namespace quire
