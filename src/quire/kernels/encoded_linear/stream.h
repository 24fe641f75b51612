// A few rows of int8 activations times weights that are unpacked in registers: one pass over the packed bytes.
// Sums have the order and so the bits of gemm.h.
#pragma once

#include "gemm.h"

namespace quire {
namespace QUIRE_ISA {

// Some groups of two blocks of 16 channels.
struct StreamInput {
    const uint8_t* sources[2];
    int64_t groups;
    const Activations* x;  // [rows][x_stride]
    int64_t x_stride;
    float* sums;  // [rows][32], added to
};

#if defined(__AVX512VNNI__)
constexpr int64_t kStreamRows = 16;  // more rows are worth a tile in memory

// Four columns of 16 channels, one byte per code.
template <int64_t kCoding>
inline __m512i quad_codes(const uint8_t* step, int quad) {
    if (kCoding == kScaled8 || kCoding == kScaled8Wide) return _mm512_loadu_si512(step + quad * kVector);
    const __m512i pair = _mm512_loadu_si512(step + quad / 2 * kVector);
    const __m512i low = _mm512_and_si512(quad % 2 == 0 ? pair : _mm512_srli_epi16(pair, 4), _mm512_set1_epi8(15));
    if (kCoding != kQ5K && kCoding != kQ6K) return low;
    const int bits = kCoding == kQ5K ? 1 : 2, at = quad % (8 / bits) * bits;
    const __m512i plane = _mm512_loadu_si512(step + (4 + quad * bits / 8) * kVector);
    const __m512i moved = at <= 4 ? _mm512_slli_epi16(plane, 4 - at) : _mm512_srli_epi16(plane, at - 4);
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(kCoding == kQ5K ? 16 : 48)));
}

// What a group's header says of one of its steps.
template <int64_t kCoding>
struct StreamScales {
    Floats scale, minimum;  // of the group

    StreamScales(const Stored& s, const uint8_t* header) : scale(load_scales(s, header)), minimum(zeros()) {
        if (kCoding == kMinimum4 || kCoding == kQ4K || kCoding == kQ5K) {
            minimum = load_scales(s, header + s.scale_bytes());
        }
        if (kCoding == kZero4) minimum = negative(multiply(scale, load_unsigned(header + s.scale_bytes())));
    }
    Floats scale_of(const uint8_t* header, int64_t step, int half) const {
        if (kCoding == kQ6K) {
            const uint8_t* factors = header + 32 + (2 * step + half) * kTileChannels;
            return multiply(scale, load(reinterpret_cast<const int8_t*>(factors)));
        }
        if (kCoding != kQ4K && kCoding != kQ5K) return scale;
        return multiply(scale, load_unsigned(header + 64 + step * 2 * kTileChannels));
    }
    Floats minimum_of(const uint8_t* header, int64_t step) const {
        if (kCoding != kQ4K && kCoding != kQ5K) return minimum;
        return negative(multiply(minimum, load_unsigned(header + 64 + (step * 2 + 1) * kTileChannels)));
    }
};

template <int64_t kCoding, int kRows, int kBlocks>
inline void stream_rows(Stored s, const StreamInput& input) {
    s.coding = kCoding;
    if (kCoding == kMinimum4 || kCoding == kScaled8) s.group = kStep;
    if (s.is_super()) s.group = kSuper;
    const bool halves = s.form() == kHalves, has_minimum = s.form() == kWithMinimum;
    const Activations* x[kRows];
    __m512 sums[kRows][kBlocks];
    for (int row = 0; row < kRows; ++row) {
        x[row] = input.x + row * input.x_stride;
        for (int i = 0; i < kBlocks; ++i) sums[row][i] = _mm512_loadu_ps(input.sums + row * 32 + i * 16);
    }
    for (int64_t group = 0; group < input.groups; ++group) {
        const int64_t offset = group * s.group_bytes();
        const uint8_t* headers[2] = {input.sources[0] + offset, input.sources[kBlocks - 1] + offset};
        const StreamScales<kCoding> scales[2] = {{s, headers[0]}, {s, headers[kBlocks - 1]}};
        for (int64_t step = 0; step < s.group / kStep; ++step) {
            const int64_t at = s.header_bytes() + step * s.step_bytes();
            for (int i = 0; i < kBlocks; ++i) prefetch_stream<(kRows > 1)>(headers[i] + at, s.step_bytes());
            __m512i ints[kRows][kBlocks];
            __m512 terms[kRows][kBlocks] = {};
            set_all<kRows, kBlocks>(ints, x, 0, !has_minimum);
#pragma GCC unroll 8
            for (int quad = 0; quad < kQuads; ++quad) {
                if (halves && quad == kQuads / 2) {
                    for (int i = 0; i < kBlocks; ++i) {
                        const __m512 scale = scales[i].scale_of(headers[i], step, 0).v;
                        for (int row = 0; row < kRows; ++row) {
                            terms[row][i] = _mm512_mul_ps(_mm512_cvtepi32_ps(ints[row][i]), scale);
                        }
                    }
                    set_all<kRows, kBlocks>(ints, x, 1, true);
                }
                __m512i codes[kBlocks];
                for (int i = 0; i < kBlocks; ++i) codes[i] = quad_codes<kCoding>(headers[i] + at, quad);
                for (int row = 0; row < kRows; ++row) {
                    int32_t four;
                    std::memcpy(&four, x[row]->values + quad * 4, sizeof four);
                    const __m512i columns = _mm512_set1_epi32(four);
                    for (int i = 0; i < kBlocks; ++i) {
                        ints[row][i] = _mm512_dpbusd_epi32(ints[row][i], codes[i], columns);
                    }
                }
            }
            for (int i = 0; i < kBlocks; ++i) {
                const __m512 scale = scales[i].scale_of(headers[i], step, 1).v;
                const __m512 minimum = scales[i].minimum_of(headers[i], step).v;
                for (int row = 0; row < kRows; ++row) {
                    const __m512 dot = _mm512_cvtepi32_ps(ints[row][i]);
                    const __m512 term = halves ? _mm512_fmadd_ps(dot, scale, terms[row][i]) : _mm512_mul_ps(dot, scale);
                    sums[row][i] = _mm512_fmadd_ps(term, _mm512_set1_ps(x[row]->scale), sums[row][i]);
                    if (has_minimum) sums[row][i] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[row]->sum), sums[row][i]);
                }
            }
            for (int row = 0; row < kRows; ++row) ++x[row];
        }
    }
    for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kBlocks; ++i) _mm512_storeu_ps(input.sums + row * 32 + i * 16, sums[row][i]);
    }
}

template <int64_t kCoding>
inline void stream_coded(const Stored& s, StreamInput input, int64_t rows) {
    if (rows == 1 && input.sources[1] == input.sources[0] + s.block_bytes) {  // one stream from memory, not two
        stream_rows<kCoding, 1, 1>(s, input);
        input.sources[0] = input.sources[1];
        input.sums += kTileChannels;
        stream_rows<kCoding, 1, 1>(s, input);
        return;
    }
    for (; rows > 0; rows -= 4, input.x += 4 * input.x_stride, input.sums += 4 * 32) {
        if (rows >= 4) stream_rows<kCoding, 4, 2>(s, input);
        else if (rows == 3) stream_rows<kCoding, 3, 2>(s, input);
        else if (rows == 2) stream_rows<kCoding, 2, 2>(s, input);
        else stream_rows<kCoding, 1, 2>(s, input);
    }
}

// Whether this number of rows is multiplied here.
inline bool is_streamed(const Stored& s, int64_t rows) { return rows <= kStreamRows && s.coding <= kScaled8Wide; }

inline void stream_gemm(const Stored& s, const StreamInput& input, int64_t rows) {
    switch (s.coding) {
        case kScaled4: return stream_coded<kScaled4>(s, input, rows);
        case kMinimum4: return stream_coded<kMinimum4>(s, input, rows);
        case kZero4: return stream_coded<kZero4>(s, input, rows);
        case kQ4K: return stream_coded<kQ4K>(s, input, rows);
        case kQ5K: return stream_coded<kQ5K>(s, input, rows);
        case kQ6K: return stream_coded<kQ6K>(s, input, rows);
        case kScaled8: return stream_coded<kScaled8>(s, input, rows);
        default: return stream_coded<kScaled8Wide>(s, input, rows);
    }
}
#else
inline bool is_streamed(const Stored&, int64_t) { return false; }
inline void stream_gemm(const Stored&, const StreamInput&, int64_t) {}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
