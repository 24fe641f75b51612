// Up to 16 tokens: a block owns 16 rows at a time (of gate and of up); its warps share their columns out.
//
// Each warp copies its tiles to a ring in shared memory, several ahead and beyond the end of the rows, multiplies by
// tensor cores with x as operand B, and adds its sums to the other warps' in a fixed order.

constexpr int kFewWarps = 8;
constexpr int kRingBytes = RING_BYTES;  // of a block and tile, about

__device__ inline void mma(float* d, const u32* a, u32 b0, u32 b1) {
#if HALF
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Columns of a chunk that this lane multiplies: words 2 * step and 2 * step + 1 are operand B of a step.
__device__ inline void load_x(const u16* x, int chunk, int t, u32* words) {
    const u16* from = x + chunk * kTileColumns;
    if (CODE == 81) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32* w = words + 4 * half;
            asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from + 16 * t + 8 * half));
        }
    } else if (kBy16) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            asm volatile("ld.v2.u32 {%0, %1}, [%2];"
                         : "=r"(words[2 * step]), "=r"(words[2 * step + 1]) : "l"(from + 16 * step + 4 * t));
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32* w = words + 4 * half;
            asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from + 32 * half + 8 * t));
        }
    }
}

__device__ inline float first_of(u32 pair) { return to_float((u16)pair); }
__device__ inline float second_of(u32 pair) { return to_float((u16)(pair >> 16)); }

// Two chunks at a time: their groups, and the words of scales that a lane needs for them.
constexpr bool kOneGroup = GROUPS == 0 || WIDTH > 1;  // the chunks are in one group
constexpr int kSets = kOneGroup ? 1 : 2, kSetWords = kScaleWords + kMinWords;
constexpr int kPairGroups = kOneGroup ? 1 : 2 * GROUPS;
constexpr int kPairSteps = 8 / kPairGroups;  // of a group
constexpr int kPairWords = 2 * kWords + kSets * kSetWords;

// Sums of x over each group of two chunks, in the places of a product's results.
template <int NT>
__device__ inline void sum_x(const u32 (*x)[16], float (*sums)[NT][4]) {
    const u32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int g = 0; g < kPairGroups; ++g) {
            for (int i = 0; i < 4; ++i) sums[g][n][i] = 0.0f;
#pragma unroll
            for (int step = g * kPairSteps; step < (g + 1) * kPairSteps; ++step) {
                mma(sums[g][n], ones, x[n][2 * step], x[n][2 * step + 1]);
            }
        }
    }
}

// y += weights . x for two chunks, group by group.
template <int NT, bool kRaw>
__device__ inline void multiply(const u32* w, const u32* high, const u32* table, const u32* raw, const u32 (*x)[16],
                                const float (*sums)[NT][4], float (*y)[4]) {
#pragma unroll
    for (int g = 0; g < kPairGroups; ++g) {
        float d[NT][4], odd[NT][4];  // two chains of products, which do not wait for each other
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            for (int i = 0; i < 4; ++i) d[n][i] = odd[n][i] = 0.0f;
        }
#pragma unroll
        for (int step = g * kPairSteps; step < (g + 1) * kPairSteps; ++step) {
            u32 a[4];
            operand<kRaw>(w + step / 4 * kWords, high + step / 4 * 2, table, step % 4, a);
#pragma unroll
            for (int n = 0; n < NT; ++n) mma(step % 2 ? odd[n] : d[n], a, x[n][2 * step], x[n][2 * step + 1]);
        }
        const Scales s = scales_of(raw + (kOneGroup ? 0 : g / (GROUPS ? GROUPS : 1) * kSetWords));
        const int at = kOneGroup ? 0 : g % (GROUPS ? GROUPS : 1);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            for (int i = 0; i < 4; ++i) {
                float sum = d[n][i] + odd[n][i];
                if (kRaw) sum -= kOffset * sums[g][n][i];
                y[n][i] += GROUPS == 0 ? sum : s.scale[at][i / 2] * sum;
                if (MINS) y[n][i] -= s.minimum[at][i / 2] * sums[g][n][i];
            }
        }
    }
}

// One token, which is in shared memory: x times the norm's gain, in the order in which a lane reads it, and the sums of
// x over each group of two chunks.
struct Staged {
    u32* words;   // [chunks][4 lanes][8]
    float* sums;  // [chunks / 2][kPairGroups]
};
constexpr float kXScale = kFloat8 && !HALF ? 0x1p64f : 1.0f;  // weights come kTiny too small
constexpr float kOneScale = kFloat8 ? kTiny / kXScale : 1.0f;

// Returns this thread's sum of squares. A warp takes the 32 quads of two chunks at a time, and has several under way.
__device__ inline float stage_x(const Args& p, int warp, int lane, const Staged& to) {
    constexpr int kAhead = 8;
    const int pairs = p.chunks / 2, quads = p.x_chunks * 16;
    float square = 0.0f;
    for (int first = warp; first < pairs; first += kAhead * kFewWarps) {
        uint2 x[kAhead], gain[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            const int quad = (first + k * kFewWarps) * 32 + lane;
            x[k] = quad < quads ? ((const uint2*)p.x)[quad] : make_uint2(0, 0);
            gain[k] = quad < quads && p.norm ? ((const uint2*)p.norm)[quad] : make_uint2(kOnes, kOnes);
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            const int pair = first + k * kFewWarps, at = lane % 16;  // quad of a chunk
            if (pair >= pairs) break;
            float v[4] = {first_of(x[k].x), second_of(x[k].x), first_of(x[k].y), second_of(x[k].y)};
            for (int i = 0; i < 4; ++i) square += v[i] * v[i];
            v[0] *= first_of(gain[k].x) * kXScale, v[1] *= second_of(gain[k].x) * kXScale;
            v[2] *= first_of(gain[k].y) * kXScale, v[3] *= second_of(gain[k].y) * kXScale;
            const bool exchanged = CODE == 81;
            const uint2 words =
                make_uint2(pair_of(v[0], exchanged ? v[2] : v[1]), pair_of(exchanged ? v[1] : v[2], v[3]));
            const int t = CODE == 81 ? at / 4 : kBy16 ? at % 4 : at / 2 % 4;  // words 2 * step + h of lane t: decode.cuh
            const int word = CODE == 81 ? at % 4 * 2 : kBy16 ? at / 4 * 2 : at / 8 * 4 + at % 2 * 2;
            *(uint2*)(to.words + (pair * 2 + lane / 16) * 32 + t * 8 + word) = words;
            if (kInteger || MINS) {
                float sum = first_of(words.x) + second_of(words.x) + first_of(words.y) + second_of(words.y);
#pragma unroll
                for (int step = 1; step < 32 / kPairGroups; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (lane % (32 / kPairGroups) == 0) to.sums[pair * kPairGroups + lane / (32 / kPairGroups)] = sum;
            }
        }
    }
    return square;
}

// Only lanes of the first token read: the other columns of operand B are not used.
__device__ inline void load_one(u32 address, int lane, u32* words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32* w = words + 4 * i;
        asm volatile("{ .reg .pred p; setp.lt.s32 p, %5, 4; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                     : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                     : "r"(address + i / 2 * 128 + i % 2 * 16), "r"(lane));
    }
}

// y += weights . x for two chunks of one token; y: rows lane / 4 and lane / 4 + 8, right in lanes with t = 0.
__device__ inline void multiply_one(const u32* w, const u32* high, const u32* table, const u32* raw, const u32* x,
                                    const float* sums, float* y) {
#pragma unroll
    for (int g = 0; g < kPairGroups; ++g) {
        float d[4] = {}, odd[4] = {};
#pragma unroll
        for (int step = g * kPairSteps; step < (g + 1) * kPairSteps; ++step) {
            u32 a[4];
            operand<true>(w + step / 4 * kWords, high + step / 4 * 2, table, step % 4, a);
            mma(step % 2 ? odd : d, a, x[2 * step], x[2 * step + 1]);
        }
        const Scales s = scales_of(raw + (kOneGroup ? 0 : g / (GROUPS ? GROUPS : 1) * kSetWords));
        const int at = kOneGroup ? 0 : g % (GROUPS ? GROUPS : 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = d[2 * r] + odd[2 * r];
            if (kInteger) sum -= kOffset * sums[g];
            y[r] += GROUPS == 0 ? sum : s.scale[at][r] * sum;
            if (MINS) y[r] -= s.minimum[at][r] * sums[g];
        }
    }
}

template <int NT, int MT, bool kOne>
__device__ inline void few_rows(const Args& p) {
    constexpr bool kRaw = kInteger && NT == 1;       // for more tokens a subtraction is cheaper than sums of x
    constexpr int kSums = kOne ? 16 : NT * 128;      // of a tile: rows of one token, or of all
    constexpr int kSlot = 32 * kPairWords * 4;       // bytes of a warp's two tiles
    constexpr int kWhole = kRingBytes / (kFewWarps * kSlot);
    constexpr bool kHalved = NT * MT == 4 || CODE == 40;  // more blocks are worth more there
    constexpr int kRing = kHalved ? (kWhole > 1 ? kWhole / 2 : 1) : kWhole;
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ float sums[2][kFewWarps][MT][kSums];
    __shared__ float squares[kFewWarps];
    constexpr int kTableBytes = CODE == 40 ? 256 * 32 * 4 : 0;
#if CODE == 40
    u32* const whole_table = (u32*)(memory + kRing * MT * kFewWarps * kSlot);
    fill_table(whole_table);
    __syncthreads();
    const u32* table = whole_table + threadIdx.x % 32;
#else
    const u32* table = nullptr;
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, t = lane % 4;
    const int tiles = (p.rows / MT + 15) / 16;
    u8* const ring = memory + warp * kRing * MT * kSlot;
    const u32 ring_address = shared_address(ring);
    u32 next_slot = 0;  // bytes
    int next_tile = blockIdx.x, next_chunk = 2 * warp;
    // A lane's way along the rows of a tile: what lies 2 * kFewWarps chunks further is a constant away.
    const u32 *words[MT], *high_words[MT], *scales[MT], *minimums[MT];
    constexpr int kStep = 2 * kFewWarps;
    constexpr int kScaleStep = SUPER || GROUPS > 1 ? kStep * 64 * kScaleWords : kStep / WIDTH * 64 * kScaleWords;
    constexpr int kMinStep = SUPER ? kStep / 4 * 64 * kMinWords : kScaleStep;
    const auto start = [&] {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const int place = place_of(p, next_tile + m * p.up_tile, 2 * warp);
            if (CODE == 81) words[m] = p.packed + ((i64)(next_tile + m * p.up_tile) * 16 + row) * p.chunks * 16 + warp * 32 + t * 4;
            else words[m] = p.packed + (i64)place * 32 * kMain + lane * 4;
            if (kHigh) high_words[m] = p.high + ((i64)place * 32 + lane) * kHigh;
            if (kScaleWords) scales[m] = raw_scale(p, place, row, 0);
            if (kMinWords) minimums[m] = raw_scale(p, place, row, kScaleWords);
        }
    };
    start();
    const auto fetch = [&] {
        if (next_tile < tiles) {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32 to = ring_address + next_slot + m * kSlot;
                if (CODE == 81) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {  // two rows of two chunks
                        copy_16(to + (i * 32 + lane) * 16, words[m] + (i64)(i % 2) * 8 * p.chunks * 16 + i / 2 * 16);
                    }
                } else {
                    copy_words(words[m], high_words[m], lane, to);
                    copy_words(words[m] + 8 * 32 * kMain, high_words[m] + 8 * 32 * kHigh, lane, to + kWords * 128);
                }
#pragma unroll
                for (int set = 0; set < kSets; ++set) {
                    const u32 at = to + ((2 * kWords + set * kSetWords) * 32 + lane) * 4;
#pragma unroll
                    for (int i = 0; i < kScaleWords; ++i) {
                        copy_4(at + i * 128, scales[m] + set * 64 * kScaleWords + scale_in_block(0, 0, i));
                    }
#pragma unroll
                    for (int i = 0; i < kMinWords; ++i) {  // super-blocks are four chunks wide
                        copy_4(at + (kScaleWords + i) * 128,
                               minimums[m] + (SUPER ? 0 : set * 64 * kMinWords) + minimum_in_block(0, 0, i));
                    }
                }
                words[m] += CODE == 81 ? kStep * 16 : kStep * 8 * 32 * kMain;
                if (kHigh) high_words[m] += kStep * 8 * 32 * kHigh;
                if (kScaleWords) scales[m] += kScaleStep;
                if (kMinWords) minimums[m] += kMinStep;
            }
            next_chunk += kStep;
            if (next_chunk >= p.chunks) {
                next_chunk = 2 * warp, next_tile += gridDim.x;
                start();
            }
            next_slot = next_slot + MT * kSlot == kRing * MT * kSlot ? 0 : next_slot + MT * kSlot;
        }
        end_copies();
    };
    if (2 * warp >= p.chunks) next_tile = tiles;
    // Weights depend on nothing: they are fetched while the kernel before ends.
#pragma unroll 1
    for (int i = 0; i < kRing; ++i) fetch();
    if (kOne && p.norm) {  // nor does the gain, which is not in the cache since its last step
        for (int at = threadIdx.x * 64; at < p.x_chunks * kTileColumns; at += kFewWarps * 32 * 64) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm + at));
        }
    }
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const u16* x[NT];  // tokens beyond the last are read from it, and their results are not stored
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int token = n * 8 + row < p.tokens ? n * 8 + row : p.tokens - 1;
        x[n] = p.x + token * p.x_stride;
    }
    float factor = 1.0f;
    Staged staged{};
    u32 one_address = 0;
    if (kOne) {
        staged.words = (u32*)(memory + kRing * MT * kFewWarps * kSlot + kTableBytes);
        staged.sums = (float*)(staged.words + p.chunks * 32);
        one_address = shared_address(staged.words) + t * 32;
        float square = stage_x(p, warp, lane, staged);
        if (p.norm) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
            if (lane == 0) squares[warp] = square;
        }
        __syncthreads();
        if (p.norm) {
            square = 0.0f;
            for (int v = 0; v < kFewWarps; ++v) square += squares[v];
            factor = rsqrtf(square / (float)(p.x_chunks * kTileColumns) + p.eps);
        }
        factor *= kOneScale;
    }
    int slot = 0, turn = 0;
    u32 values[NT][16] = {};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        float y[MT][NT][4] = {}, scale[MT];
        if (kOne) {  // read now, so that a tile's end does not wait for memory
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const int channel = tile * 16 + (int)threadIdx.x;
                const bool stored = threadIdx.x < 16 && channel < p.rows / MT;
                scale[m] = stored ? early_row_scale(p, channel + m * p.up_tile * 16) : 1.0f;
            }
        }
        for (int chunk = 2 * warp; chunk < p.chunks; chunk += 2 * kFewWarps) {
            float x_sums[kPairGroups][NT][4], one_sums[kPairGroups];
            if (kOne) {
                load_one(one_address + chunk * 128, lane, values[0]);
                if (kInteger || MINS) {
#pragma unroll
                    for (int g = 0; g < kPairGroups; ++g) one_sums[g] = staged.sums[chunk / 2 * kPairGroups + g];
                }
            } else {
                const int second = chunk + 1 < p.x_chunks ? chunk + 1 : chunk;  // behind the last, weights are zero
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    load_x(x[n], chunk, t, values[n]);
                    load_x(x[n], second, t, values[n] + 8);
                }
                if (kRaw || MINS) sum_x<NT>(values, x_sums);
            }
            wait_copies<kRing - 1>();
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32* from = (const u32*)(ring + (slot * MT + m) * kSlot);
                u32 w[2 * kWords], high[4], raw[kSets * kSetWords + 1];
                read_words(from, lane, w, high);
                read_words(from + kWords * 32, lane, w + kWords, high + 2);
#pragma unroll
                for (int i = 0; i < kSets * kSetWords; ++i) raw[i] = from[(2 * kWords + i) * 32 + lane];
                if (kOne) multiply_one(w, high, table, raw, values[0], one_sums, y[m][0]);
                else multiply<NT, kRaw>(w, high, table, raw, values, x_sums, y[m]);
            }
            slot = slot + 1 == kRing ? 0 : slot + 1;
            fetch();
        }
        if (kOne) {
            if (t == 0) {
                for (int m = 0; m < MT; ++m)
                    for (int r = 0; r < 2; ++r) sums[turn][warp][m][row + 8 * r] = y[m][0][r];
            }
        } else {  // y[m][n][i]: row lane / 4 + 8 * (i / 2), token 8 * n + 2 * t + i % 2
            for (int m = 0; m < MT; ++m)
                for (int n = 0; n < NT; ++n)
                    for (int i = 0; i < 4; ++i)
                        sums[turn][warp][m][(8 * n + 2 * t + i % 2) * 16 + row + i / 2 * 8] = y[m][n][i];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < kSums; i += kFewWarps * 32) {
            const int token = i / 16, channel = tile * 16 + i % 16;
            if (token >= p.tokens || channel >= p.rows / MT) continue;
            float total[MT] = {};
            for (int m = 0; m < MT; ++m) {
                for (int v = 0; v < kFewWarps; ++v) total[m] += sums[turn][v][m][i];
                total[m] *= factor * (kOne ? scale[m] : row_scale(p, channel + m * p.up_tile * 16));
            }
            if (MT == 2) {
                if (p.bias) {
                    total[0] += to_float(p.bias[channel]);
                    total[MT - 1] += to_float(p.bias[channel + p.up_tile * 16]);
                }
                ((u16*)p.out)[token * p.out_stride + channel] = to_16(silu(total[0]) * total[MT - 1]);
            } else {
                store_out(p, token, channel, total[0]);
            }
        }
    }
}

#define FEW(name, NT, MT, ONE) \
    extern "C" __global__ void __launch_bounds__(kFewWarps * 32) name(const Args p) { few_rows<NT, MT, ONE>(p); }
FEW(few_1, 1, 1, false)
FEW(few_2, 2, 1, false)
FEW(few_1_gated, 1, 2, false)
FEW(few_2_gated, 2, 2, false)
FEW(one, 1, 1, true)
FEW(one_gated, 1, 2, true)
