// More tokens, on Hopper: a block owns 128 rows and a tile of tokens. One warp has the copy engine fetch weights and x;
// two warpgroups decode weights into registers, as operand A of wgmma, each while the tensor cores work for the other.
// x comes as `permute` orders it: all that a block needs of a chunk lies together. Splits of the columns are summed by
// `reduce`, in a fixed order.

constexpr int kManyThreads = 384;  // a warpgroup that fetches, and two that multiply
// Of a block's weights: the first plane, bits above, scales, minimums.
constexpr int kMainBytes = 8 * 128 * kMain, kHighBytes = 8 * 128 * kHigh;
constexpr int kScaleBytes = 256 * kScaleWords, kMinBytes = 256 * kMinWords;
constexpr int kWeightBytes = kMainBytes + kHighBytes + kScaleBytes + kMinBytes;

__device__ inline void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; DONE: }" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

__device__ inline void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Rows of 128 bytes, their 16-byte pieces exchanged by the row's number (the 128-byte swizzle).
__device__ inline unsigned long long descriptor(u32 address) {
    return (unsigned long long)((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// a[i] of a step, scaled: scale * q - minimum, rounded to 16 bits once (scales are a sum of two 16-bit floats).
struct PairScales {
    u32 high[GROUPS ? GROUPS : 1][2], low[GROUPS ? GROUPS : 1][2], minimum[GROUPS ? GROUPS : 1][2];
};

__device__ inline PairScales pair_scales(const Scales& s) {
    PairScales pairs{};
    if (GROUPS == 0) return pairs;
    for (int g = 0; g < GROUPS; ++g) {
        for (int r = 0; r < 2; ++r) {
            const float scale = s.scale[g][r];
            pairs.high[g][r] = pair_of(scale, scale);
            const float rest = scale - to_float((u16)pairs.high[g][r]);
            pairs.low[g][r] = pair_of(rest, rest);
            if (MINS) pairs.minimum[g][r] = pair_of(-s.minimum[g][r], -s.minimum[g][r]);
        }
    }
    return pairs;
}

__device__ inline void scaled_operand(const u32* w, const u32* high, const u32* table, const PairScales& s, int step,
                                      u32* a) {
    operand<false>(w, high, table, step, a);
    if (GROUPS == 0) return;
    const int g = step * GROUPS / 4;
    for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const u32 rest = MINS ? fma_pair(a[i], s.low[g][r], s.minimum[g][r]) : mul_pair(a[i], s.low[g][r]);
        a[i] = fma_pair(a[i], s.high[g][r], rest);
    }
}

WGMMA  // template <int BN> void wgmma(float* d, const u32* a, unsigned long long b): generated

template <int BN, int kStages>
__device__ inline void many_rows(const Args& p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) unsigned long long full[kStages], empty[kStages];
    constexpr int kXBytes = BN * 128;
    u8* const x_stages = memory;
    u8* const w_stages = memory + kStages * kXBytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(shared_address(full + i), 1);
            init_barrier(shared_address(empty + i), 2);  // warpgroups
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if CODE == 40
    u32* whole_table = (u32*)(w_stages + kStages * kWeightBytes);
    fill_table(whole_table);
    const u32* table = whole_table + threadIdx.x % 32;
#else
    const u32* table = nullptr;
#endif
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, t = lane % 4;
    const int first_token = blockIdx.y * BN;
    const int begin = (int)((i64)p.chunks * blockIdx.z / p.splits), end = (int)((i64)p.chunks * (blockIdx.z + 1) / p.splits);

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 8 && lane == 0) {
            for (int chunk = begin; chunk < end; ++chunk) {
                const int turn = chunk - begin, stage = turn % kStages;
                const u32 barrier = shared_address(full + stage);
                if (turn >= kStages) wait_barrier(shared_address(empty + stage), (turn / kStages - 1) & 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                             "r"(kXBytes + kWeightBytes)
                             : "memory");
                const u16* x = p.x + ((i64)chunk * p.x_stride + first_token) * kTileColumns;
                copy_bulk(shared_address(x_stages + stage * kXBytes), x, kXBytes, barrier);
                const int at = blockIdx.x * p.chunks + chunk;
                u32 to = shared_address(w_stages + stage * kWeightBytes);
                copy_bulk(to, p.packed + (i64)at * 8 * 32 * kMain, kMainBytes, barrier);
                to += kMainBytes;
                if (kHigh) copy_bulk(to, p.high + (i64)at * 8 * 32 * kHigh, kHighBytes, barrier);
                to += kHighBytes;
                if (kScaleWords) copy_bulk(to, block_scales(p, at), kScaleBytes, barrier);
                to += kScaleBytes;
                if (kMinWords) copy_bulk(to, block_minimums(p, at), kMinBytes, barrier);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(BN > 64 ? 240 : 104));
        float d[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) d[i] = 0.0f;
        u32 a[2][4][4];
        const auto turn_of = [&](int chunk, u32 (*operands)[4]) {
            const int turn = chunk - begin, stage = turn % kStages;
            wait_barrier(shared_address(full + stage), (turn / kStages) & 1);
            const u32* words = (const u32*)(w_stages + stage * kWeightBytes);
            u32 w[kWords], high[2], raw[kRawWords];
#pragma unroll
            for (int i = 0; i < kMain / 4; ++i) {
                const uint4 four = ((const uint4*)words)[(warp * (kMain / 4) + i) * 32 + lane];
                w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
            }
#pragma unroll
            for (int i = 0; i < kHigh; ++i) high[i] = words[kMainBytes / 4 + (warp * 32 + lane) * kHigh + i];
            const u32* scales = words + (kMainBytes + kHighBytes) / 4;
#pragma unroll
            for (int i = 0; i < kScaleWords; ++i) raw[i] = scales[scale_in_block(warp, row, i)];
#pragma unroll
            for (int i = 0; i < kMinWords; ++i) {
                raw[kScaleWords + i] = scales[kScaleBytes / 4 + minimum_in_block(warp, row, i)];
            }
            const PairScales s = pair_scales(scales_of(raw));
#pragma unroll
            for (int step = 0; step < 4; ++step) scaled_operand(w, high, table, s, step, operands[step]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const unsigned long long b = descriptor(shared_address(x_stages + stage * kXBytes));
#pragma unroll
            for (int step = 0; step < 4; ++step) wgmma<BN>(d, operands[step], b + 2 * step);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (turn > 0 && threadIdx.x % 128 == 0) {  // the chunk before is multiplied: its stage is free
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                                 shared_address(empty + (turn - 1) % kStages))
                             : "memory");
            }
        };
        int chunk = begin;
        for (; chunk + 1 < end; chunk += 2) {
            turn_of(chunk, a[0]);
            turn_of(chunk + 1, a[1]);
        }
        if (chunk < end) turn_of(chunk, a[0]);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

        // Results go through shared memory, so that rows of a token are stored together.
        // d[4 * n + i]: row lane / 4 + 8 * (i / 2), token 8 * n + 2 * t + i % 2
        constexpr int kPitch = 132;  // lanes of a warp meet different banks
        float* const results = (float*)memory;
        asm volatile("bar.sync 1, 256;" ::: "memory");  // every product has read its x
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int local = warp * 16 + row + 8 * r, channel = blockIdx.x * 128 + local;
            const float factor = channel < p.rows ? row_scale(p, channel) : 0.0f;
#pragma unroll
            for (int n = 0; n < BN / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) results[(8 * n + 2 * t + e) * kPitch + local] = d[4 * n + 2 * r + e] * factor;
            }
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        const int channel = blockIdx.x * 128 + 4 * lane, padded = gridDim.x * 128;
        for (int token = warp; token < BN && first_token + token < p.tokens; token += 8) {
            const float4 four = *(const float4*)(results + token * kPitch + 4 * lane);
            const i64 at = first_token + token;
            if (p.splits > 1) *(float4*)(p.partial + ((i64)blockIdx.z * p.tokens + at) * padded + channel) = four;
            else if (channel < p.rows) store_four(p, at, channel, four);
        }
    }
}

#define MANY(BN, STAGES)                                                                            \
    extern "C" __global__ void __launch_bounds__(kManyThreads, BN > 64 ? 1 : 2) many_##BN(const Args p) { \
        many_rows<BN, STAGES>(p);                                                                        \
    }
MANY(32, 6)
MANY(64, 6)
MANY(128, 6)
MANY(256, 5)
