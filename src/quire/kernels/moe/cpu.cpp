// Mixture of experts: the router, and int8 experts, each one's rows at once. A row's bits depend on that row alone.
#include <algorithm>
#include <cmath>

#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"
// and ../int8_linear/cpu.cpp, which unit.cpp includes before

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kRouterColumns = 65536;  // weights of the router that a thread claims at a time, at least

inline float dot(const float* a, const float* b, int64_t width) {
    Floats total = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
        total = fused(load_part(a + i, width - i), load_part(b + i, width - i), total);
    }
    return sum(total);
}

// Arguments: x, x stride, tokens, width, weight, weight stride, experts, out [tokens, experts].
inline void router_logits(const int64_t* words) {
    const Arguments a{words};
    const float* x = a.pointer<const float>(0);
    const float* weight = a.pointer<const float>(4);
    const int64_t x_stride = a.integer(1), tokens = a.integer(2), width = a.integer(3);
    const int64_t weight_stride = a.integer(5), experts = a.integer(6);
    float* out = a.pointer<float>(7);
    parallel_for(tokens * experts, kRouterColumns / (width + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            out[i] = dot(x + i / experts * x_stride, weight + i % experts * weight_stride, width);
        }
    });
}

// The largest of `count` values that are not taken, the lowest index among equals; taken ones are negative, and so is
// every comparison with a NaN lost: then it is the first that is left.
inline int64_t next_expert(const float* values, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < 0.0f) continue;
        if (best < 0 || values[i] > values[best]) best = i;
    }
    return best;
}

// Softmax of [0, count) into `target`.
inline void softmax_row(const float* logits, int64_t count, float* target) {
    float highest = logits[0];
    for (int64_t i = 1; i < count; ++i) highest = logits[i] > highest ? logits[i] : highest;
    Floats total = zeros();
    for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t left = count - i;
        float power[kLanes] = {};
        store_part(power, exponential(subtract(load_part(logits + i, left), broadcast(highest))), left);
        total = add(total, load(power));
        store_part(target + i, load(power), left);
    }
    const Floats inverse = broadcast(1.0f / sum(total));
    for (int64_t i = 0; i < count; i += kLanes) {
        store_part(target + i, multiply(load_part(target + i, count - i), inverse), count - i);
    }
}

// Arguments: logits, logits per token, tokens, experts, top k, renormalize, out experts, out weights, out gates or null.
inline void choose_experts(const int64_t* words) {
    const Arguments a{words};
    const float* logits = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), tokens = a.integer(2), experts = a.integer(3), top_k = a.integer(4);
    const bool renormalize = a.integer(5) != 0;
    int32_t* chosen = a.pointer<int32_t>(6);
    float* weights = a.pointer<float>(7);
    float* gates = a.pointer<float>(8);
    parallel_for(tokens, 8192 / (experts * (top_k + 8)) + 1, [=](int64_t begin, int64_t end) {
        float* shares = static_cast<float*>(thread_scratch(static_cast<size_t>(experts) * sizeof(float)));
        for (int64_t token = begin; token < end; ++token) {
            const float* row = logits + token * stride;
            softmax_row(row, experts, shares);
            float total = 0.0f;
            for (int64_t place = 0; place < top_k; ++place) {
                const int64_t expert = next_expert(shares, experts);
                chosen[token * top_k + place] = static_cast<int32_t>(expert);
                weights[token * top_k + place] = shares[expert];
                total += shares[expert];
                shares[expert] = -1.0f;
            }
            if (renormalize) {
                for (int64_t place = 0; place < top_k; ++place) weights[token * top_k + place] /= total;
            }
            if (gates != nullptr) gates[token] = 1.0f / (1.0f + std::exp(-row[experts]));
        }
    });
}

// Arguments: results [tokens, k, width], tokens, k, width, weights, gates or null, shared or null, shared stride,
// residual, residual stride, out [tokens, width].
inline void combine_experts(const int64_t* words) {
    const Arguments a{words};
    const float* results = a.pointer<const float>(0);
    const int64_t tokens = a.integer(1), top_k = a.integer(2), width = a.integer(3);
    const float* weights = a.pointer<const float>(4);
    const float* gates = a.pointer<const float>(5);
    const float* shared = a.pointer<const float>(6);
    const float* residual = a.pointer<const float>(8);
    const int64_t shared_stride = a.integer(7), residual_stride = a.integer(9);
    float* out = a.pointer<float>(10);
    parallel_for(tokens, 8192 / (width * (top_k + 1)) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t left = width - i;
                Floats total = zeros();
                for (int64_t place = token * top_k; place < (token + 1) * top_k; ++place) {
                    total = fused(broadcast(weights[place]), load_part(results + place * width + i, left), total);
                }
                if (gates != nullptr && shared != nullptr) {
                    const Floats y = load_part(shared + token * shared_stride + i, left);
                    total = fused(broadcast(gates[token]), y, total);
                }
                total = add(total, load_part(residual + token * residual_stride + i, left));
                store_part(out + token * width + i, total, left);
            }
        }
    });
}

// One of an expert's two matrices for its rows.
inline LinearProblem expert_problem(const int64_t* address, const float* x, int64_t rows, int64_t columns,
                                    int64_t channels, float* out, int64_t out_stride) {
    LinearProblem p{};
    p.x = x;
    p.x_stride = p.columns = columns;
    p.tokens = rows;
    p.packed = reinterpret_cast<const int8_t*>(static_cast<uintptr_t>(address[0]));
    p.padded_columns = (columns + 63) / 64 * 64;
    p.channels = channels;
    p.scales = reinterpret_cast<const float*>(static_cast<uintptr_t>(address[1]));
    p.sums = reinterpret_cast<const int32_t*>(static_cast<uintptr_t>(address[2]));
    p.out = out;
    p.out_stride = out_stride;
    return p;
}

// Arguments: x, x stride, tokens, width, F, addresses [experts, 6], experts, top k, chosen [tokens, k],
// order [tokens * k + experts + 1] (scratch), rows [tokens * k, width] (scratch), gated [tokens * k, F] (scratch),
// results [tokens, k, width].
inline void int8_experts(const int64_t* words) {
    const Arguments a{words};
    const float* x = a.pointer<const float>(0);
    const int64_t x_stride = a.integer(1), pairs = a.integer(2) * a.integer(7), width = a.integer(3);
    const int64_t inner = a.integer(4), experts = a.integer(6), top_k = a.integer(7);
    const int64_t* addresses = a.pointer<const int64_t>(5);
    const int32_t* chosen = a.pointer<const int32_t>(8);
    int32_t* order = a.pointer<int32_t>(9);  // pairs by expert, then by token
    int32_t* ends = order + pairs;           // while sorting, where the next pair of an expert goes
    float* rows = a.pointer<float>(10);
    float* gated = a.pointer<float>(11);
    float* results = a.pointer<float>(12);
    std::fill_n(ends, experts + 1, 0);
    for (int64_t pair = 0; pair < pairs; ++pair) ++ends[chosen[pair] + 1];
    for (int64_t expert = 0; expert < experts; ++expert) ends[expert + 1] += ends[expert];
    for (int64_t pair = 0; pair < pairs; ++pair) order[ends[chosen[pair]]++] = static_cast<int32_t>(pair);
    const int64_t grain = 16384 / (width + 1) + 1;
    const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
    parallel_for(pairs, grain, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            std::memcpy(rows + i * width, x + order[i] / top_k * x_stride, row_bytes);
        }
    });
    for (int64_t expert = 0, first = 0; expert < experts; first = ends[expert], ++expert) {
        const int64_t count = ends[expert] - first;
        if (count == 0) continue;
        const int64_t* address = addresses + expert * 6;
        float* x_rows = rows + first * width;
        float* inner_rows = gated + first * inner;
        LinearProblem gate_up = expert_problem(address, x_rows, count, width, 2 * inner, inner_rows, inner);
        run_linear<GatedPair>(gate_up);
        LinearProblem down = expert_problem(address + 3, inner_rows, count, inner, width, x_rows, width);
        run_linear<PlainPair>(down);  // over the expert's input, which is no longer needed
    }
    parallel_for(pairs, grain, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            std::memcpy(results + order[i] * width, rows + i * width, row_bytes);
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
