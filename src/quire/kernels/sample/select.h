// Selection without a full sort: the best tokens by count or by probability mass.
#pragma once

#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

struct Candidate {
    float weight;
    int32_t token;
};

// The order of filters: larger weight first, ties to the lower id.
inline bool is_better(const Candidate& a, const Candidate& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
}

inline void swap_candidates(Candidate& a, Candidate& b) {
    const Candidate kept = a;
    a = b;
    b = kept;
}

inline void sort_few(Candidate* candidates, int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
        const Candidate moved = candidates[i];
        int64_t j = i;
        for (; j > 0 && is_better(moved, candidates[j - 1]); --j) candidates[j] = candidates[j - 1];
        candidates[j] = moved;
    }
}

// Puts the middle of three at the end, where the partition looks for its pivot.
inline void place_pivot(Candidate* first, int64_t count) {
    Candidate &a = first[0], &b = first[count / 2], &c = first[count - 1];
    if (is_better(b, a)) swap_candidates(a, b);
    if (is_better(c, b)) swap_candidates(b, c);
    if (is_better(b, a)) swap_candidates(a, b);
    swap_candidates(b, c);
}

// Moves the smallest best set that has `max_count` members or reaches `min_mass` to the front and returns its size,
// which is at least one.
inline int64_t keep_best(Candidate* candidates, int64_t count, int64_t max_count, double min_mass) {
    constexpr int64_t kFew = 24;
    int64_t low = 0, high = count;
    double mass = 0.0;  // of [0, low), all of which is kept
    while (high - low > kFew) {
        place_pivot(candidates + low, high - low);
        const Candidate pivot = candidates[high - 1];
        int64_t middle = low;
        double better = 0.0;
        for (int64_t i = low; i < high - 1; ++i) {
            if (!is_better(candidates[i], pivot)) continue;
            better += static_cast<double>(candidates[i].weight);
            swap_candidates(candidates[i], candidates[middle++]);
        }
        swap_candidates(candidates[middle], candidates[high - 1]);
        if (middle >= max_count || (middle > 0 && mass + better >= min_mass)) {
            high = middle;
        } else {
            low = middle + 1;
            mass += better + static_cast<double>(pivot.weight);
            if (low >= max_count || mass >= min_mass) return low;
        }
    }
    sort_few(candidates + low, high - low);
    for (; low < high; ++low) {
        if (low > 0 && (low >= max_count || mass >= min_mass)) return low;
        mass += static_cast<double>(candidates[low].weight);
    }
    return high;
}

// Tokens with a weight of at least `floor`, by rising id.
inline int64_t collect(const float* weights, int64_t count, float floor, Candidate* candidates) {
    int64_t found = 0;
    const Floats limit = broadcast(floor);
    for (int64_t i = 0; i < count; i += kLanes) {
        uint32_t mask = lanes_at_least(load(weights + i), limit);
        for (; mask != 0; mask &= mask - 1) {
            const int64_t token = i + __builtin_ctz(mask);
            candidates[found++] = {weights[token], static_cast<int32_t>(token)};
        }
    }
    return found;
}

}  // namespace QUIRE_ISA
}  // namespace quire
