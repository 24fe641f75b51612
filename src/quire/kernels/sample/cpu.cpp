// Logits to tokens and log probabilities, one row per item.
#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"
#include "select.h"

#include <cfloat>
#include <cmath>

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kSumBlock = 1024;     // tokens whose weights are added in fp32 before going to fp64
constexpr float kGreedy = 1e-6f;        // a temperature below this is none

inline float largest_logit(const float* logits, int64_t vocabulary) {
    Floats top = broadcast(-__builtin_inff());
    int64_t i = 0;
    for (; i + kLanes <= vocabulary; i += kLanes) top = maximum(top, load(logits + i));
    float result = largest(top);
    for (; i < vocabulary; ++i) result = logits[i] > result ? logits[i] : result;
    return result;
}

inline int64_t first_largest(const float* logits, int64_t vocabulary) {
    const float top = largest_logit(logits, vocabulary);
    const Floats limit = broadcast(top);
    int64_t i = 0;
    for (; i + kLanes <= vocabulary; i += kLanes) {
        const uint32_t mask = lanes_at_least(load(logits + i), limit);
        if (mask != 0) return i + __builtin_ctz(mask);
    }
    for (; i < vocabulary; ++i) {
        if (logits[i] >= top) return i;
    }
    return 0;
}

// What a row's softmax needs: e^((logit - top) / temperature), zero-padded to whole vectors, and sums per block.
struct Weights {
    float* weight = nullptr;      // may be null when only the sum is wanted
    double* block_sum = nullptr;  // [blocks of kSumBlock tokens]; may be null
    double total = 0.0;

    void find(const float* logits, int64_t vocabulary, float temperature) {
        const Floats top = broadcast(largest_logit(logits, vocabulary)), inverse = broadcast(1.0f / temperature);
        total = 0.0;
        for (int64_t start = 0; start < vocabulary; start += kSumBlock) {
            const int64_t end = start + kSumBlock < vocabulary ? start + kSumBlock : vocabulary;
            Floats sums = zeros();
            for (int64_t i = start; i < end; i += kLanes) {
                Floats x = load_part(logits + i, end - i);
                if (end - i < kLanes) x = keep_lanes(x, 0, static_cast<int>(end - i));
                const Floats value = exponential(multiply(subtract(x, top), inverse));
                sums = add(sums, value);
                if (weight != nullptr) store(weight + i, value);
            }
            const double block = static_cast<double>(sum(sums));
            if (block_sum != nullptr) block_sum[start / kSumBlock] = block;
            total += block;
        }
    }
};

struct Filters {
    float temperature;
    int64_t top_k;
    double top_p;
    float min_p;
};

inline double mass_of(const Candidate* candidates, int64_t count) {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += static_cast<double>(candidates[i].weight);
    return total;
}

// Applies top-k and top-p to the tokens of at least `floor`; the size of the kept set, best tokens in front, or -1 when
// the floor was too high to tell.
inline int64_t filter(const float* weights, int64_t vocabulary, const Filters& filters, double total, float floor,
                      Candidate* candidates) {
    int64_t count = collect(weights, vocabulary, floor, candidates);
    const bool is_complete = floor <= (filters.min_p > FLT_MIN ? filters.min_p : FLT_MIN);
    if (filters.top_k > 0) {
        if (count < filters.top_k && !is_complete) return -1;
        if (count > filters.top_k) count = keep_best(candidates, count, filters.top_k, HUGE_VAL);
        total = mass_of(candidates, count);
    } else if (filters.min_p > 0.0f) {
        if (!is_complete) return -1;
        total = mass_of(candidates, count);
    }
    if (filters.top_p >= 1.0) return is_complete || filters.top_k > 0 ? count : -1;
    const double wanted = filters.top_p * total;
    if (filters.top_k == 0 && !is_complete && mass_of(candidates, count) < wanted) return -1;
    return keep_best(candidates, count, count, wanted);
}

// The first token, by id, at which the running sum exceeds uniform * (the whole sum).
inline int64_t draw(const Candidate* kept, int64_t count, double uniform) {
    const double target = uniform * mass_of(kept, count);
    double running = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        running += static_cast<double>(kept[i].weight);
        if (running > target) return kept[i].token;
    }
    return kept[count - 1].token;
}

// A draw from all tokens: whole blocks are stepped over by their sums.
inline int64_t draw_unfiltered(const Weights& weights, int64_t vocabulary, double uniform) {
    const double target = uniform * weights.total;
    double running = 0.0;
    int64_t last = 0;
    for (int64_t start = 0; start < vocabulary; start += kSumBlock) {
        const double after = running + weights.block_sum[start / kSumBlock];
        if (after > target) {
            const int64_t end = start + kSumBlock < vocabulary ? start + kSumBlock : vocabulary;
            for (int64_t i = start; i < end; ++i) {
                if (weights.weight[i] <= 0.0f) continue;
                running += static_cast<double>(weights.weight[i]);
                last = i;
                if (running > target) return i;
            }
        }
        running = after;
    }
    return last;
}

// The kept tokens are those better than, or equal to, the worst that the filters keep.
inline Candidate worst_kept(const float* weights, int64_t vocabulary, const Filters& filters, double total,
                            Candidate* candidates) {
    const float lowest = filters.min_p > FLT_MIN ? filters.min_p : FLT_MIN;
    int64_t kept = -1;
    // Most rows are peaked: few tokens are looked at unless the filters turn out to reach further down.
    for (float guess = filters.min_p > 0.0f ? 0.0f : 1e-2f; kept < 0; guess = guess > 1e-7f ? guess * 1e-2f : 0.0f) {
        kept = filter(weights, vocabulary, filters, total, guess > lowest ? guess : lowest, candidates);
    }
    Candidate worst = candidates[0];
    for (int64_t i = 1; i < kept; ++i) {
        if (is_better(worst, candidates[i])) worst = candidates[i];
    }
    return worst;
}

inline int64_t sample_row(const float* logits, int64_t vocabulary, const Filters& filters, double uniform) {
    if (filters.temperature < kGreedy) return first_largest(logits, vocabulary);
    const int64_t padded = (vocabulary + kLanes - 1) / kLanes * kLanes, blocks = vocabulary / kSumBlock + 1;
    char* memory = static_cast<char*>(thread_scratch(
        static_cast<size_t>(padded) * (sizeof(float) + sizeof(Candidate)) + static_cast<size_t>(blocks) * 8));
    Weights weights;
    weights.block_sum = reinterpret_cast<double*>(memory);
    weights.weight = reinterpret_cast<float*>(memory + blocks * 8);
    Candidate* candidates = reinterpret_cast<Candidate*>(weights.weight + padded);
    weights.find(logits, vocabulary, filters.temperature);
    if (!(weights.total > 0.0)) return first_largest(logits, vocabulary);  // not a number somewhere
    const bool has_limit = filters.top_k > 0 || filters.top_p < 1.0;
    if (!has_limit && filters.min_p <= 0.0f) return draw_unfiltered(weights, vocabulary, uniform);
    const Candidate worst = has_limit
                                ? worst_kept(weights.weight, vocabulary, filters, weights.total, candidates)
                                : Candidate{filters.min_p, INT32_MAX};
    const int64_t count = collect(weights.weight, vocabulary, worst.weight, candidates);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        const bool is_kept = candidates[i].weight > worst.weight || candidates[i].token <= worst.token;
        if (is_kept) candidates[kept++] = candidates[i];
    }
    return kept == 0 ? first_largest(logits, vocabulary) : draw(candidates, kept, uniform);
}

// Arguments: logits, stride, rows, vocabulary, out.
inline void argmax(const int64_t* words) {
    const Arguments a{words};
    const float* logits = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), vocabulary = a.integer(3);
    int64_t* out = a.pointer<int64_t>(4);
    parallel_for(a.integer(2), 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) out[row] = first_largest(logits + row * stride, vocabulary);
    });
}

// A NaN, which comparisons pass over, has more bits set than infinity once its sign is gone.
inline bool has_nan(const float* logits, int64_t vocabulary) {
    uint32_t most = 0;
    for (int64_t i = 0; i < vocabulary; ++i) {
        uint32_t bits;
        std::memcpy(&bits, logits + i, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most > 0x7f800000u;
}

// Arguments: logits, stride, rows, vocabulary, out fp32.
inline void peaks(const int64_t* words) {
    const Arguments a{words};
    const float* logits = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), vocabulary = a.integer(3);
    float* out = a.pointer<float>(4);
    parallel_for(a.integer(2), 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* x = logits + row * stride;
            out[row] = has_nan(x, vocabulary) ? __builtin_nanf("") : largest_logit(x, vocabulary);
        }
    });
}

// Arguments: logits, stride, rows, vocabulary, token ids, out fp32.
inline void log_softmax_gather(const int64_t* words) {
    const Arguments a{words};
    const float* logits = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), vocabulary = a.integer(3);
    const int64_t* tokens = a.pointer<const int64_t>(4);
    float* out = a.pointer<float>(5);
    parallel_for(a.integer(2), 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* x = logits + row * stride;
            const double distance = static_cast<double>(x[tokens[row]]) - largest_logit(x, vocabulary);
            Weights weights;
            weights.find(x, vocabulary, 1.0f);
            out[row] = static_cast<float>(distance - std::log(weights.total));
        }
    });
}

// Arguments: logits, stride, rows, vocabulary, token ids, out int64.
inline void token_ranks(const int64_t* words) {
    const Arguments a{words};
    const float* logits = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), vocabulary = a.integer(3);
    const int64_t* tokens = a.pointer<const int64_t>(4);
    int64_t* out = a.pointer<int64_t>(5);
    parallel_for(a.integer(2), 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* x = logits + row * stride;
            const float chosen = x[tokens[row]];
            int64_t larger = 0;
            for (int64_t i = 0; i < vocabulary; ++i) larger += x[i] > chosen ? 1 : 0;
            out[row] = larger + 1;
        }
    });
}

// Arguments: logits, stride, rows, vocabulary, temperature, top_k, top_p, min_p, uniforms, out int64.
inline void sample_filtered(const int64_t* words) {
    const Arguments a{words};
    const float* logits = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), vocabulary = a.integer(3);
    const float* temperature = a.pointer<const float>(4);
    const int32_t* top_k = a.pointer<const int32_t>(5);
    const float* top_p = a.pointer<const float>(6);
    const float* min_p = a.pointer<const float>(7);
    const double* uniforms = a.pointer<const double>(8);
    int64_t* out = a.pointer<int64_t>(9);
    parallel_for(a.integer(2), 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const Filters filters{temperature[row], top_k[row], top_p[row], min_p[row]};
            out[row] = sample_row(logits + row * stride, vocabulary, filters, uniforms[row]);
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
