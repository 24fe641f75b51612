// Weights as their files store them, to the layout of tile.h.
#pragma once

#include "tile.h"

namespace quire {
namespace QUIRE_ISA {

// How codes are stored, as Python numbers it. The first six are GGUF's blocks, which hold their scales.
enum Source : int64_t { kFileQ4_0, kFileQ4_1, kFileQ8_0, kFileQ4K, kFileQ5K, kFileQ6K, kFileInt4, kFileBook, kFileInt8 };

struct PackProblem {
    Stored target;
    uint8_t* packed;
    int64_t source;
    const uint8_t* codes;
    int64_t row_bytes;
    const uint8_t* scales;  // [channels][groups] in the target's type; of kNested4 bytes
    const uint8_t* zeros;   // [channels][groups]
};

inline int64_t file_block_bytes(int64_t source) {
    constexpr int64_t kBytes[] = {18, 20, 34, 144, 176, 210};
    return kBytes[source];
}

// Codes of columns 32 * step .. 32 * step + 31 of one row.
inline void read_codes(int64_t source, const uint8_t* row, int64_t step, uint8_t* codes) {
    if (source <= kFileQ8_0) {
        const uint8_t* values = row + step * file_block_bytes(source) + (source == kFileQ4_1 ? 4 : 2);
        for (int i = 0; i < kStep; ++i) {
            codes[i] = source == kFileQ8_0 ? values[i] ^ 0x80 : (values[i % 16] >> (i / 16 * 4)) & 15;
        }
    } else if (source == kFileQ6K) {
        const uint8_t* block = row + step / 8 * file_block_bytes(source);
        const int64_t half = step % 8 / 4, run = step % 4;
        const uint8_t* low = block + half * 64 + run % 2 * 32;
        const uint8_t* high = block + 128 + half * 32;
        for (int i = 0; i < kStep; ++i) {
            codes[i] = static_cast<uint8_t>(((low[i] >> (run / 2 * 4)) & 15) | ((high[i] >> (run * 2)) & 3) << 4);
        }
    } else if (source <= kFileQ5K) {
        const uint8_t* block = row + step / 8 * file_block_bytes(source);
        const int64_t run = step % 8;
        const uint8_t* low = block + (source == kFileQ4K ? 16 : 48) + run / 2 * 32;
        for (int i = 0; i < kStep; ++i) codes[i] = (low[i] >> (run % 2 * 4)) & 15;
        if (source == kFileQ5K) {
            for (int i = 0; i < kStep; ++i) codes[i] |= static_cast<uint8_t>(((block[16 + i] >> run) & 1) << 4);
        }
    } else if (source == kFileInt8) {
        for (int i = 0; i < kStep; ++i) codes[i] = row[step * kStep + i] ^ 0x80;
    } else {
        const uint8_t* pairs = row + step * kStep / 2;
        const int first = source == kFileBook ? 4 : 0;  // shift of the first column of two
        for (int i = 0; i < kStep; ++i) codes[i] = (pairs[i / 2] >> (i % 2 == 0 ? first : 4 - first)) & 15;
    }
}

// Codes [16][32] to the planes of one step.
inline void write_step(int64_t coding, const uint8_t* codes, uint8_t* target) {
    alignas(64) uint8_t quads[kStepCodes];
    for (int quad = 0; quad < kQuads; ++quad) {
        for (int channel = 0; channel < kTileChannels; ++channel) {
            std::memcpy(quads + quad * kVector + channel * 4, codes + channel * kStep + quad * 4, 4);
        }
    }
    if (coding == kScaled8 || coding == kScaled8Wide) {
        std::memcpy(target, quads, kStepCodes);
        return;
    }
    for (int j = 0; j < 4; ++j) {
        const uint8_t* from = quads + 2 * j * kVector;
        for (int i = 0; i < kVector; ++i) {
            target[j * kVector + i] = static_cast<uint8_t>((from[i] & 15) | (from[kVector + i] & 15) << 4);
        }
    }
    uint8_t* upper = target + 4 * kVector;
    if (coding == kQ5K) {
        std::memset(upper, 0, kVector);
        for (int quad = 0; quad < kQuads; ++quad) {
            for (int i = 0; i < kVector; ++i) {
                upper[i] |= static_cast<uint8_t>((quads[quad * kVector + i] >> 4) << quad);
            }
        }
    } else if (coding == kQ6K) {
        std::memset(upper, 0, 2 * kVector);
        for (int quad = 0; quad < kQuads; ++quad) {
            for (int i = 0; i < kVector; ++i) {
                upper[quad / 4 * kVector + i] |=
                    static_cast<uint8_t>((quads[quad * kVector + i] >> 4) << (quad % 4 * 2));
            }
        }
    }
}

// Six bits of scale and minimum of step `step`, as Q4_K and Q5_K store them.
inline void read_six_bits(const uint8_t* bytes, int64_t step, uint8_t* scale, uint8_t* minimum) {
    if (step < 4) {
        *scale = bytes[step] & 63;
        *minimum = bytes[step + 4] & 63;
    } else {
        *scale = static_cast<uint8_t>((bytes[step + 4] & 15) | (bytes[step - 4] >> 6) << 4);
        *minimum = static_cast<uint8_t>((bytes[step + 4] >> 4) | (bytes[step] >> 6) << 4);
    }
}

// The scales of one channel of a group.
inline void write_header(const PackProblem& p, int64_t row, int64_t group, int64_t channel, uint8_t* header) {
    const uint8_t* stored = p.codes + row * p.row_bytes;
    if (p.source <= kFileQ6K) stored += group * file_block_bytes(p.source);
    if (p.source <= kFileQ8_0) {
        std::memcpy(header + 2 * channel, stored, 2);
        if (p.source == kFileQ4_1) std::memcpy(header + 32 + 2 * channel, stored + 2, 2);
    } else if (p.source == kFileQ6K) {
        std::memcpy(header + 2 * channel, stored + 208, 2);
        for (int half = 0; half < 16; ++half) header[32 + half * kTileChannels + channel] = stored[192 + half];
    } else if (p.source <= kFileQ5K) {
        std::memcpy(header + 2 * channel, stored, 2);
        std::memcpy(header + 32 + 2 * channel, stored + 2, 2);
        for (int64_t step = 0; step < 8; ++step) {
            uint8_t* six_bits = header + 64 + step * 2 * kTileChannels + channel;
            read_six_bits(stored + 4, step, six_bits, six_bits + kTileChannels);
        }
    } else {
        const Stored& t = p.target;
        const int64_t entry = row * (t.columns / t.group) + group;
        const int64_t size = t.coding == kNested4 ? 1 : t.wide_scales() ? 4 : 2;
        std::memcpy(header + size * channel, p.scales + size * entry, static_cast<size_t>(size));
        if (t.coding == kZero4) header[t.scale_bytes() + channel] = p.zeros[entry];
    }
}

inline void pack_block(const PackProblem& p, int64_t block) {
    const Stored& t = p.target;
    uint8_t* target = p.packed + block * t.block_bytes;
    alignas(64) uint8_t codes[kTileChannels * kStep];
    for (int64_t group = 0; group < t.columns / t.group; ++group) {
        std::memset(target, 0, static_cast<size_t>(t.header_bytes()));
        std::memset(codes, 0, sizeof codes);
        for (int64_t i = 0; i < kTileChannels && block * kTileChannels + i < t.channels; ++i) {
            write_header(p, block * kTileChannels + i, group, i, target);
        }
        target += t.header_bytes();
        for (int64_t step = 0; step < t.group / kStep; ++step, target += t.step_bytes()) {
            for (int64_t i = 0; i < kTileChannels && block * kTileChannels + i < t.channels; ++i) {
                const uint8_t* row = p.codes + (block * kTileChannels + i) * p.row_bytes;
                read_codes(p.source, row, group * (t.group / kStep) + step, codes + i * kStep);
            }
            write_step(t.coding, codes, target);
        }
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire
