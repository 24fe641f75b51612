// Packed weights and their tiles. A packed weight is blocks of 16 channels, and a block is groups of columns, each a
// header with the scales of 16 channels and then the codes of 32 columns at a time:
//
//   4 bits   4 x 64 bytes; byte (channel, column % 4) of vector j holds quads 2j (low half) and 2j + 1 of columns
//   5 bits   the same and 64 bytes with one bit per quad
//   6 bits   the same and 2 x 64 bytes with two bits per quad
//   8 bits   8 x 64 bytes
//
// A tile is one byte per code, in the order that a dot product of bytes reads, with scales and minimums in float32.
#pragma once

#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kTileChannels = 16;
constexpr int64_t kStep = 32;                               // columns of x with a scale of their own
constexpr int64_t kQuads = kStep / 4;
constexpr int64_t kVector = kTileChannels * 4;              // bytes of a quad of columns
constexpr int64_t kStepCodes = kQuads * kVector;            // of a tile, per step
constexpr int64_t kSuper = 256;                             // columns of a block of Q4_K, Q5_K and Q6_K

// How a weight is coded, as Python numbers it.
enum Coding : int64_t {
    kScaled4 = 0,      // (code - 8) * scale
    kMinimum4 = 1,     // code * scale + minimum
    kZero4 = 2,        // (code - zero) * scale, one byte per zero
    kQ4K = 3,
    kQ5K = 4,
    kQ6K = 5,
    kScaled8 = 6,      // (code - 128) * scale
    kScaled8Wide = 7,  // the same with scales in float32; all others have float16
    kBook4 = 8,        // values[code] * scale, in float32
    kNested4 = 9,      // the same with scales in 8 bits
    kFloat32 = 10,     // floats: a block is [columns][16], see floats.h
    kFloat16 = 11,
    kBFloat16 = 12,
};

// What a tile's codes mean, and so how a dot product is finished.
enum Form {
    kWithMinimum,  // dot * scale + minimum * (sum of x)
    kWithOffset,   // (dot - offset * (sum of x)) * scale
    kHalves,       // the same with two scales per step
    kWide,         // as kWithOffset, codes have 16 bits: high bytes of a step first, then low bytes
};

// A code book: exact, and as whole numbers of 1 / unit.
struct Book {
    int16_t whole[16];
    float values[16];
    float unit;
    float absmaxes[256];  // what a scale of 8 bits stands for
};

struct Stored {
    const uint8_t* packed;
    int64_t block_bytes, columns, channels, coding, group;
    const Book* book;    // of kBook4 and kNested4
    const float* front;  // of kNested4, per block: an offset and second-level scales

    bool is_super() const { return coding == kQ4K || coding == kQ5K || coding == kQ6K; }
    Form form() const {
        if (coding == kQ6K) return kHalves;
        if (coding == kBook4 || coding == kNested4) return kWide;
        return coding == kScaled4 || has_bytes() ? kWithOffset : kWithMinimum;
    }
    bool has_bytes() const { return coding == kScaled8 || coding == kScaled8Wide; }
    int32_t offset() const {
        return coding == kScaled4 ? 8 : coding == kQ6K ? 32 : has_bytes() ? 128 : form() == kWide ? 32768 : 0;
    }
    int64_t step_bytes() const {
        return has_bytes() ? 512 : coding == kQ5K ? 320 : coding == kQ6K ? 384 : 256;
    }
    bool wide_scales() const { return coding == kScaled8Wide || coding == kBook4; }
    int64_t scale_bytes() const { return wide_scales() ? 64 : 32; }
    int64_t header_bytes() const {
        switch (coding) {
            case kMinimum4: return 2 * scale_bytes();
            case kZero4: return scale_bytes() + kTileChannels;
            case kQ4K: case kQ5K: return 64 + 8 * 2 * kTileChannels;
            case kQ6K: return 32 + 16 * kTileChannels;
            case kNested4: return kTileChannels;
            default: return scale_bytes();
        }
    }
    int64_t front_floats() const { return kTileChannels * (columns / group) / 256 + 3; }
    int64_t group_bytes() const { return header_bytes() + group / kStep * step_bytes(); }
    const uint8_t* block(int64_t index) const { return packed + index * block_bytes; }
};

// Room for `steps` steps of 16 channels.
struct Tile {
    uint8_t* codes;
    float* scales;    // [steps][16], of kHalves [steps][2][16]
    float* minimums;  // [steps][16]

    static int64_t floats(int64_t steps) { return steps * 3 * kTileChannels; }
    static int64_t bytes(int64_t steps) { return steps * 2 * kStepCodes + floats(steps) * 4; }
    Tile(char* memory, int64_t steps)
        : codes(reinterpret_cast<uint8_t*>(memory)),
          scales(reinterpret_cast<float*>(memory + steps * 2 * kStepCodes)),
          minimums(scales + steps * 2 * kTileChannels) {}
};

inline void unpack_nibbles(const uint8_t* source, uint8_t* codes) {
    for (int j = 0; j < 4; ++j) {
        const uint8_t* from = source + j * kVector;
        uint8_t* to = codes + 2 * j * kVector;
        for (int i = 0; i < kVector; ++i) to[i] = from[i] & 15;
        for (int i = 0; i < kVector; ++i) to[kVector + i] = static_cast<uint8_t>(from[i] >> 4);
    }
}

// Four bits and kBits more, which lie in planes behind them.
template <int kBits>
inline void unpack_upper(const uint8_t* source, uint8_t* codes) {
    constexpr int kPerPlane = 8 / kBits, kMask = (1 << kBits) - 1;
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
        const uint8_t* lower = source + quad / 2 * kVector;
        const uint8_t* upper = source + (4 + quad / kPerPlane) * kVector;
        const int shift = quad % kPerPlane * kBits;
        uint8_t* to = codes + quad * kVector;
        for (int i = 0; i < kVector; ++i) {
            const int low = quad % 2 == 0 ? lower[i] & 15 : lower[i] >> 4;
            to[i] = static_cast<uint8_t>(low | ((upper[i] >> shift) & kMask) << 4);
        }
    }
}

inline void unpack_step(const Stored& s, const uint8_t* source, uint8_t* codes) {
    prefetch_stream<true>(source, s.step_bytes());
    if (s.has_bytes()) {
        std::memcpy(codes, source, kStepCodes);
        return;
    }
    if (s.coding == kQ5K) unpack_upper<1>(source, codes);
    else if (s.coding == kQ6K) unpack_upper<2>(source, codes);
    else unpack_nibbles(source, codes);
}

// Nibbles to the two bytes of a table's entries, which are unsigned here.
inline void look_up_step(const Stored& s, uint8_t* codes) {
    alignas(64) uint8_t high[16], low[16];
    for (int i = 0; i < 16; ++i) {
        const uint16_t value = static_cast<uint16_t>(s.book->whole[i] + 32768);
        high[i] = static_cast<uint8_t>(value >> 8);
        low[i] = static_cast<uint8_t>(value & 255);
    }
#if defined(__AVX2__)
    const __m256i highs = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
    const __m256i lows = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low)));
    for (int64_t i = 0; i < kStepCodes; i += 32) {
        const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_shuffle_epi8(highs, code));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + kStepCodes + i), _mm256_shuffle_epi8(lows, code));
    }
#else
    for (int64_t i = 0; i < kStepCodes; ++i) {
        codes[kStepCodes + i] = low[codes[i]];
        codes[i] = high[codes[i]];
    }
#endif
}

inline Floats load_scales(const Stored& s, const uint8_t* source) {
    if (s.wide_scales()) return load(reinterpret_cast<const float*>(source));
    return load(reinterpret_cast<const Half*>(source));
}

inline Floats load_unsigned(const uint8_t* source) {  // below 128
    return load(reinterpret_cast<const int8_t*>(source));
}

inline Floats negative(Floats a) { return subtract(zeros(), a); }

// Scales and minimums of 256 columns of Q4_K and Q5_K: six bits each, times the block's two halves.
inline void super_scales(const uint8_t* header, float* scales, float* minimums) {
    const Floats d = load(reinterpret_cast<const Half*>(header)), low = load(reinterpret_cast<const Half*>(header + 32));
    for (int64_t step = 0; step < kSuper / kStep; ++step) {
        const uint8_t* six_bits = header + 64 + step * 2 * kTileChannels;
        store(scales + step * kTileChannels, multiply(d, load_unsigned(six_bits)));
        store(minimums + step * kTileChannels, negative(multiply(low, load_unsigned(six_bits + kTileChannels))));
    }
}

inline void halves_scales(const uint8_t* header, float* scales) {
    const Floats d = load(reinterpret_cast<const Half*>(header));
    for (int64_t half = 0; half < kSuper / 16; ++half) {
        const int8_t* factors = reinterpret_cast<const int8_t*>(header + 32 + half * kTileChannels);
        store(scales + half * kTileChannels, multiply(d, load(factors)));
    }
}

// absmax = map[code] * (second-level scale) + offset, counted over the whole weight in rows.
inline Floats nested_scales(const Stored& s, int64_t block, int64_t group, const uint8_t* header) {
    const float* map = s.book->absmaxes;
    const float* front = s.front + block * s.front_floats();
    const int64_t groups = s.columns / s.group, first = block * kTileChannels * groups / 256;
    float values[kTileChannels];
    for (int i = 0; i < kTileChannels; ++i) {
        const int64_t entry = (block * kTileChannels + i) * groups + group;
        values[i] = map[header[i]] * front[1 + entry / 256 - first] + front[0];
    }
    return load(values);
}

// Scales of one group to every step of it.
inline void unpack_header(const Stored& s, int64_t block, int64_t group, const uint8_t* header, float* scales,
                          float* minimums) {
    if (s.coding == kQ6K) return halves_scales(header, scales);
    if (s.is_super()) return super_scales(header, scales, minimums);
    Floats scale = s.coding == kNested4 ? nested_scales(s, block, group, header) : load_scales(s, header);
    Floats minimum = zeros();
    if (s.coding == kMinimum4) minimum = load_scales(s, header + s.scale_bytes());
    if (s.coding == kZero4) minimum = negative(multiply(scale, load_unsigned(header + s.scale_bytes())));
    if (s.form() == kWide) scale = multiply(scale, broadcast(1.0f / s.book->unit));
    for (int64_t step = 0; step < s.group / kStep; ++step) {
        store(scales + step * kTileChannels, scale);
        if (s.form() == kWithMinimum) store(minimums + step * kTileChannels, minimum);
    }
}

// Groups first .. last - 1 of a block of 16 channels. The coding is known to the compiler.
template <int64_t kCoding>
inline void unpack_coded(Stored s, int64_t block, int64_t first, int64_t last, const Tile& tile) {
    s.coding = kCoding;
    if (kCoding != kScaled4 && kCoding != kZero4 && kCoding < kScaled8Wide) {
        s.group = kCoding >= kQ4K && kCoding <= kQ6K ? kSuper : kStep;
    }
    const int64_t scales_per_step = s.form() == kHalves ? 2 : 1, codes_per_step = s.form() == kWide ? 2 : 1;
    const int64_t steps = s.group / kStep;
    const uint8_t* source = s.block(block) + first * s.group_bytes();
    uint8_t* codes = tile.codes;
    float* scales = tile.scales;
    float* minimums = tile.minimums;
    for (int64_t group = first; group < last; ++group) {
        prefetch_stream<true>(source, s.header_bytes());
        unpack_header(s, block, group, source, scales, minimums);
        source += s.header_bytes();
        for (int64_t step = 0; step < steps; ++step, source += s.step_bytes()) {
            unpack_step(s, source, codes);
            if (s.form() == kWide) look_up_step(s, codes);
            codes += codes_per_step * kStepCodes;
        }
        scales += steps * scales_per_step * kTileChannels;
        minimums += steps * kTileChannels;
    }
}

inline void unpack_groups(const Stored& s, int64_t block, int64_t first, int64_t last, const Tile& tile) {
    switch (s.coding) {
        case kScaled4: return unpack_coded<kScaled4>(s, block, first, last, tile);
        case kMinimum4: return unpack_coded<kMinimum4>(s, block, first, last, tile);
        case kZero4: return unpack_coded<kZero4>(s, block, first, last, tile);
        case kQ4K: return unpack_coded<kQ4K>(s, block, first, last, tile);
        case kQ5K: return unpack_coded<kQ5K>(s, block, first, last, tile);
        case kQ6K: return unpack_coded<kQ6K>(s, block, first, last, tile);
        case kScaled8: return unpack_coded<kScaled8>(s, block, first, last, tile);
        case kScaled8Wide: return unpack_coded<kScaled8Wide>(s, block, first, last, tile);
        case kBook4: return unpack_coded<kBook4>(s, block, first, last, tile);
        default: return unpack_coded<kNested4>(s, block, first, last, tile);
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
