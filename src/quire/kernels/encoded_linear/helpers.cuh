// What the products of many tokens need beside them: x in the weights' order of columns, sums of splits, whole weights.

// x [tokens, columns] -> p.out [chunks][padded tokens][64 columns], columns ordered as physical k of the operands, 16-byte
// pieces of a row exchanged by the token's number (wgmma's 128-byte swizzle). One thread per 32 columns.
extern "C" __global__ void permute(const Args p) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int parts = p.chunks * 2;
    const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (i64)p.tokens * parts) return;
    const int token = (int)(index / parts), part = (int)(index % parts);
    const uint4* from = (const uint4*)(p.x + token * p.x_stride + part * 32);
    u32 in[16], out[16];
    for (int i = 0; i < 4; ++i) {
        const uint4 four = part < p.x_chunks * 2 ? from[i] : make_uint4(0, 0, 0, 0);
        in[4 * i] = four.x, in[4 * i + 1] = four.y, in[4 * i + 2] = four.z, in[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int step = 0; step < 2; ++step)
        for (int h = 0; h < 2; ++h)
            for (int t = 0; t < 4; ++t)
                out[8 * step + 4 * h + t] = kBy16 ? in[8 * step + 2 * t + h] : in[4 * t + 2 * step + h];
    uint4* to = (uint4*)p.out + ((i64)(part / 2) * p.out_stride + token) * 8;
    for (int i = 0; i < 4; ++i) {
        const int piece = (part % 2 * 4 + i) ^ (token % 8);
        to[piece] = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
}

// Sums of p.partial [splits][tokens][padded rows] over its splits, in order, four rows per thread.
extern "C" __global__ void reduce(const Args p) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int padded = (p.rows + 127) / 128 * 128;
    const i64 index = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4, whole = (i64)p.tokens * padded;
    const int row = (int)(index % padded);
    if (index >= whole || row >= p.rows) return;
    float4 sum = *(const float4*)(p.partial + index);
    for (int split = 1; split < p.splits; ++split) {
        const float4 more = *(const float4*)(p.partial + split * whole + index);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    store_four(p, index / padded, row, sum);
}

// Writes the weight in 16 bits [rows, columns] to p.out, for token counts at which a plain GEMM is faster. A warp per tile.
extern "C" __global__ void expand(const Args p) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if CODE == 40
    __shared__ u32 whole_table[256 * 32];
    fill_table(whole_table);
    __syncthreads();
    const u32* table = whole_table + threadIdx.x % 32;
#else
    const u32* table = nullptr;
#endif
    const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4, tile = blockIdx.x;
    for (int chunk = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32; chunk < p.x_chunks; chunk += gridDim.y * (blockDim.x / 32)) {
        const i64 at = place_of(p, tile, chunk);
        u32 w[kWords], high[2], raw[kRawWords], a[4][4];
#pragma unroll
        for (int i = 0; i < kMain / 4; ++i) {
            const uint4 four = ((const uint4*)p.packed)[(at * (kMain / 4) + i) * 32 + lane];
            w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < kHigh; ++i) high[i] = p.high[(at * 32 + lane) * kHigh + i];
#pragma unroll
        for (int i = 0; i < kScaleWords + kMinWords; ++i) raw[i] = *raw_scale(p, (int)at, row, i);
        const Scales s = scales_of(raw);
        for (int step = 0; step < 4; ++step) {
            operand<false>(w, high, table, step, a[step]);
            for (int i = 0; i < 4; ++i) {
                const int g = GROUPS ? step * GROUPS / 4 : 0, r = i % 2, channel = tile * 16 + row + 8 * r;
                const float scale = GROUPS ? s.scale[g][r] : row_scale(p, channel < p.rows ? channel : 0);
                const float minimum = MINS ? s.minimum[g][r] : 0.0f;
                a[step][i] = pair_of(scale * to_float((u16)a[step][i]) - minimum,
                                     scale * to_float((u16)(a[step][i] >> 16)) - minimum);
            }
        }
        for (int r = 0; r < 2; ++r) {
            const int channel = tile * 16 + row + 8 * r;
            if (channel >= p.rows) continue;
            u16* to = (u16*)p.out + (i64)channel * p.out_stride + chunk * kTileColumns;
            for (int half = 0; half < 2; ++half) {
                if (kBy16) {
                    for (int step = 2 * half; step < 2 * half + 2; ++step)
                        *(uint2*)(to + 16 * step + 4 * t) = make_uint2(a[step][r], a[step][2 + r]);
                } else {
                    *(uint4*)(to + 32 * half + 8 * t) =
                        make_uint4(a[2 * half][r], a[2 * half][2 + r], a[2 * half + 1][r], a[2 * half + 1][2 + r]);
                }
            }
        }
    }
}
