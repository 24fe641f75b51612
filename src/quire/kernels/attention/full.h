// Full attention: every token of a sequence sees all of it, or a window on both of its sides. Sequences lie one after
// another in a ragged run, and the rows of that run are their pages: one page each, found through a table of one entry.
#pragma once

#include "cpu.cpp"

namespace quire {
namespace QUIRE_ISA {

struct FullItem { int32_t sequence, kv_head, part; };

// One block of a sequence's queries over what they see. `p` is for the run; here its pages begin with the sequence. A
// query that sees `reach` tokens on both sides is one at a position `reach` further on with a window of all these tokens.
inline void run_full(AttentionProblem p, const FullItem& item, int64_t reach) {
    const int64_t start = p.query_starts[item.sequence], length = p.query_starts[item.sequence + 1] - start;
    const int64_t first = item.part * kBlockTokens;
    const int64_t tokens = length - first < kBlockTokens ? length - first : kBlockTokens;
    const int64_t num_rows = tokens * p.group();
    const int64_t padded_rows = (num_rows + kWideRows - 1) / kWideRows * kWideRows;
    const int32_t table[1] = {0};
    p.block_size = length;
    p.k.data = static_cast<const float*>(p.k.data) + start * p.k.slot_stride;
    p.v.data = static_cast<const float*>(p.v.data) + start * p.v.slot_stride;
    const WideScratch scratch(padded_rows, p.padded_dim());
    if (p.table_reach > 0) p.position_shift = length - 1;
    for (int64_t row = 0; row < padded_rows; ++row) {  // without a window, at least as the last token sees
        const int64_t token = first + (row < num_rows ? row : num_rows - 1) / p.group();
        scratch.positions[row] = p.window > 0 ? token + reach : length - 1 + (p.table_reach > 0 ? token : 0);
    }
    scale_queries(p, start + first, num_rows, item.kv_head, scratch.queries);
    const int64_t furthest = scratch.positions[padded_rows - 1] + 1;
    attend_wide<float>(p, table, item.kv_head, padded_rows, scratch, p.first_seen(scratch.positions[0]),
                       furthest < length ? furthest : length);
    for (int64_t row = 0; row < num_rows; ++row) {
        write_result(scratch.total[row], result_of(p, start + first, row, item.kv_head), p.head_dim);
    }
}

// Arguments: q, k, v, token stride, head stride (of all three), heads, kv heads, head_dim, starts, sequences, scale,
// out, out stride, tokens seen on each side (0: all), table of scores by distance (null: none), its reach.
inline void full_attention(const int64_t* words) {
    const Arguments a{words};
    const int64_t token_stride = a.integer(3), head_stride = a.integer(4), sequences = a.integer(9);
    const int32_t* starts = a.pointer<const int32_t>(8);
    const int64_t reach = a.integer(13);
    const AttentionProblem p{
        a.pointer<const float>(0), token_stride, head_stride,
        {a.pointer<const void>(1), 0, token_stride, head_stride},
        {a.pointer<const void>(2), 0, token_stride, head_stride},
        1, a.integer(5), a.integer(6), a.integer(7), starts, nullptr, nullptr, 0,
        a.real(10), reach > 0 ? 2 * reach + 1 : 0, a.pointer<float>(11), a.integer(12),
        nullptr, nullptr, 0.0f, a.pointer<const float>(14), a.integer(15)};
    int64_t num_items = 0, num_scores = 0;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const int64_t length = starts[sequence + 1] - starts[sequence];
        num_items += (length + kBlockTokens - 1) / kBlockTokens * p.num_kv_heads;
        num_scores += length * (p.window > 0 && p.window < length ? p.window : length) * p.num_heads;
    }
    FullItem* items = static_cast<FullItem*>(shared_scratch(static_cast<size_t>(num_items) * sizeof(FullItem)));
    FullItem* next = items;
    for (int32_t sequence = 0; sequence < sequences; ++sequence) {
        const int64_t length = starts[sequence + 1] - starts[sequence];
        for (int32_t part = 0; part * kBlockTokens < length; ++part) {
            for (int32_t head = 0; head < p.num_kv_heads; ++head) *next++ = {sequence, head, part};
        }
    }
    const int64_t even = num_items / (16 * num_threads()) + 1;
    parallel_for(num_items, num_scores < kWorkAlone ? num_items : even, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) run_full(p, items[i], reach);
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
