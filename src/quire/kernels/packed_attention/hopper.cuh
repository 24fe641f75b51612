// dK and dV of FlashAttention's backward pass on Hopper, heads of 128: a block owns 128 keys and walks along tiles of 64
// queries, of every head that shares them. The copy engine fetches tiles of Q and dO; two warpgroups, of 64 keys each,
// multiply, each while the other one computes weights. Scores are transposed, [keys, queries]. Tiles have two
// halves of 64 columns, whose rows of 128 bytes are swizzled.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int kWidth = 128, kTile = 64, kHalf = kTile * 128, kThreads = 384, kStages = 4;
constexpr float kLog2E = 1.44269504088896f;

struct alignas(64) TensorMap {
    char bytes[128];
};

struct Maps {
    TensorMap k, v, q, grad;  // [num_tokens, heads * 128]
};

struct Args {
    const float *sums, *delta;  // [heads, num_tokens]
    u16 *dk, *dv;
    const int* starts;
    float scale;
    int num_tokens, heads, kv_heads;
};

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; DONE: }" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// 64 rows of 64 columns.
__device__ inline void fetch(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The sum runs over columns of a tile: groups of eight rows are 1,024 bytes apart.
__device__ inline u64 along_columns(u32 address) {
    return (u64)((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The sum runs over rows: the two halves of the columns are kHalf apart.
__device__ inline u64 along_rows(u32 address) {
    return (u64)((address & 0x3ffffu) >> 4) | (u64)(kHalf / 16) << 16 | 64ull << 32 | 1ull << 62;
}

__device__ inline void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ inline void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
WGMMA  // scores(d[32], a, b, adds) and sums(d[64], a[4], b): generated

// d [64, 64] = a [64, 128] @ b [64, 128].T, both in shared memory.
__device__ inline void multiply(float (&d)[32], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        const u32 at = step / 4 * kHalf + step % 4 * 32;
        scores(d, along_columns(a + at), along_columns(b + at), step > 0);
    }
}

// d [64, 128] += a [64, 64] @ b [64, 128], a in registers.
__device__ inline void add(float (&d)[64], const u32 (&a)[16], u32 b) {
#pragma unroll
    for (int step = 0; step < 4; ++step) sums(d, a + 4 * step, along_rows(b + step * 16 * 128));
}

// Two neighbours of a row, in the order of operand A of wgmma.
__device__ inline void pack_all(const float (&d)[32], u32 (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = pair_of(d[2 * i], d[2 * i + 1]);
}

struct Work {
    int first, count;  // of the sequence
    int row;  // of the block's first key, within the sequence
    int begin, tiles;  // of queries
    int head, heads;
    __device__ explicit Work(const Args& p) {
        first = p.starts[blockIdx.z], count = p.starts[blockIdx.z + 1] - first;
        row = blockIdx.x * 128, begin = row / kTile, tiles = (count + kTile - 1) / kTile;
        heads = p.heads / p.kv_heads, head = blockIdx.y * heads;
    }
    __device__ int turns() const { return (tiles - begin) * heads; }
    __device__ int tile(int turn) const { return begin + turn % (tiles - begin); }
    __device__ int head_of(int turn) const { return head + turn / (tiles - begin); }
};

__device__ inline void fetch_all(const Maps& maps, const Work& w, u32 own, u32 tiles, u32 full, u32 loaded, u32 empty) {
    expect(loaded, 8 * kHalf);
    for (int part = 0; part < 4; ++part) {  // a warpgroup's rows, half of the columns
        const int column = blockIdx.y * kWidth + part % 2 * kTile, row = w.first + w.row + part / 2 * kTile;
        fetch(own + part * kHalf, &maps.k, column, row, loaded);
        fetch(own + (4 + part) * kHalf, &maps.v, column, row, loaded);
    }
    for (int turn = 0; turn < w.turns(); ++turn) {
        const int stage = turn % kStages, row = w.first + w.tile(turn) * kTile;
        if (turn >= kStages) wait_barrier(empty + 8 * stage, (turn / kStages - 1) & 1);
        expect(full + 8 * stage, 4 * kHalf);
        for (int half = 0; half < 2; ++half) {
            const int column = w.head_of(turn) * kWidth + half * kTile;
            fetch(tiles + (4 * stage + half) * kHalf, &maps.q, column, row, full + 8 * stage);
            fetch(tiles + (4 * stage + 2 + half) * kHalf, &maps.grad, column, row, full + 8 * stage);
        }
    }
}

// One warp: each tile's statistics, [2, 64] floats a stage. Beyond the sequence softmax has an infinite sum.
__device__ inline void fetch_statistics(const Args& p, const Work& w, float* statistics, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32;
    for (int turn = 0; turn < w.turns(); ++turn) {
        const int stage = turn % kStages;
        float sum[2], delta[2];
        for (int i = 0; i < 2; ++i) {
            const int query = w.tile(turn) * kTile + 32 * i + lane;
            const size_t at = (size_t)w.head_of(turn) * p.num_tokens + w.first + query;
            sum[i] = query < w.count ? p.sums[at] * kLog2E : __int_as_float(0x7f800000);
            delta[i] = query < w.count ? p.delta[at] : 0.0f;
        }
        if (turn >= kStages) wait_barrier(empty + 8 * stage, (turn / kStages - 1) & 1);
        float* to = statistics + stage * 2 * kTile;
        for (int i = 0; i < 2; ++i) to[32 * i + lane] = sum[i], to[kTile + 32 * i + lane] = delta[i];
        __syncwarp();
        if (lane == 0) arrive(full + 8 * stage);
    }
}

__device__ inline void store(u16* to, size_t stride, const float (&d)[64], float scale, int row, int count) {
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < 2; ++r) {
        const int at = row + lane / 4 + 8 * r;
        if (at >= count) continue;
#pragma unroll
        for (int j = 0; j < 16; ++j)
            *(u32*)(to + at * stride + 8 * j + 2 * (lane % 4)) = pair_of(d[4 * j + 2 * r] * scale, d[4 * j + 2 * r + 1] * scale);
    }
}

// dk, dv [64, 128] += those of one tile of queries; `k` and `v` are a warpgroup's rows.
template <bool kDiagonal>
__device__ inline void add_tile(float (&dk)[64], float (&dv)[64], u32 k, u32 v, u32 q, u32 grad, const float* sums, float factor) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, pair_column = 2 * (threadIdx.x % 4);
    float weights[32], gradients[32];
    u32 a[16], b[16];
    fence();
    multiply(weights, k, q);
    commit();
    multiply(gradients, v, grad);
    commit();
    wait<1>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 sum = *(const float2*)(sums + 8 * j + pair_column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float weight = exp2f(weights[4 * j + i] * factor - (i % 2 ? sum.y : sum.x));
            const bool seen = !kDiagonal || 8 * j + pair_column + i % 2 >= row + i / 2 * 8;
            weights[4 * j + i] = seen ? weight : 0.0f;
        }
    }
    pack_all(weights, a);
    fence();
    add(dv, a, grad);
    commit();
    wait<1>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 delta = *(const float2*)(sums + kTile + 8 * j + pair_column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // the rounded weights: registers are short
            const u32 pair = a[2 * j + i / 2];
            gradients[4 * j + i] = (i % 2 ? high_of(pair) : low_of(pair)) * (gradients[4 * j + i] - (i % 2 ? delta.y : delta.x));
        }
    }
    pack_all(gradients, b);
    fence();
    add(dk, b, q);
    commit();
    wait<0>();  // there are no registers for products of two tiles
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) keys(const __grid_constant__ Maps maps, const Args p) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * kStages + 1];
    __shared__ float statistics[kStages * 2 * kTile];
    const u32 own = shared_address(memory), tiles = own + 8 * kHalf;
    const u32 full = shared_address(barriers), loaded = full + 8 * kStages, empty = loaded + 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, 2);  // the copy engine, and statistics
            init_barrier(empty + 8 * i, 8);  // warps
        }
        init_barrier(loaded, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const Work w(p);
    if (w.row >= w.count) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) fetch_all(maps, w, own, tiles, full, loaded, empty);
        if (warp == 9) fetch_statistics(p, w, statistics, full, empty);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int part = warp / 4, diagonal = w.row / kTile + part;
    const float factor = p.scale * kLog2E;
    const u32 k = own + 2 * part * kHalf, v = k + 4 * kHalf;
    float dk[64], dv[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) dk[i] = dv[i] = 0.0f;
    wait_barrier(loaded, 0);
    int turn = 0;
    for (int head = 0; head < w.heads; ++head) {
#pragma unroll 1
        for (int tile = w.begin; tile < w.tiles; ++tile, ++turn) {
            const int stage = turn % kStages;
            const u32 q = tiles + 4 * stage * kHalf;
            const float* sums = statistics + stage * 2 * kTile;
            wait_barrier(full + 8 * stage, turn / kStages & 1);
            if (tile > diagonal)
                add_tile<false>(dk, dv, k, v, q, q + 2 * kHalf, sums, factor);
            else if (tile == diagonal)
                add_tile<true>(dk, dv, k, v, q, q + 2 * kHalf, sums, factor);
            if (lane == 0) arrive(empty + 8 * stage);
        }
    }
    const int row = w.row + part * kTile + warp % 4 * 16;
    const size_t stride = (size_t)p.kv_heads * kWidth, at = w.first * stride + (size_t)blockIdx.y * kWidth;
    store(p.dk + at, stride, dk, p.scale, row, w.count);
    store(p.dv + at, stride, dv, 1.0f, row, w.count);
}
