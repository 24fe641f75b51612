// The problem, the running softmax of a query, and how partial results are joined.
//
// A query's result must not depend on how it was batched or chunked, so every order is fixed by absolute positions:
// - positions fall into tiles of 64, and tiles into segments of 512;
// - a score sums sixteen lanes of head_dim in order, then folds the lanes as `sum` does;
// - within a segment tiles follow one another, within a tile positions do;
// - segments are computed from nothing and joined in order.
// A position that a query must not see has probability zero, which changes no bit of sums or outputs.
#pragma once

#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kTilePositions = 64;
constexpr int64_t kSegmentPositions = 512;
constexpr int kTileVectors = kTilePositions / kLanes;
constexpr float kNothingSeen = -1e30f;  // finite, so that differences of maxima are never not-a-number
constexpr float kLog2E = 1.44269504088896f;

// Pages in int8 have a scale per slot and head: [blocks, kv heads, block size].
struct PagedTensor {
    const void* data;
    int64_t block_stride, slot_stride, head_stride;
    const BFloat* scales = nullptr;
    int64_t scale_block_stride = 0, scale_head_stride = 0;

    const BFloat* scales_of(int64_t block, int64_t kv_head) const {
        return scales + block * scale_block_stride + kv_head * scale_head_stride;
    }
};

// Where a query's positions lie: in a row's blocks, in order; those from `tree_start` on, of a query in a token tree, at
// the places of its ancestors there, whose bits are set.
struct Where {
    const int32_t* table;
    int64_t tree_start = -1;
    uint64_t ancestors = 0;

    Where(const int32_t* blocks) : table(blocks) {}
    Where(const int32_t* blocks, int64_t start, uint64_t bits) : table(blocks), tree_start(start), ancestors(bits) {}

    bool has_tree_before(int64_t end) const { return tree_start >= 0 && end > tree_start; }
};

// The places of positions from `start` on, one after another.
struct Places {
    const Where& where;
    int64_t position;
    uint64_t left;

    Places(const Where& path, int64_t start) : where(path), position(start), left(path.ancestors) {
        for (int64_t before = where.tree_start; before < start; ++before) left &= left - 1;
    }

    // The d-th ancestor, in order of places, stands at depth d: parents come before their children.
    int64_t next() {
        if (position < where.tree_start) return position++;
        const int64_t place = where.tree_start + __builtin_ctzll(left);
        left &= left - 1;
        return place;
    }
};

struct AttentionProblem {
    const float* q;
    int64_t q_token_stride, q_head_stride;
    PagedTensor k, v;
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t table_stride;
    float scale;
    int64_t window;
    float* out;
    int64_t out_stride;
    const int32_t* tree_starts;  // per query, -1: none; null: there are no trees
    const int64_t* ancestors;    // per query
    float soft_cap;              // of scores, 0: none
    const float* slopes;         // per head, or a table by distance; null: none
    int64_t table_reach;         // of a table [heads, 2 * reach + 1]: distances beyond it count as it; 0: one slope per head
    const float* sinks = nullptr;  // per head, null: none
    int64_t position_shift = 0;  // added to positions where distances are computed

    // Of a request whose first query this is: the place where its tree begins, -1 if it has none.
    int64_t tree_start(int64_t token) const { return tree_starts == nullptr ? -1 : tree_starts[token]; }
    int64_t group() const { return num_heads / num_kv_heads; }
    // Whether scores are capped or have slopes.
    bool adjusts() const { return soft_cap > 0.0f || slopes != nullptr; }
    int64_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
    // Of a query's head: the score that takes part in the sum of probabilities and has no value; null: none.
    const float* sink_of(int64_t kv_head, int64_t row) const {
        return sinks == nullptr ? nullptr : sinks + kv_head * group() + row % group();
    }
    // The first position that the query at `position` sees.
    int64_t first_seen(int64_t position) const {
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
};

// Scales of the keys and values of a tile in int8. A score is multiplied by its key's and a probability by its value's,
// so neither is multiplied into head_dim numbers.
struct TileScales {
    alignas(64) BFloat keys[kTilePositions] = {};
    alignas(64) BFloat values[kTilePositions] = {};

    void read(const AttentionProblem& p, const Where& where, int64_t kv_head, int64_t start, int64_t end) {
        if (where.has_tree_before(end)) return read_in_tree(p, where, kv_head, start, end);
        int64_t logical = start / p.block_size, offset = start - logical * p.block_size;
        for (int64_t i = 0; i < end - start; offset = 0) {
            const int64_t in_block = p.block_size - offset, left = end - start - i;
            const int64_t count = in_block < left ? in_block : left, block = where.table[logical++];
            std::memcpy(keys + i, p.k.scales_of(block, kv_head) + offset, static_cast<size_t>(count) * sizeof(BFloat));
            std::memcpy(values + i, p.v.scales_of(block, kv_head) + offset, static_cast<size_t>(count) * sizeof(BFloat));
            i += count;
        }
    }

    void read_in_tree(const AttentionProblem& p, const Where& where, int64_t kv_head, int64_t start, int64_t end) {
        Places places(where, start);
        for (int64_t i = 0; i < end - start; ++i) {
            const int64_t place = places.next(), block = where.table[place / p.block_size];
            keys[i] = p.k.scales_of(block, kv_head)[place % p.block_size];
            values[i] = p.v.scales_of(block, kv_head)[place % p.block_size];
        }
    }
};

// Running softmax of one query: the maximum, sixteen partial sums, and the weighted sum of values, in one piece.
struct State {
    float* memory;

    static int64_t floats(int64_t padded_dim) { return 2 * kLanes + padded_dim; }
    float& maximum() const { return memory[0]; }
    float* sums() const { return memory + kLanes; }
    float* values() const { return memory + 2 * kLanes; }

    void clear(int64_t padded_dim) const {
        for (int64_t i = 0; i < floats(padded_dim); i += kLanes) store(memory + i, zeros());
        maximum() = kNothingSeen;
    }
};

inline float power_of_two_of(float x) {
    float lanes[kLanes];
    store(lanes, exponential_of_two(broadcast(x)));
    return lanes[0];
}

// Joins a later segment into what came before.
inline void join(State total, State segment, int64_t padded_dim) {
    const float before = total.maximum(), after = segment.maximum();
    const float top = before > after ? before : after;
    const Floats keep = broadcast(power_of_two_of(before - top)), take = broadcast(power_of_two_of(after - top));
    for (int64_t i = kLanes; i < State::floats(padded_dim); i += kLanes) {
        store(total.memory + i, fused(load(segment.memory + i), take, multiply(load(total.memory + i), keep)));
    }
    total.maximum() = top;
}

// Divides by the sum of probabilities; a query that saw nothing gives zeros.
inline void write_result(State state, float* out, int64_t head_dim, const float* sink) {
    float total = sum(load(state.sums()));
    if (sink != nullptr) {
        const float power = *sink * kLog2E - state.maximum();
        total += power_of_two_of(power < 126.0f ? power : 126.0f);
    }
    const Floats inverse = broadcast(total > 0.0f ? 1.0f / total : 0.0f);
    for (int64_t i = 0; i < head_dim; i += kLanes) {
        store_part(out + i, multiply(load(state.values() + i), inverse), head_dim - i);
    }
}

// Caps the 64 scores that a query at `position` has of a tile, and adds its head's slope times a key's distance, or
// what a table has for the distance, for models that have these. Scores are in base 2. Scales of keys in int8 are multiplied first, here if this is called for.
inline void adjust_scores(const AttentionProblem& p, float* scores, int64_t kv_head, int64_t row, int64_t position,
                          int64_t tile, const TileScales* scales) {
    if (scales != nullptr && p.adjusts()) {
        for (int64_t i = 0; i < kTilePositions; i += kLanes) {
            store(scores + i, multiply(load(scores + i), load(scales->keys + i)));
        }
    }
    if (p.soft_cap > 0.0f) {
        const Floats one = broadcast(1.0f), two = broadcast(2.0f), limit = broadcast(126.0f);
        for (int64_t i = 0; i < kTilePositions; i += kLanes) {
            // tanh(y) = 1 - 2 / (1 + e^2y)
            const Floats power = minimum(multiply(load(scores + i), broadcast(2.0f / p.soft_cap)), limit);
            const Floats tanh = subtract(one, divide(two, add(one, exponential_of_two(power))));
            store(scores + i, multiply(tanh, broadcast(p.soft_cap * kLog2E)));
        }
    }
    if (p.table_reach > 0) {
        const int64_t reach = p.table_reach, head = kv_head * p.group() + row % p.group();
        const float* middle = p.slopes + head * (2 * reach + 1) + reach;
        for (int64_t i = 0; i < kTilePositions; ++i) {
            const int64_t distance = tile + i - position + p.position_shift;
            scores[i] += kLog2E * middle[distance < -reach ? -reach : distance > reach ? reach : distance];
        }
    } else if (p.slopes != nullptr) {
        const float slope = p.slopes[kv_head * p.group() + row % p.group()] * kLog2E;
        for (int64_t i = 0; i < kTilePositions; ++i) scores[i] += slope * static_cast<float>(tile + i - position);
    }
}

// Takes a query's 64 scores of a tile, of which [first, last) are seen, to probabilities relative to the new maximum,
// and rescales the state to it. `scales` is null unless pages are int8; `scaled`: those of keys are in the scores.
inline void absorb_scores(State state, float* scores, int64_t first, int64_t last, int64_t padded_dim,
                          const TileScales* scales, bool scaled) {
    Floats vectors[kTileVectors];
    Floats top = broadcast(kNothingSeen);
    for (int i = 0; i < kTileVectors; ++i) {
        const int64_t low = first - i * kLanes, high = last - i * kLanes;
        vectors[i] = load(scores + i * kLanes);
        if (scales != nullptr && !scaled) vectors[i] = multiply(vectors[i], load(scales->keys + i * kLanes));
        if (low > 0 || high < kLanes) {
            vectors[i] = keep_lanes(vectors[i], static_cast<int>(low < 0 ? 0 : low > kLanes ? kLanes : low),
                                    static_cast<int>(high < 0 ? 0 : high > kLanes ? kLanes : high));
        }
        top = QUIRE_ISA::maximum(top, vectors[i]);
    }
    const float before = state.maximum(), tile_top = largest(top);
    const float after = before > tile_top ? before : tile_top;
    Floats sums = load(state.sums());
    if (after != before) {
        const Floats keep = broadcast(power_of_two_of(before - after));
        sums = multiply(sums, keep);
        float* values = state.values();
        for (int64_t i = 0; i < padded_dim; i += kLanes) store(values + i, multiply(load(values + i), keep));
        state.maximum() = after;
    }
    for (int i = 0; i < kTileVectors; ++i) {
        const Floats probability = exponential_of_two(subtract(vectors[i], broadcast(after)));
        sums = add(sums, probability);
        store(scores + i * kLanes,
              scales == nullptr ? probability : multiply(probability, load(scales->values + i * kLanes)));
    }
    store(state.sums(), sums);
}

}  // namespace QUIRE_ISA
}  // namespace quire
