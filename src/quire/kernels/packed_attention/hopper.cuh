// FlashAttention's backward pass on Hopper, heads of 128: a block owns 128 rows of keys, or of queries, and walks along
// tiles of 64 of the others. The copy engine fetches tiles; two warpgroups, of 64 rows each, multiply. `first` and
// `second` are what makes scores and what makes their gradients: K and V against Q and dO, or the other way round.
// Tiles have two halves of 64 columns, whose rows of 128 bytes are swizzled.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int kWidth = 128, kTile = 64, kHalf = kTile * 128, kThreads = 384, kStages = 4;

struct alignas(64) TensorMap {
    char bytes[128];
};

struct Args {
    const float *sums, *delta;  // [heads, num_tokens]
    u16 *from_first, *from_second;  // gradients: dK and dV, or dQ
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
// Keeps the compiler from moving registers that the tensor cores use.
template <int N> __device__ inline void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ inline void hold(u32 (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

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

struct True {
    static constexpr bool value = true;
};
struct False {
    static constexpr bool value = false;
};

struct Work {
    int first, count;  // of the sequence
    int row;  // of the block's first, within the sequence
    int begin, tiles, heads, head;  // tiles of each head that shares these keys
    __device__ int total() const { return (tiles - begin) * heads; }
};

template <bool KEYS> __device__ inline Work work_of(const Args& p) {
    Work w;
    w.first = p.starts[blockIdx.z];
    w.count = p.starts[blockIdx.z + 1] - w.first;
    const int group = p.heads / p.kv_heads;
    if (KEYS) {
        w.row = blockIdx.x * 128;
        w.begin = w.row / kTile, w.tiles = (w.count + kTile - 1) / kTile;
        w.heads = group, w.head = blockIdx.y * group;
    } else {  // the last queries see the most keys: they begin
        w.row = (gridDim.x - 1 - blockIdx.x) * 128;
        w.begin = 0, w.tiles = (min(w.row + 128, w.count) + kTile - 1) / kTile;
        w.heads = 1, w.head = blockIdx.y;
    }
    return w;
}

template <bool KEYS>
__device__ inline void fetch_all(const Args& p, const Work& w, const TensorMap* maps, u32 own, u32 tiles, u32 full,
                                 u32 empty) {
    const int group = p.heads / p.kv_heads;
    const int column = (KEYS ? blockIdx.y : w.head) * kWidth;
    const u32 loaded = full + 8 * kStages;
    expect(loaded, 8 * kHalf);
    for (int matrix = 0; matrix < 2; ++matrix)
        for (int part = 0; part < 4; ++part)  // a warpgroup's rows, half of the columns
            fetch(own + (4 * matrix + part) * kHalf, maps + matrix, column + part % 2 * kTile,
                  w.first + w.row + part / 2 * kTile, loaded);
    for (int turn = 0; turn < w.total(); ++turn) {
        const int stage = turn % kStages, tile = w.begin + turn % (w.tiles - w.begin);
        const int head = KEYS ? w.head + turn / (w.tiles - w.begin) : w.head / group;
        if (turn >= kStages) wait_barrier(empty + 8 * stage, (turn / kStages - 1) & 1);
        expect(full + 8 * stage, 4 * kHalf);
        for (int part = 0; part < 4; ++part)
            fetch(tiles + (4 * stage + part) * kHalf, maps + 2 + part / 2, head * kWidth + part % 2 * kTile,
                  w.first + tile * kTile, full + 8 * stage);
    }
}

// One warp: statistics of the queries of each tile, [2, 64] floats a stage.
__device__ inline void fetch_statistics(const Args& p, const Work& w, float* statistics, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32;
    for (int turn = 0; turn < w.total(); ++turn) {
        const int stage = turn % kStages, tile = w.begin + turn % (w.tiles - w.begin);
        const int head = w.head + turn / (w.tiles - w.begin);
        float sum[2], delta[2];
        for (int i = 0; i < 2; ++i) {
            const int query = tile * kTile + 32 * i + lane;
            const size_t at = (size_t)head * p.num_tokens + w.first + query;
            sum[i] = query < w.count ? p.sums[at] * 1.44269504088896f : __int_as_float(0x7f800000);
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

template <bool KEYS> __device__ inline void backward(const Args& p, const TensorMap* maps) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * kStages + 1];
    __shared__ float statistics[kStages * 2 * kTile];
    const u32 own = shared_address(memory), tiles = own + 8 * kHalf;
    const u32 full = shared_address(barriers), loaded = full + 8 * kStages, empty = loaded + 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, KEYS ? 2 : 1);
            init_barrier(empty + 8 * i, 8);  // warps
        }
        init_barrier(loaded, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const Work w = work_of<KEYS>(p);
    if (w.row >= w.count) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) fetch_all<KEYS>(p, w, maps, own, tiles, full, empty);
        if (KEYS && warp == 9) fetch_statistics(p, w, statistics, full, empty);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int part = warp / 4, own_row = w.row + part * kTile, row = own_row + warp % 4 * 16;
    const float factor = p.scale * 1.44269504088896f;
    float of_first[64], of_second[KEYS ? 64 : 1];  // gradients of the rows of `first` and `second`
#pragma unroll
    for (int i = 0; i < 64; ++i) of_first[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < (KEYS ? 64 : 1); ++i) of_second[i] = 0.0f;
    float sum[2], delta[2];  // of queries: of two rows, or of columns as they come
    if (!KEYS) {
        for (int r = 0; r < 2; ++r) {
            const int query = row + lane / 4 + 8 * r;
            const size_t at = (size_t)w.head * p.num_tokens + w.first + query;
            sum[r] = query < w.count ? p.sums[at] * 1.44269504088896f : __int_as_float(0x7f800000);
            delta[r] = query < w.count ? p.delta[at] : 0.0f;
        }
    }
    const u32 first = own + 2 * part * kHalf, second = first + 4 * kHalf;
    wait_barrier(loaded, 0);
    int turn = 0;
    const auto skip = [&]() {  // a tile of which these rows see nothing
        wait_barrier(full + 8 * (turn % kStages), turn / kStages & 1);
        if (lane == 0) arrive(empty + 8 * (turn % kStages));
        ++turn;
    };
    // Sums of the tile before may still run when the next one's scores begin.
    const auto step = [&](auto diagonal, bool follows) {
        constexpr bool kDiagonal = decltype(diagonal)::value;
        const int stage = turn % kStages;
        wait_barrier(full + 8 * stage, turn / kStages & 1);
        const u32 tile_first = tiles + 4 * stage * kHalf, tile_second = tile_first + 2 * kHalf;
        float s[32], d[32];
        u32 b[16];
        [[maybe_unused]] u32 a[KEYS ? 16 : 1];
        fence();
        multiply(s, first, tile_first);
        commit();
        if constexpr (!KEYS) {
            wait<1>();  // for the tile before: its operands' registers and its stage are free
            if (follows && lane == 0) arrive(empty + 8 * ((turn - 1) % kStages));
        }
        multiply(d, second, tile_second);
        commit();
        wait<1>();
        const float* columns = statistics + stage * 2 * kTile + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 pair = KEYS ? *(const float2*)(columns + 8 * j) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = warp % 4 * 16 + lane / 4 + i / 2 * 8, column = 8 * j + 2 * (lane % 4) + i % 2;
                const float weight = exp2f(s[4 * j + i] * factor - (KEYS ? (i % 2 ? pair.y : pair.x) : sum[i / 2]));
                s[4 * j + i] = kDiagonal && (KEYS ? column < at : column > at) ? 0.0f : weight;
            }
        }
        if constexpr (KEYS) {
            pack_all(s, a);
            fence();
            add(of_second, a, tile_second);
            commit();
            wait<1>();
        } else {
            wait<0>();
        }
        const auto weight_of = [&](int i) {  // of keys the rounded ones: registers are short
            if constexpr (KEYS) return i % 2 ? high_of(a[i / 2]) : low_of(a[i / 2]);
            else return s[i];
        };
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 pair = KEYS ? *(const float2*)(columns + kTile + 8 * j) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                d[4 * j + i] = weight_of(4 * j + i) * (d[4 * j + i] - (KEYS ? (i % 2 ? pair.y : pair.x) : delta[i / 2]));
        }
        pack_all(d, b);
        fence();
        add(of_first, b, tile_first);
        commit();
        if constexpr (KEYS) {  // there are no registers for more
            wait<0>();
            if (lane == 0) arrive(empty + 8 * stage);
        }
        ++turn;
    };
    const int diagonal = own_row / kTile;
    for (int head = 0; head < w.heads; ++head) {
        int tile = w.begin;
        if (KEYS) {
#pragma unroll 1
            for (; tile < min(diagonal, w.tiles); ++tile) skip();
            if (tile < w.tiles) step(True{}, false), ++tile;
        }
#pragma unroll 1
        for (; tile < (KEYS ? w.tiles : min(diagonal, w.tiles)); ++tile) step(False{}, KEYS || tile > w.begin);
        if (!KEYS && tile < w.tiles) step(True{}, tile > w.begin), ++tile;
        if constexpr (!KEYS) {
            wait<0>();
            if (lane == 0) arrive(empty + 8 * ((turn - 1) % kStages));
        }
#pragma unroll 1
        for (; tile < w.tiles; ++tile) skip();
    }
    const int num_heads = KEYS ? p.kv_heads : p.heads;
    const size_t stride = (size_t)num_heads * kWidth, at = w.first * stride + (size_t)blockIdx.y * kWidth;
    store(p.from_first + at, stride, of_first, p.scale, row, w.count);
    if constexpr (KEYS) store(p.from_second + at, stride, of_second, 1.0f, row, w.count);
}

struct Maps {
    TensorMap maps[4];
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) keys(const __grid_constant__ Maps maps, const Args p) {
    backward<true>(p, maps.maps);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1) queries(const __grid_constant__ Maps maps, const Args p) {
    backward<false>(p, maps.maps);
}
