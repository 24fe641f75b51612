// Linear layers in int8: quantize rows of x, multiply exactly, scale. The bits are those of the reference.
#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"
#include "gemm.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kRowsPerItem = 256;           // keeps quantized rows of an item within the second-level cache
constexpr int64_t kQuantizeAlone = 8192;        // elements below which a second thread is not worth waking
constexpr int64_t kBytesPerItem = 16384;        // weights that a thread claims at a time, at least
constexpr int64_t kMacsAlone = 32768;           // multiplications below which one thread does it all

struct LinearProblem {
    const float* x;
    int64_t x_stride, tokens, columns;
    const int8_t* packed;
    int64_t padded_columns, channels;
    const float* scales;
    const int32_t* sums;
    const float* bias;
    const float* residual;
    int64_t residual_stride;
    float* out;
    int64_t out_stride;
    int8_t* rows;  // quantized x, in the GEMM's layout
    float* row_scales;
    int32_t* partial;         // [tokens, channels], in place of `out`: other ranks have the other columns
    const float* row_peaks;  // [tokens] of the whole rows, then
};

// Sixty-four columns times a Hadamard matrix / 8, as the reference has it. Weights were mixed likewise, so products
// stay what they are, but an outlier is spread over its block and no longer takes every other column's precision.
inline void mix_block(const float* source, float* target) {
    Floats v[4];
    for (int i = 0; i < 4; ++i) {
        v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(source + i * kLanes)))));
    }
    const Floats eighth = broadcast(0.125f);
    const Floats a = add(v[0], v[1]), b = subtract(v[0], v[1]), c = add(v[2], v[3]), d = subtract(v[2], v[3]);
    store(target, multiply(add(a, c), eighth));
    store(target + kLanes, multiply(add(b, d), eighth));
    store(target + 2 * kLanes, multiply(subtract(a, c), eighth));
    store(target + 3 * kLanes, multiply(subtract(b, d), eighth));
}

// The whole row; columns beyond the last full block stay as they are.
inline const float* mix_row(const float* x, int64_t columns) {
    constexpr int64_t kBlock = 4 * kLanes;
    float* mixed = static_cast<float*>(thread_scratch(static_cast<size_t>(columns) * sizeof(float)));
    int64_t i = 0;
    for (; i + kBlock <= columns; i += kBlock) mix_block(x + i, mixed + i);
    if (i < columns) std::memcpy(mixed + i, x + i, static_cast<size_t>(columns - i) * sizeof(float));
    return mixed;
}

// The largest magnitude of a mixed row; what is too small to divide by counts as zero.
inline float peak_of(const float* mixed, int64_t columns) {
    constexpr float kSmallest = 1e-30f;
    Floats magnitude = zeros();
    for (int64_t i = 0; i < columns; i += kLanes) {
        magnitude = maximum(magnitude, absolute(load_part(mixed + i, columns - i)));
    }
    const float peak = largest(magnitude);
    return peak < kSmallest ? 0.0f : peak;
}

template <class Gemm>
inline void quantize_row(const LinearProblem& p, int64_t row) {
    const auto target = [&](int64_t column) { return p.rows + Gemm::place(row, column, p.padded_columns); };
    int64_t i = 0;
    if (row < p.tokens) {
        const float* x = mix_row(p.x + row * p.x_stride, p.columns);
        const float absmax = p.row_peaks != nullptr ? p.row_peaks[row] : peak_of(x, p.columns);
        const Floats inverse = broadcast(absmax == 0.0f ? 0.0f : 127.0f / absmax);
        p.row_scales[row] = absmax / 127.0f;
        for (i = 0; i < p.columns; i += kLanes) {
            const Floats scaled = multiply(load_part(x + i, p.columns - i), inverse);
            store_bytes(target(i), round_even(scaled), Gemm::kFlip);
        }
    }
    for (; i < p.padded_columns; i += kLanes) store_bytes(target(i), zeros(), Gemm::kFlip);
}

template <class Gemm>
inline void quantize_rows(LinearProblem& p) {
    constexpr int64_t kMultiple = Gemm::kRowMultiple;
    const int64_t padded_tokens = (p.tokens + kMultiple - 1) / kMultiple * kMultiple;
    const int64_t row_bytes = padded_tokens * p.padded_columns;
    char* scratch = static_cast<char*>(
        shared_scratch(static_cast<size_t>(row_bytes) + static_cast<size_t>(padded_tokens) * sizeof(float) + 64));
    p.rows = reinterpret_cast<int8_t*>(scratch);
    p.row_scales = reinterpret_cast<float*>(scratch + (row_bytes + 63) / 64 * 64);
    const int64_t grain = kQuantizeAlone / (p.columns + 1) + 1;
    parallel_for(padded_tokens, grain, [&p](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) quantize_row<Gemm>(p, row);
    });
}

// (acc * x_scale) * w_scale (+ bias), the order that the reference has.
template <bool kBias>
inline Floats scaled(const int32_t* sums, Floats row_scale, Floats scale, Floats bias) {
    const Floats y = multiply(multiply(load_ints(sums), row_scale), scale);
    return kBias ? add(y, bias) : y;
}

// Rows of one pair whose sums are there and whose results are not.
struct PairRows {
    int64_t pair, row, end;
    const int32_t* sums;  // [end - row][32]
};

inline Floats bias_of(const LinearProblem& p, int64_t channel) {
    return p.bias == nullptr ? zeros() : load_part(p.bias + channel, p.channels - channel);
}

// Where the two blocks of a pair lie, and what becomes of their sums.
struct PlainPair {
    static int64_t count(const LinearProblem& p) { return (p.channels + kPairChannels - 1) / kPairChannels; }
    static int64_t first(const LinearProblem&, int64_t pair) { return pair * kPairChannels; }
    static int64_t second(const LinearProblem& p, int64_t pair) {
        const int64_t channel = pair * kPairChannels + kChannels;
        return channel < p.channels ? channel : pair * kPairChannels;
    }

    template <bool kBias, bool kResidual>
    static void finish_block(const LinearProblem& p, const PairRows& rows, int64_t half) {
        const int64_t channel = rows.pair * kPairChannels + half * kChannels, count = p.channels - channel;
        if (count <= 0) return;
        const Floats scale = load_part(p.scales + channel, count), bias = bias_of(p, channel);
        const float* row_scales = p.row_scales;
        const float* residual = kResidual ? p.residual + rows.row * p.residual_stride + channel : nullptr;
        float* out = p.out + rows.row * p.out_stride + channel;
        const int32_t* sums = rows.sums + half * kChannels;
        const int64_t out_stride = p.out_stride, residual_stride = p.residual_stride;
        for (int64_t row = rows.row; row < rows.end; ++row, sums += kPairChannels, out += out_stride) {
            Floats y = scaled<kBias>(sums, broadcast(row_scales[row]), scale, bias);
            if (kResidual) {
                y = add(y, load_part(residual, count));
                residual += residual_stride;
            }
            store_part(out, y, count);
        }
    }

    template <bool kBias>
    static void finish_with(const LinearProblem& p, const PairRows& rows) {
        for (int64_t half = 0; half < 2; ++half) {
            if (p.residual != nullptr) finish_block<kBias, true>(p, rows, half);
            else finish_block<kBias, false>(p, rows, half);
        }
    }
};

// Sums as they are, to be added to those of other ranks.
struct PartialPair : PlainPair {
    template <bool kBias>
    static void finish_with(const LinearProblem& p, const PairRows& rows) {
        const int64_t channel = rows.pair * kPairChannels, left = p.channels - channel;
        const auto size = static_cast<size_t>(left < kPairChannels ? left : kPairChannels) * sizeof(int32_t);
        for (int64_t row = rows.row; row < rows.end; ++row) {
            std::memcpy(p.partial + row * p.channels + channel, rows.sums + (row - rows.row) * kPairChannels, size);
        }
    }
};

// Sixteen channels of the gate and the same of up, which lies channels / 2 further.
struct GatedPair {
    static int64_t count(const LinearProblem& p) { return p.channels / kPairChannels; }
    static int64_t first(const LinearProblem&, int64_t pair) { return pair * kChannels; }
    static int64_t second(const LinearProblem& p, int64_t pair) { return p.channels / 2 + pair * kChannels; }

    template <bool kBias>
    static void finish_with(const LinearProblem& p, const PairRows& rows) {
        const int64_t gate_channel = first(p, rows.pair), up_channel = second(p, rows.pair);
        const Floats gate_scale = load(p.scales + gate_channel), up_scale = load(p.scales + up_channel);
        const Floats gate_bias = bias_of(p, gate_channel), up_bias = bias_of(p, up_channel);
        const float* row_scales = p.row_scales;
        const int64_t out_stride = p.out_stride;
        const int32_t* sums = rows.sums;
        float* out = p.out + rows.row * out_stride + gate_channel;
        for (int64_t row = rows.row; row < rows.end; ++row, sums += kPairChannels, out += out_stride) {
            const Floats row_scale = broadcast(row_scales[row]);
            const Floats gate = scaled<kBias>(sums, row_scale, gate_scale, gate_bias);
            const Floats up = scaled<kBias>(sums + kChannels, row_scale, up_scale, up_bias);
            store(out, silu_times(gate, up));
        }
    }
};

// Not inlined: inside the loop over tiles it would take the registers that the loop needs.
template <class Pair>
__attribute__((noinline)) void finish_rows(const LinearProblem& p, const PairRows& rows) {
    if (p.bias != nullptr) Pair::template finish_with<true>(p, rows);
    else Pair::template finish_with<false>(p, rows);
}

// Rows that are finished while the next tile is multiplied.
template <class Pair>
struct Unfinished {
    const LinearProblem& p;
    PairRows rows{0, 0, 0, nullptr};

    void operator()(int64_t count) {
        const int64_t end = rows.row + count < rows.end ? rows.row + count : rows.end;
        if (rows.row == end) return;
        finish_rows<Pair>(p, {rows.pair, rows.row, end, rows.sums});
        rows.sums += (end - rows.row) * kPairChannels;
        rows.row = end;
    }
};

// What the sums of a pair's channels start from.
template <class Pair, class Gemm>
inline void find_start(const LinearProblem& p, int64_t pair, int32_t* start) {
    if (Gemm::kFlip == 0) return;
    const int64_t first = Pair::first(p, pair), second = Pair::second(p, pair);
    for (int64_t i = 0; i < kChannels; ++i) {
        start[i] = first + i < p.channels ? -128 * p.sums[first + i] : 0;
        start[i + kChannels] = second + i < p.channels ? -128 * p.sums[second + i] : 0;
    }
}

// The GEMM input of one pair of blocks, without its rows of x. The pair after it is probably this thread's next.
template <class Pair>
inline GemmInput pair_input(const LinearProblem& p, int64_t pair, const int32_t* start) {
    const auto block = [&p](int64_t channel) { return p.packed + channel * p.padded_columns; };
    const int64_t ahead = (pair + 1) % Pair::count(p);
    return {nullptr, p.padded_columns, block(Pair::first(p, pair)), block(Pair::second(p, pair)),
            p.padded_columns / kGroup, block(Pair::first(p, ahead)), block(Pair::second(p, ahead)), start};
}

// Items [begin, end), each a pair of blocks with up to kRowsPerItem rows.
template <class Pair, class Gemm>
inline void run_items(const LinearProblem& p, int64_t begin, int64_t end) {
    alignas(64) int32_t results[2][Gemm::kMaxRows * kPairChannels];
    alignas(64) int32_t start[kPairChannels] = {};
    const int64_t pairs = Pair::count(p);
    [[maybe_unused]] typename Gemm::Session session;
    Unfinished<Pair> unfinished{p};
    int turn = 0;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t pair = item % pairs, first_row = item / pairs * kRowsPerItem;
        const int64_t last_row = first_row + kRowsPerItem < p.tokens ? first_row + kRowsPerItem : p.tokens;
        find_start<Pair, Gemm>(p, pair, start);
        GemmInput input = pair_input<Pair>(p, pair, start);
        for (int64_t row = first_row; row < last_row; row += Gemm::kMaxRows, turn ^= 1) {
            const int64_t rows = last_row - row < Gemm::kMaxRows ? last_row - row : Gemm::kMaxRows;
            input.x = p.rows + row * p.padded_columns;
            Gemm::run(input, rows, results[turn], unfinished);
            unfinished(kRowsPerItem);
            unfinished.rows = {pair, row, row + rows, results[turn]};
            input.ahead_first = nullptr;
        }
    }
    unfinished(kRowsPerItem);
}

template <class Pair>
inline void run_linear(LinearProblem& p) {
    if (p.tokens == 0) return;
    const int64_t items = Pair::count(p) * ((p.tokens + kRowsPerItem - 1) / kRowsPerItem);
    const int64_t pair_bytes = kPairChannels * p.padded_columns;
    const bool alone = p.tokens * pair_bytes * items < kMacsAlone;
    const int64_t grain = alone ? items : (kBytesPerItem + pair_bytes - 1) / pair_bytes;
    with_gemm(p.tokens, [&p, items, grain](auto gemm) {
        using Gemm = decltype(gemm);
        quantize_rows<Gemm>(p);
        parallel_for(items, grain, [&p](int64_t begin, int64_t end) { run_items<Pair, Gemm>(p, begin, end); });
    });
}

// Arguments: x, x stride, tokens, columns, packed, padded columns, channels, scales, sums, bias, residual,
// residual stride, out, out stride.
inline LinearProblem linear_problem(const int64_t* words) {
    const Arguments a{words};
    return {a.pointer<const float>(0), a.integer(1), a.integer(2), a.integer(3),
            a.pointer<const int8_t>(4), a.integer(5), a.integer(6),
            a.pointer<const float>(7), a.pointer<const int32_t>(8), a.pointer<const float>(9),
            a.pointer<const float>(10), a.integer(11), a.pointer<float>(12), a.integer(13),
            nullptr, nullptr, nullptr, nullptr};
}

inline void linear(const int64_t* words) {
    LinearProblem problem = linear_problem(words);
    run_linear<PlainPair>(problem);
}

// Gate and up must start at whole blocks, so channels must be a multiple of 32; Python sees to that.
inline void linear_silu_mul(const int64_t* words) {
    LinearProblem problem = linear_problem(words);
    run_linear<GatedPair>(problem);
}

// Columns that several ranks share: peaks of each one's part, then (peaks being those of whole rows) its exact sums,
// then (sums being those of all ranks) results. Together they have the bits of `linear` over all columns.
// Arguments: x, x stride, tokens, columns, peaks.
inline void row_peaks(const int64_t* words) {
    const Arguments a{words};
    const float* x = a.pointer<const float>(0);
    const int64_t stride = a.integer(1), columns = a.integer(3);
    float* peaks = a.pointer<float>(4);
    parallel_for(a.integer(2), kQuantizeAlone / (columns + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) peaks[row] = peak_of(mix_row(x + row * stride, columns), columns);
    });
}

// Arguments: x, x stride, tokens, columns, packed, padded columns, channels, sums of weights, peaks, result.
inline void partial_linear(const int64_t* words) {
    const Arguments a{words};
    LinearProblem problem{a.pointer<const float>(0), a.integer(1), a.integer(2), a.integer(3),
                          a.pointer<const int8_t>(4), a.integer(5), a.integer(6), nullptr, a.pointer<const int32_t>(7),
                          nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr,
                          a.pointer<int32_t>(9), a.pointer<const float>(8)};
    run_linear<PartialPair>(problem);
}

// Arguments: sums, tokens, channels, peaks, scales, bias, residual, residual stride, out, out stride.
inline void scale_sums(const int64_t* words) {
    const Arguments a{words};
    const int32_t* sums = a.pointer<const int32_t>(0);
    const int64_t channels = a.integer(2), residual_stride = a.integer(7), out_stride = a.integer(9);
    const float *peaks = a.pointer<const float>(3), *scales = a.pointer<const float>(4);
    const float *bias = a.pointer<const float>(5), *residual = a.pointer<const float>(6);
    float* out = a.pointer<float>(8);
    parallel_for(a.integer(1), kQuantizeAlone / (channels + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const Floats row_scale = broadcast(peaks[row] / 127.0f);
            for (int64_t i = 0; i < channels; i += kLanes) {
                const int64_t left = channels - i;
                alignas(64) int32_t last[kLanes] = {};
                const int32_t* source = sums + row * channels + i;
                if (left < kLanes) {
                    std::memcpy(last, source, static_cast<size_t>(left) * sizeof(int32_t));
                    source = last;
                }
                const Floats scale = load_part(scales + i, left);
                Floats y = scaled<false>(source, row_scale, scale, scale);
                if (bias != nullptr) y = add(y, load_part(bias + i, left));
                if (residual != nullptr) y = add(y, load_part(residual + row * residual_stride + i, left));
                store_part(out + row * out_stride + i, y, left);
            }
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
