// One number format: how a thread turns its bytes into fragments of tensor-core operands, and where scales lie.
//
// A weight is packed in tiles of 16 rows x 64 columns. A tile is four operands A of mma.m16n8k16 ("steps"); the bytes of
// a lane lie together, so that a lane reads 16 bytes and a warp 512 in a row. Which column is which k of a step may be
// chosen, as long as x is read alike. Groups of 32 columns or more: column = 32 * (step / 2) + 8 * t + 4 * (step % 2) +
// 2 * h + e; groups of 16: column = 16 * step + 4 * t + 2 * h + e. Here t = lane % 4, h is the half of k, e the element
// of a pair. Register i of an operand has row lane / 4 + 8 * (i % 2) and half i / 2.
//
// The including program defines
//   HALF     1: float16, 0: bfloat16
//   CODE     4, 5, 6: bits of an unsigned integer; 8: int8; 40: a code book of 16 entries; 80: float8 e4m3;
//            81: float8 that is not packed: rows of bytes, where column = 16 * t + 4 * step + 2 * h + e
//   ZERO     subtracted from an unsigned integer
//   GROUPS   groups of a tile's columns: 1, 2, 4; 0: one scale per row
//   WIDTH    tiles that a group is wide
//   MINS     1: a group has a minimum to subtract
//   SUPER    1: scales and minimums are bytes, times 16-bit floats per 256 columns
//   RING_BYTES  of few_rows.cuh
//   SCALE    type of scales: 0 float32, 1 float16, 2 bfloat16

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int kTileColumns = 64;
constexpr int kWords = CODE == 40 ? 4 : CODE >= 80 ? 8 : CODE;  // of 32 bits per lane and tile
constexpr bool kBy16 = GROUPS == 4;
constexpr u32 kOnes = HALF ? 0x3c003c00u : 0x3f803f80u;  // a pair of 1.0

struct Args {
    const u32* packed;   // [blocks of 128 rows][chunks of 64 columns][8 tiles][32 lanes][words]
    const u32* high;     // bits above the fourth, [blocks][chunks][8][32 lanes][CODE - 4]
    const void* scales;  // [blocks][groups][8 tiles][8][2 rows], or [blocks][chunks][8][8][2 rows][4] bytes with SUPER
    const void* mins;    // the same; with SUPER [blocks][chunks / 4][8][8][2 rows][1 + MINS] float16
    const u16* x;
    void* out;
    const u16* bias;
    const u16* residual;
    const u16* norm;
    float* partial;  // [splits][tokens][rows]
    i64 x_stride, out_stride, residual_stride;
    int tokens, rows, chunks;   // chunks: an even number
    int x_chunks;               // of x: there may be one of zeros behind
    int splits, up_tile, wide;  // up_tile: tiles from gate to up; wide: out is float32
    int by_four;                // rows, strides and addresses are multiples of four numbers
    float eps;
};

__device__ inline float to_float(u16 bits) {
    float value;
    if (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    else value = __uint_as_float((u32)bits << 16);
    return value;
}

__device__ inline float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline u32 pair_of(float low, float high) {
    u32 pair;
    if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline u16 to_16(float value) { return (u16)pair_of(value, 0.0f); }

__device__ inline u32 sub_pair(u32 a, u32 b) {
    u32 pair;
    if (HALF) asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    else asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ inline u32 mul_pair(u32 a, u32 b) {
    u32 pair;
    if (HALF) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ inline u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 pair;
    if (HALF) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
}

// Bits of unsigned integers up to 7 wide are the mantissa of 128 + q in bfloat16, of 1024 + q in float16, exactly.
constexpr u32 kMagic = HALF ? 0x64006400u : 0x43004300u;
constexpr float kOffset = (HALF ? 1024.0f : 128.0f) + ZERO;  // what such a pair has too much
constexpr bool kInteger = CODE < 8, kFloat8 = CODE >= 80;

// a & b | c
__device__ inline u32 masked(u32 word, u32 mask) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "r"(mask), "r"(kMagic));
    return bits;
}

// Two signed bytes of a word, at `at` and `at` + 1.
__device__ inline u32 signed_bytes(u32 word, int at) {
    const u32 flipped = word ^ 0x80808080u;
    const float low = __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7540 + at)) - 8388736.0f;
    const float high = __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7540 + at + 1)) - 8388736.0f;
    return pair_of(low, high);
}

// Two float8, each the upper byte of a half: their bits as 16-bit floats whose exponent is too small by kTiny.
constexpr float kTiny = HALF ? 0x1p8f : 0x1p120f;
__device__ inline u32 tiny_pair(u32 halves) {
    const u32 rest = (halves >> (HALF ? 1 : 4)) & (HALF ? 0x3f803f80u : 0x07f007f0u);
    return (halves & 0x80008000u) | rest;
}

// Two float8 of a word, at `at` and `at` + 1.
__device__ inline u32 float8_pair(u32 word, int at) {
    return mul_pair(tiny_pair(__byte_perm(word, 0, at == 0 ? 0x1404 : 0x3424)), HALF ? 0x5c005c00u : 0x7b807b80u);
}

#if CODE == 40
__constant__ u16 code_book[16] = {CODES};
#define SHARED_TABLE u32* table
// Pairs of code book entries for every byte, once per bank, so that lanes do not wait for each other.
__device__ inline void fill_table(u32* table) {
    for (int i = threadIdx.x; i < 256 * 32; i += blockDim.x) {
        const int byte = i / 32;
        table[i] = code_book[byte & 15] | (u32)code_book[byte >> 4] << 16;
    }
}
#endif

// Operand `step` of a tile, without scales. `w`, `high`: the lane's words; `table`: of a code book, the lane's bank.
// `kRaw`: unsigned integers come kOffset too large, float8 kTiny too small; both cost no instruction. Rows of float8
// come with the second and third element of a quad exchanged, as `stage_x` stores x.
template <bool kRaw>
__device__ inline void operand(const u32* w, const u32* high, const u32* table, int step, u32* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (CODE == 8) a[i] = signed_bytes(w[2 * step + i / 2], i % 2 * 2);
        else if (CODE == 80 && kRaw) a[i] = tiny_pair(__byte_perm(w[2 * step + i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424));
        else if (CODE == 81 && kRaw) a[i] = tiny_pair(w[i % 2 * 4 + step] << (i / 2 == 0 ? 8 : 0));
        else if (CODE == 80) a[i] = float8_pair(w[2 * step + i / 2], i % 2 * 2);
        else if (CODE == 81) a[i] = float8_pair(w[i % 2 * 4 + step], i / 2 * 2);
        else if (CODE == 40) a[i] = table[((w[step] >> (8 * i)) & 255u) * 32];
        else {
            a[i] = masked(w[step] >> (4 * i), 0x000f000fu);
            if (CODE == 6) a[i] |= ((high[step / 2] >> (step % 2 * 8 + 2 * i)) & 0x00030003u) << 4;
            if (CODE == 5) a[i] |= ((high[0] >> (4 * step + i)) & 0x00010001u) << 4;
            if (!kRaw) a[i] = sub_pair(a[i], kMagic + (ZERO << 16 | ZERO));
        }
    }
}

__device__ inline float scale_of(u32 bits) {
    if (SCALE == 0) return __uint_as_float(bits);
    return SCALE == 1 ? half_to_float((u16)bits) : __uint_as_float(bits << 16);
}

// Scales and minimums of rows lane / 4 and lane / 4 + 8 of a tile, for each group of its columns.
struct Scales {
    float scale[GROUPS ? GROUPS : 1][2], minimum[GROUPS ? GROUPS : 1][2];
};

constexpr int kPer = SCALE == 0 ? 2 : 1;  // words of a group's two rows
constexpr int kScaleWords = GROUPS == 0 ? 0 : SUPER ? 2 : GROUPS * kPer;
constexpr int kMinWords = SUPER ? 1 + MINS : MINS * kScaleWords;
constexpr int kRawWords = kScaleWords + kMinWords > 0 ? kScaleWords + kMinWords : 1;

// Tile and chunk as one number.
__device__ inline int place_of(const Args& p, int tile, int chunk) {
    return (tile / 8 * p.chunks + chunk) * 8 + tile % 8;
}

// Words of a tile's scales in a block's: `tile` of 8, `row` lane / 4.
__device__ inline int scale_in_block(int tile, int row, int i) {
    return SUPER ? tile * 16 + row * 2 + i : ((i / kPer * 8 + tile) * 8 + row) * kPer + i % kPer;
}

__device__ inline int minimum_in_block(int tile, int row, int i) {
    return SUPER ? (tile * 8 + row) * (1 + MINS) + i : scale_in_block(tile, row, i);
}

// Where a block's scales and minimums of a chunk begin: `at` is block * chunks + chunk.
__device__ inline const u32* block_scales(const Args& p, int at) {
    return (const u32*)p.scales + (i64)(SUPER || GROUPS > 1 ? at : at / WIDTH) * 64 * kScaleWords;
}

__device__ inline const u32* block_minimums(const Args& p, int at) {
    return (const u32*)p.mins + (i64)(SUPER ? at / 4 : GROUPS > 1 ? at : at / WIDTH) * 64 * kMinWords;
}

// Where word `i` of a lane's scales lies: `place` as place_of gives it, `row` lane / 4.
__device__ inline const u32* raw_scale(const Args& p, int place, int row, int i) {
    if (i < kScaleWords) return block_scales(p, place / 8) + scale_in_block(place % 8, row, i);
    return block_minimums(p, place / 8) + minimum_in_block(place % 8, row, i - kScaleWords);
}

__device__ inline Scales scales_of(const u32* raw) {
    Scales s{};
#if SUPER
    for (int r = 0; r < 2; ++r) {
        const u32 bytes = raw[r];
        if (MINS) {
            const u32 both = raw[2 + r];
            const float d = half_to_float((u16)both), least = half_to_float((u16)(both >> 16));
            for (int g = 0; g < 2; ++g) {
                s.scale[g][r] = d * (float)((bytes >> (8 * g)) & 255u);
                s.minimum[g][r] = least * (float)((bytes >> (16 + 8 * g)) & 255u);
            }
        } else {
            const float d = half_to_float((u16)(raw[2] >> (16 * r)));
            for (int g = 0; g < GROUPS; ++g) s.scale[g][r] = d * (float)(signed char)(bytes >> (8 * g));
        }
    }
#else
    for (int g = 0; g < GROUPS; ++g) {
        for (int r = 0; r < 2; ++r) {
            const u32 one = kPer == 2 ? raw[2 * g + r] : raw[g] >> (16 * r);
            s.scale[g][r] = scale_of(kPer == 2 ? one : one & 0xffffu);
            if (MINS) {
                const u32 low = kPer == 2 ? raw[kScaleWords + 2 * g + r] : raw[kScaleWords + g] >> (16 * r);
                s.minimum[g][r] = scale_of(kPer == 2 ? low : low & 0xffffu);
            }
        }
    }
#endif
    return s;
}

constexpr int kMain = CODE == 5 || CODE == 6 ? 4 : kWords;  // words of the first plane
constexpr int kHigh = kWords - kMain;

__device__ inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ inline void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ inline void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where a lane's words of a tile are in global memory, and a copy of them to shared memory, where only this lane reads
// them: no barrier is needed. `to`: [words][32 lanes], the first plane in pieces of 16 bytes.
__device__ inline void copy_words(const u32* words, const u32* high, int lane, u32 to) {
#pragma unroll
    for (int i = 0; i < kMain / 4; ++i) copy_16(to + (i * 32 + lane) * 16, words + i * 128);
#pragma unroll
    for (int i = 0; i < kHigh; ++i) copy_4(to + ((kMain + i) * 32 + lane) * 4, high + i);
}

__device__ inline void read_words(const u32* from, int lane, u32* w, u32* high) {
#pragma unroll
    for (int i = 0; i < kMain / 4; ++i) {
        const uint4 four = ((const uint4*)from)[i * 32 + lane];
        w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < kHigh; ++i) high[i] = from[(kMain + i) * 32 + lane];
}

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }

__device__ inline void store_out(const Args& p, i64 token, int row, float value) {
    if (p.bias) value += to_float(p.bias[row]);
    if (p.residual) value += to_float(p.residual[token * p.residual_stride + row]);
    if (p.wide) ((float*)p.out)[token * p.out_stride + row] = value;
    else ((u16*)p.out)[token * p.out_stride + row] = to_16(value);
}

// Four rows of a token, as whole words where everything lies at a multiple of four.
__device__ inline void store_four(const Args& p, i64 token, int row, float4 four) {
    if (!p.by_four) {
        store_out(p, token, row, four.x);
        if (row + 1 < p.rows) store_out(p, token, row + 1, four.y);
        if (row + 2 < p.rows) store_out(p, token, row + 2, four.z);
        if (row + 3 < p.rows) store_out(p, token, row + 3, four.w);
        return;
    }
    for (int i = 0; i < 2; ++i) {
        const u16* from = i == 0 ? p.bias : p.residual;
        if (!from) continue;
        const uint2 pairs = *(const uint2*)(from + (i == 0 ? 0 : token * p.residual_stride) + row);
        four.x += to_float((u16)pairs.x), four.y += to_float((u16)(pairs.x >> 16));
        four.z += to_float((u16)pairs.y), four.w += to_float((u16)(pairs.y >> 16));
    }
    const i64 at = token * p.out_stride + row;
    if (p.wide) *(float4*)((float*)p.out + at) = four;
    else *(uint2*)((u16*)p.out + at) = make_uint2(pair_of(four.x, four.y), pair_of(four.z, four.w));
}

// Where a row's scale lies: tiles follow one another in a block.
__device__ inline int row_scale_at(int row) { return CODE == 81 ? row : row / 16 * 16 + row % 8 * 2 + row / 8 % 2; }

// What one scale per row multiplies, when a row's sum is whole.
__device__ inline float row_scale(const Args& p, int row) {
    if (GROUPS != 0) return 1.0f;
    const int at = row_scale_at(row);
    return kPer == 2 ? ((const float*)p.scales)[at] : scale_of(((const u16*)p.scales)[at]);
}

// The same, loaded early.
__device__ inline float early_row_scale(const Args& p, int row) {
    if (GROUPS != 0 || kPer == 1) return row_scale(p, row);
    float scale;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"((const float*)p.scales + row_scale_at(row)));
    return scale;
}
