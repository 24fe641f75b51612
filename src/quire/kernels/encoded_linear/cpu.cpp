// Products by weights that stay in 4 to 8 bits: rows of x are rounded to int8 by blocks of 32 columns, integer dot
// products are exact, and each block is scaled and added in float32, in the order of the columns.
#include <algorithm>

#include "../cpp/exponential.h"
#include "../cpp/pool.h"
#include "../cpp/vector.h"
#include "floats.h"
#include "gemm.h"
#include "pack.h"
#include "stream.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kEncodedRows = 256;      // rows that a tile is unpacked for
constexpr int64_t kOnePass = 4;            // rows that one pass over packed weights multiplies
constexpr int64_t kFewRows = 8;            // up to here weights stream, and a tile is best small
constexpr int64_t kFewColumns = 256;       // of such a tile
constexpr int64_t kManyColumns = 640;      // of the others: two of them stay in the first-level cache
constexpr int64_t kEncodedBytes = 16384;   // of packed weights that a thread claims at a time, at least
constexpr int64_t kRoundAlone = 8192;      // elements below which a second thread is not worth waking
constexpr int64_t kEncodedAlone = 65536;   // products below which one thread does it all
constexpr int64_t kRoundedSteps = 64;      // of x, whose scales are found before they are rounded
constexpr float kSmallestPeak = 1e-30f;    // of a step; what is smaller counts as zero

struct EncodedProblem {
    Stored weight;
    const float* x;
    int64_t x_stride, tokens;
    const int32_t* order;  // of columns of x, where stored ones have another; or null
    const float* bias;
    const float* residual;
    int64_t residual_stride;
    float* out;
    int64_t out_stride;
    Activations* rows;

    int64_t steps() const { return weight.columns / kStep; }
};

// Sets all of `target` but its scale, given 127 / (largest magnitude) and the scale.
inline void round_step(const float* x, float inverse, int32_t offset, bool halves, Activations& target) {
    const Floats first = round_even(multiply(load(x), broadcast(inverse)));
    const Floats second = round_even(multiply(load(x + kLanes), broadcast(inverse)));
    store_bytes(target.values, first, 0);
    store_bytes(target.values + kLanes, second, 0);
    target.set_sums(static_cast<int32_t>(sum(first)), static_cast<int32_t>(sum(second)), offset, halves);
}

// The inverses of `steps` steps, and their scales to `target`.
inline void scale_steps(const float* x, int64_t steps, float* inverses, Activations* target) {
    for (int64_t i = 0; i < steps; ++i, x += kStep) {
        const float absmax = largest(maximum(absolute(load(x)), absolute(load(x + kLanes))));
        const bool nothing = absmax < kSmallestPeak;
        inverses[i] = nothing ? 0.0f : 127.0f / absmax;
        target[i].scale = nothing ? 0.0f : absmax * (1.0f / 127.0f);
    }
}

#if defined(__AVX512VNNI__)
// The same for four steps: their largest magnitudes are found together.
inline void scale_four(const float* x, float* inverses, Activations* target) {
    __m512 peaks[4];
    for (int i = 0; i < 4; ++i) {
        const float* step = x + i * kStep;
        peaks[i] = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(step)), _mm512_abs_ps(_mm512_loadu_ps(step + kLanes)));
    }
    const auto joined = [](__m512 a, __m512 b) {
        return _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const __m512d low = joined(peaks[0], peaks[1]), high = joined(peaks[2], peaks[3]);
    const __m512 fours = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                       _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    const __m256 eights = _mm256_max_ps(low_half(fours), high_half(fours));
    const __m128 absmax = _mm_max_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1));
    // also for NaN, so that results of a row of NaN are NaN
    const __mmask8 some = _mm_cmp_ps_mask(absmax, _mm_set1_ps(kSmallestPeak), _CMP_NLT_UQ);
    _mm_storeu_ps(inverses, _mm_maskz_div_ps(some, _mm_set1_ps(127.0f), absmax));
    alignas(16) float scales[4];
    _mm_store_ps(scales, _mm_maskz_mul_ps(some, absmax, _mm_set1_ps(1.0f / 127.0f)));
    for (int i = 0; i < 4; ++i) target[i].scale = scales[i];
}

inline void round_four(const float* x, const float* inverses, int32_t offset, bool halves, Activations* target) {
    __m256i fours[4];
    for (int i = 0; i < 4; ++i) {
        const __m512 inverse = _mm512_set1_ps(inverses[i]);
        const auto bytes_of = [inverse](const float* from) {
            return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), inverse)));
        };
        const __m256i bytes = _mm256_set_m128i(bytes_of(x + i * kStep + kLanes), bytes_of(x + i * kStep));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target[i].values), bytes);
        fours[i] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    }
    alignas(32) int32_t sums[8];  // of the first halves, then of the second
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_hadd_epi32(_mm256_hadd_epi32(fours[0], fours[1]),
                                                                          _mm256_hadd_epi32(fours[2], fours[3])));
    for (int i = 0; i < 4; ++i) target[i].set_sums(sums[i], sums[4 + i], offset, halves);
}
#endif

// Scales come first for kRoundedSteps at a time: a chain of operations from the loads to the sums would be too long for
// steps to overlap.
inline void round_row(const float* x, int64_t steps, int32_t offset, bool halves, Activations* target) {
    float inverses[kRoundedSteps];
    for (int64_t first = 0; first < steps; first += kRoundedSteps) {
        const int64_t count = std::min(kRoundedSteps, steps - first);
        const float* from = x + first * kStep;
        Activations* to = target + first;
        int64_t scaled = 0, rounded = 0;
#if defined(__AVX512VNNI__)
        for (; scaled + 4 <= count; scaled += 4) scale_four(from + scaled * kStep, inverses + scaled, to + scaled);
#endif
        scale_steps(from + scaled * kStep, count - scaled, inverses + scaled, to + scaled);
#if defined(__AVX512VNNI__)
        for (; rounded + 4 <= count; rounded += 4) {
            round_four(from + rounded * kStep, inverses + rounded, offset, halves, to + rounded);
        }
#endif
        for (; rounded < count; ++rounded) {
            round_step(from + rounded * kStep, inverses[rounded], offset, halves, to[rounded]);
        }
    }
}

inline void round_rows(EncodedProblem& p) {
    const int64_t steps = p.steps(), offset = p.weight.offset();
    p.rows = static_cast<Activations*>(shared_scratch(static_cast<size_t>(p.tokens * steps) * sizeof(Activations)));
    const int64_t grain = kRoundAlone / (p.weight.columns + 1) + 1;
    const bool halves = p.weight.form() == kHalves;
    parallel_for(p.tokens, grain, [&p, steps, offset, halves](int64_t begin, int64_t end) {
        float* ordered = nullptr;
        if (p.order != nullptr) ordered = static_cast<float*>(thread_scratch(static_cast<size_t>(p.weight.columns) * 4));
        for (int64_t row = begin; row < end; ++row) {
            const float* x = p.x + row * p.x_stride;
            for (int64_t i = 0; ordered != nullptr && i < p.weight.columns; ++i) ordered[i] = x[p.order[i]];
            round_row(ordered == nullptr ? x : ordered, steps, static_cast<int32_t>(offset), halves,
                      p.rows + row * steps);
        }
    });
}

inline Floats encoded_bias(const EncodedProblem& p, int64_t channel) {
    return p.bias == nullptr ? zeros() : load_part(p.bias + channel, p.weight.channels - channel);
}

// Which two blocks are multiplied at once, and what becomes of their sums [rows][32].
struct NextBlocks {
    static int64_t count(const Stored& w) { return (w.channels + 31) / 32; }
    static int64_t first(const Stored&, int64_t pair) { return 2 * pair; }
    static int64_t second(const Stored& w, int64_t pair) {
        return (2 * pair + 1) * kTileChannels < w.channels ? 2 * pair + 1 : 2 * pair;
    }
    static void finish(const EncodedProblem& p, int64_t pair, int64_t first_row, int64_t rows, const float* sums) {
        for (int64_t half = 0; half < 2; ++half) {
            const int64_t channel = (2 * pair + half) * kTileChannels, count = p.weight.channels - channel;
            if (count <= 0) return;
            const Floats bias = encoded_bias(p, channel);
            for (int64_t row = 0; row < rows; ++row) {
                Floats y = load(sums + row * 32 + half * kTileChannels);
                if (p.bias != nullptr) y = add(y, bias);
                if (p.residual != nullptr) {
                    y = add(y, load_part(p.residual + (first_row + row) * p.residual_stride + channel, count));
                }
                store_part(p.out + (first_row + row) * p.out_stride + channel, y, count);
            }
        }
    }
};

// Sixteen channels of the gate and the same of up.
struct GateAndUp {
    static int64_t count(const Stored& w) { return w.channels / 32; }
    static int64_t first(const Stored&, int64_t pair) { return pair; }
    static int64_t second(const Stored& w, int64_t pair) { return w.channels / 32 + pair; }
    static void finish(const EncodedProblem& p, int64_t pair, int64_t first_row, int64_t rows, const float* sums) {
        const int64_t channel = pair * kTileChannels;
        const Floats gate_bias = encoded_bias(p, channel), up_bias = encoded_bias(p, p.weight.channels / 2 + channel);
        for (int64_t row = 0; row < rows; ++row) {
            Floats gate = load(sums + row * 32), up = load(sums + row * 32 + kTileChannels);
            if (p.bias != nullptr) {
                gate = add(gate, gate_bias);
                up = add(up, up_bias);
            }
            store(p.out + (first_row + row) * p.out_stride + channel, silu_times(gate, up));
        }
    }
};

// Items [begin, end), each a pair of blocks with up to kEncodedRows rows.
template <class Pair>
inline void encoded_items(const EncodedProblem& p, int64_t begin, int64_t end) {
    const Stored& w = p.weight;
    const int64_t pairs = Pair::count(w), groups = w.columns / w.group;
    const bool streamed = is_streamed(w, p.tokens);
    const int64_t columns =
        streamed && p.tokens <= kOnePass ? w.columns : p.tokens <= kFewRows ? kFewColumns : kManyColumns;
    const int64_t chunk = std::max<int64_t>(1, columns / w.group), chunk_steps = chunk * w.group / kStep;
    const int64_t tile_bytes = Tile::bytes(chunk_steps);
    char* memory = static_cast<char*>(
        thread_scratch(static_cast<size_t>(2 * tile_bytes + std::min(p.tokens, kEncodedRows) * 32 * 4)));
    const Tile tiles[2] = {Tile(memory, chunk_steps), Tile(memory + tile_bytes, chunk_steps)};
    float* sums = reinterpret_cast<float*>(memory + 2 * tile_bytes);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t pair = item % pairs, first_row = item / pairs * kEncodedRows;
        const int64_t rows = std::min(kEncodedRows, p.tokens - first_row);
        std::fill_n(sums, rows * 32, 0.0f);
        for (int64_t group = 0; group < groups; group += chunk) {
            const int64_t last = std::min(group + chunk, groups), step = group * w.group / kStep;
            const Activations* x = p.rows + first_row * p.steps() + step;
            const int64_t at = group * w.group_bytes();
            const uint8_t *first = w.block(Pair::first(w, pair)) + at, *second = w.block(Pair::second(w, pair)) + at;
            if (streamed) {
                stream_gemm(w, {{first, second}, last - group, x, p.steps(), sums}, rows);
                continue;
            }
            unpack_groups(w, Pair::first(w, pair), group, last, tiles[0]);
            unpack_groups(w, Pair::second(w, pair), group, last, tiles[1]);
            const bool ends = last == groups;
            group_gemm({x, p.steps(), (last - group) * w.group / kStep, tiles, sums}, rows, w.form(),
                       [&](int64_t row, int64_t count) {
                           if (ends) Pair::finish(p, pair, first_row + row, count, sums + row * 32);
                       });
        }
        if (streamed) Pair::finish(p, pair, first_row, rows, sums);
    }
}

// The same for floats.
template <class Pair>
inline void float_items(const EncodedProblem& p, int64_t begin, int64_t end) {
    const Stored& w = p.weight;
    const int64_t pairs = Pair::count(w);
    float* sums = static_cast<float*>(thread_scratch(static_cast<size_t>(std::min(p.tokens, kEncodedRows) * 32 * 4)));
    for (int64_t item = begin; item < end; ++item) {
        const int64_t pair = item % pairs, first_row = item / pairs * kEncodedRows;
        const int64_t rows = std::min(kEncodedRows, p.tokens - first_row);
        float_gemm({w.block(Pair::first(w, pair)), w.block(Pair::second(w, pair)), w.columns,
                    p.x + first_row * p.x_stride, p.x_stride, sums},
                   rows, w.coding);
        Pair::finish(p, pair, first_row, rows, sums);
    }
}

template <class Pair>
inline void run_encoded(EncodedProblem& p) {
    if (p.tokens == 0) return;
    const bool floats = p.weight.coding >= kFloat32;
    if (!floats) round_rows(p);
    const int64_t items = Pair::count(p.weight) * ((p.tokens + kEncodedRows - 1) / kEncodedRows);
    const bool alone = p.tokens * p.weight.channels * p.weight.columns < kEncodedAlone;
    const int64_t pair_bytes = 2 * p.weight.block_bytes;
    const int64_t grain = alone ? items : (kEncodedBytes + pair_bytes - 1) / pair_bytes;
    parallel_for(items, grain, [&p, floats](int64_t begin, int64_t end) {
        if (floats) float_items<Pair>(p, begin, end);
        else encoded_items<Pair>(p, begin, end);
    });
}

// Arguments from `at` on: packed, bytes of a block, columns, channels, coding, group, code book, front.
inline Stored stored_weight(const Arguments& a, int at) {
    return {a.pointer<const uint8_t>(at), a.integer(at + 1), a.integer(at + 2), a.integer(at + 3),
            a.integer(at + 4), a.integer(at + 5), a.pointer<const Book>(at + 6), a.pointer<const float>(at + 7)};
}

// Arguments: a stored weight, x, x stride, tokens, order of columns, bias, residual, residual stride, out,
// out stride.
inline EncodedProblem encoded_problem(const int64_t* words) {
    const Arguments a{words};
    return {stored_weight(a, 0), a.pointer<const float>(8), a.integer(9), a.integer(10),
            a.pointer<const int32_t>(11), a.pointer<const float>(12), a.pointer<const float>(13), a.integer(14),
            a.pointer<float>(15), a.integer(16), nullptr};
}

inline void encoded_linear(const int64_t* words) {
    EncodedProblem problem = encoded_problem(words);
    run_encoded<NextBlocks>(problem);
}

// Gate and up must start at whole blocks, so channels must be a multiple of 32; Python sees to that.
inline void encoded_linear_silu_mul(const int64_t* words) {
    EncodedProblem problem = encoded_problem(words);
    run_encoded<GateAndUp>(problem);
}

// One channel of a tile in float32, as the scheme's reference decodes it.
inline void decode_channel(const Stored& w, const Tile& tile, const uint8_t* nibbles, int64_t channel, float* target) {
    for (int64_t column = 0; column < w.columns; ++column) {
        const int64_t step = column / kStep, quad = column % kStep / 4;
        const int64_t place = step * kStepCodes + quad * kVector + channel * 4 + column % 4;
        const int64_t part = w.form() == kHalves ? column / 16 : step;
        const float scale = tile.scales[part * kTileChannels + channel];
        if (w.form() == kWide) {
            target[column] = w.book->values[nibbles[place]] * scale;
        } else if (w.form() == kWithMinimum) {
            target[column] = scale * tile.codes[place] + tile.minimums[step * kTileChannels + channel];
        } else {
            target[column] = scale * static_cast<float>(tile.codes[place] - w.offset());
        }
    }
}

// Scales of code books as they are, and nibbles that are not looked up.
inline void unpack_book(const Stored& w, int64_t block, const Tile& tile, uint8_t* nibbles) {
    for (int64_t group = 0; group < w.columns / w.group; ++group) {
        const uint8_t* header = w.block(block) + group * w.group_bytes();
        const Floats scale =
            w.coding == kNested4 ? nested_scales(w, block, group, header) : load_scales(w, header);
        for (int64_t i = 0; i < w.group / kStep; ++i) {
            const int64_t step = group * (w.group / kStep) + i;
            store(tile.scales + step * kTileChannels, scale);
            unpack_nibbles(header + w.header_bytes() + i * w.step_bytes(), nibbles + step * kStepCodes);
        }
    }
}

// Rows in float32; zeros for an id of -1. Arguments: a stored weight, ids, whether ids are 64 bits wide, tokens, out,
// out stride.
inline void encoded_gather(const int64_t* words) {
    const Arguments a{words};
    const Stored w = stored_weight(a, 0);
    const int32_t* narrow = a.pointer<const int32_t>(8);
    const int64_t* wide = a.pointer<const int64_t>(8);
    const int64_t wide_ids = a.integer(9), tokens = a.integer(10), out_stride = a.integer(12);
    float* out = a.pointer<float>(11);
    const int64_t steps = w.columns / kStep, tile_bytes = Tile::bytes(steps);
    parallel_for(tokens, 16, [=, &w](int64_t begin, int64_t end) {
        char* memory = static_cast<char*>(thread_scratch(static_cast<size_t>(tile_bytes + steps * kStepCodes)));
        uint8_t* nibbles = reinterpret_cast<uint8_t*>(memory + tile_bytes);
        const Tile tile(memory, steps);
        int64_t unpacked = -1;
        for (int64_t token = begin; token < end; ++token) {
            const int64_t id = wide_ids != 0 ? wide[token] : narrow[token], block = id / kTileChannels;
            float* target = out + token * out_stride;
            if (id < 0) {
                std::fill_n(target, w.columns, 0.0f);
                continue;
            }
            if (block != unpacked && w.form() == kWide) unpack_book(w, block, tile, nibbles);
            else if (block != unpacked) unpack_groups(w, block, 0, w.columns / w.group, tile);
            unpacked = block;
            decode_channel(w, tile, nibbles, id % kTileChannels, target);
        }
    });
}

// Arguments: a stored weight, source, codes, bytes of a row, scales, zeros.
inline void encoded_pack(const int64_t* words) {
    const Arguments a{words};
    const PackProblem p{stored_weight(a, 0), a.pointer<uint8_t>(0), a.integer(8), a.pointer<const uint8_t>(9),
                        a.integer(10), a.pointer<const uint8_t>(11), a.pointer<const uint8_t>(12)};
    const int64_t blocks = (p.target.channels + kTileChannels - 1) / kTileChannels;
    parallel_for(blocks, 4, [&p](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) pack_block(p, block);
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire
