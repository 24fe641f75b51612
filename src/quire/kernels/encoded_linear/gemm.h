// Rows of int8 activations times tiles of 2 x 16 channels. Every instruction set computes the same sums in the same
// order: integers are exact, and each step of 32 columns is then one chain of float operations.
#pragma once

#include "tile.h"

namespace quire {
namespace QUIRE_ISA {

// Thirty-two columns of one row of x.
struct Activations {
    int8_t values[kStep];
    float scale;
    float sum;         // scale * (sum of values)
    int32_t start[2];  // -offset * (sum of values), of kHalves per half

    // From the sums of both halves of `values`; `scale` must be there.
    void set_sums(int32_t first, int32_t second, int32_t offset, bool halves) {
        sum = scale * static_cast<float>(first + second);
        start[0] = -offset * (halves ? first : first + second);
        start[1] = -offset * second;
    }
};

struct GroupInput {
    const Activations* x;  // [rows][x_stride]
    int64_t x_stride, steps;
    const Tile* tiles;  // two
    float* sums;        // [rows][32], added to
};

#if defined(__AVX512VNNI__)
constexpr int kGroupRows = 6;

// Adds the dot products of 32 or 16 columns from `first_quad` on: of the high bytes of 16-bit codes, or of all others.
template <int kRows, int kNumQuads>
inline void add_dots(const uint8_t* first, const uint8_t* second, const Activations* const* x, int first_quad,
                     __m512i (&ints)[kRows][2]) {
    for (int quad = first_quad; quad < first_quad + kNumQuads; ++quad) {
        const __m512i a = _mm512_loadu_si512(first + quad * kVector), b = _mm512_loadu_si512(second + quad * kVector);
        for (int row = 0; row < kRows; ++row) {
            int32_t four;
            std::memcpy(&four, x[row]->values + quad * 4, sizeof four);
            const __m512i columns = _mm512_set1_epi32(four);
            ints[row][0] = _mm512_dpbusd_epi32(ints[row][0], a, columns);
            ints[row][1] = _mm512_dpbusd_epi32(ints[row][1], b, columns);
        }
    }
}

template <int kRows, int kBlocks>
inline void set_all(__m512i (&ints)[kRows][kBlocks], const Activations* const* x, int part, bool starts) {
    for (int row = 0; row < kRows; ++row) {
        const __m512i start = starts ? _mm512_set1_epi32(x[row]->start[part]) : _mm512_setzero_si512();
        for (int i = 0; i < kBlocks; ++i) ints[row][i] = start;
    }
}

// sums += (ints * scale, plus `terms` of the first half) * (scale of x) (+ minimum * (sum of x))
template <int kRows, int kForm>
inline void add_step(const Tile* tiles, int64_t step, const Activations* const* x, const __m512i (&ints)[kRows][2],
                     const __m512 (&terms)[kRows][2], __m512 (&sums)[kRows][2]) {
    for (int i = 0; i < 2; ++i) {
        const int64_t at = kForm == kHalves ? 2 * step + 1 : step;
        const __m512 scale = _mm512_loadu_ps(tiles[i].scales + at * kTileChannels);
        for (int row = 0; row < kRows; ++row) {
            const __m512 dot = _mm512_cvtepi32_ps(ints[row][i]);
            const __m512 term = kForm == kHalves ? _mm512_fmadd_ps(dot, scale, terms[row][i]) : _mm512_mul_ps(dot, scale);
            sums[row][i] = _mm512_fmadd_ps(term, _mm512_set1_ps(x[row]->scale), sums[row][i]);
            if (kForm == kWithMinimum) {
                const __m512 minimum = _mm512_loadu_ps(tiles[i].minimums + step * kTileChannels);
                sums[row][i] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[row]->sum), sums[row][i]);
            }
        }
    }
}

template <int kRows, int kForm>
inline void group_rows(const GroupInput& input) {
    __m512 sums[kRows][2];
    const Activations* x[kRows];
    for (int row = 0; row < kRows; ++row) {
        x[row] = input.x + row * input.x_stride;
        for (int i = 0; i < 2; ++i) sums[row][i] = _mm512_loadu_ps(input.sums + row * 32 + i * 16);
    }
    const uint8_t* first = input.tiles[0].codes;
    const uint8_t* second = input.tiles[1].codes;
    for (int64_t step = 0; step < input.steps; ++step, first += kStepCodes, second += kStepCodes) {
        __m512i ints[kRows][2];
        __m512 terms[kRows][2] = {};
        set_all<kRows, 2>(ints, x, 0, kForm == kWithOffset || kForm == kHalves);
        if constexpr (kForm == kHalves) {
            add_dots<kRows, kQuads / 2>(first, second, x, 0, ints);
            for (int i = 0; i < 2; ++i) {
                const __m512 scale = _mm512_loadu_ps(input.tiles[i].scales + 2 * step * kTileChannels);
                for (int row = 0; row < kRows; ++row) {
                    terms[row][i] = _mm512_mul_ps(_mm512_cvtepi32_ps(ints[row][i]), scale);
                }
            }
            set_all<kRows, 2>(ints, x, 1, true);
            add_dots<kRows, kQuads / 2>(first, second, x, kQuads / 2, ints);
        } else {
            add_dots<kRows, kQuads>(first, second, x, 0, ints);
        }
        if constexpr (kForm == kWide) {
            for (int row = 0; row < kRows; ++row) {
                const __m512i start = _mm512_set1_epi32(x[row]->start[0]);
                for (int i = 0; i < 2; ++i) {
                    ints[row][i] = _mm512_add_epi32(_mm512_slli_epi32(ints[row][i], 8), start);
                }
            }
            first += kStepCodes;
            second += kStepCodes;
            add_dots<kRows, kQuads>(first, second, x, 0, ints);
        }
        add_step<kRows, kForm>(input.tiles, step, x, ints, terms, sums);
        for (int row = 0; row < kRows; ++row) ++x[row];
    }
    for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 2; ++i) _mm512_storeu_ps(input.sums + row * 32 + i * 16, sums[row][i]);
    }
}
#else
constexpr int kGroupRows = 1;

// Adds the dot products of an even number of quads of 16 channels with their columns of x. `kTop`: codes may exceed 63.
template <bool kTop>
inline void add_quads(const uint8_t* codes, const int8_t* x, int num_quads, int32_t* ints) {
#if defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1), top = _mm256_set1_epi8(-128);
    for (int half = 0; half < 2; ++half) {
        __m256i* target = reinterpret_cast<__m256i*>(ints) + half;
        __m256i total = _mm256_loadu_si256(target);
        for (int quad = 0; quad < num_quads; quad += 2) {
            __m256i low[2], high[2];
            for (int i = 0; i < 2; ++i) {
                int32_t four;
                std::memcpy(&four, x + (quad + i) * 4, sizeof four);
                const __m256i columns = _mm256_set1_epi32(four);
                const __m256i code = _mm256_loadu_si256(
                    reinterpret_cast<const __m256i*>(codes + (quad + i) * kVector) + half);
                low[i] = _mm256_maddubs_epi16(kTop ? _mm256_andnot_si256(top, code) : code, columns);
                if (kTop) high[i] = _mm256_maddubs_epi16(_mm256_and_si256(top, code), columns);
            }
            if (kTop) {  // pairs of products with codes up to 127 fill 16 bits; top bits have a product of their own
                for (int i = 0; i < 2; ++i) {
                    total = _mm256_add_epi32(total, _mm256_madd_epi16(low[i], ones));
                    total = _mm256_add_epi32(total, _mm256_madd_epi16(high[i], ones));
                }
            } else {  // four products with codes up to 63 fit
                total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_add_epi16(low[0], low[1]), ones));
            }
        }
        _mm256_storeu_si256(target, total);
    }
#else
    for (int quad = 0; quad < num_quads; ++quad, codes += kVector, x += 4) {
        for (int channel = 0; channel < kTileChannels; ++channel) {
            for (int i = 0; i < 4; ++i) ints[channel] += codes[channel * 4 + i] * x[i];
        }
    }
#endif
}

template <int kForm>
inline void dot_part(const Tile& tile, const Activations& x, int64_t step, int part, int32_t* ints) {
    constexpr int kHalfQuads = kForm == kHalves ? kQuads / 2 : kQuads;
    const bool starts = kForm == kWithOffset || kForm == kHalves;
    for (int i = 0; i < kTileChannels; ++i) ints[i] = starts ? x.start[part] : 0;
    for (int bytes = 0; bytes < (kForm == kWide ? 2 : 1); ++bytes) {
        if (bytes == 1) {
            for (int i = 0; i < kTileChannels; ++i) {
                ints[i] = static_cast<int32_t>(static_cast<uint32_t>(ints[i]) << 8) + x.start[0];
            }
        }
        const uint8_t* codes = tile.codes + (step * (kForm == kWide ? 2 : 1) + bytes) * kStepCodes;
        const int first = part * kHalfQuads;
        constexpr bool kTop = kForm == kWithOffset || kForm == kWide;
        add_quads<kTop>(codes + first * kVector, x.values + first * 4, kHalfQuads, ints);
    }
}

template <int kRows, int kForm>
inline void group_rows(const GroupInput& input) {
    constexpr int kParts = kForm == kHalves ? 2 : 1;
    for (int i = 0; i < 2; ++i) {
        Floats sums = load(input.sums + i * kTileChannels);
        for (int64_t step = 0; step < input.steps; ++step) {
            const Activations& x = input.x[step];
            Floats terms = zeros();
            for (int part = 0; part < kParts; ++part) {
                alignas(64) int32_t ints[kTileChannels];
                dot_part<kForm>(input.tiles[i], x, step, part, ints);
                const Floats scale = load(input.tiles[i].scales + (step * kParts + part) * kTileChannels);
                terms = part == 0 ? multiply(load_ints(ints), scale) : fused(load_ints(ints), scale, terms);
            }
            sums = fused(terms, broadcast(x.scale), sums);
            if (kForm == kWithMinimum) {
                sums = fused(load(input.tiles[i].minimums + step * kTileChannels), broadcast(x.sum), sums);
            }
        }
        store(input.sums + i * kTileChannels, sums);
    }
}
#endif

// Calls done(first row, rows) for rows whose sums are there.
template <int kForm, class Done>
inline void group_gemm(GroupInput input, int64_t rows, const Done& done) {
    for (int64_t row = 0; row < rows;) {
        const int64_t taken = rows - row < kGroupRows ? rows - row : kGroupRows;
#if defined(__AVX512VNNI__)
        if (taken == 6) group_rows<6, kForm>(input);
        else if (taken == 5) group_rows<5, kForm>(input);
        else if (taken == 4) group_rows<4, kForm>(input);
        else if (taken == 3) group_rows<3, kForm>(input);
        else if (taken == 2) group_rows<2, kForm>(input);
        else group_rows<1, kForm>(input);
#else
        group_rows<1, kForm>(input);
#endif
        done(row, taken);
        input.x += taken * input.x_stride;
        input.sums += taken * 32;
        row += taken;
    }
}

template <class Done>
inline void group_gemm(const GroupInput& input, int64_t rows, Form form, const Done& done) {
    switch (form) {
        case kWithMinimum: return group_gemm<kWithMinimum>(input, rows, done);
        case kWithOffset: return group_gemm<kWithOffset>(input, rows, done);
        case kHalves: return group_gemm<kHalves>(input, rows, done);
        case kWide: return group_gemm<kWide>(input, rows, done);
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
