// The backward pass of attention, its probabilities computed again. Blocks with blockIdx.y 0 compute the queries' gradients, those
// with 1 the keys' and values': each sums in registers, so that nothing is added by atomics and the result is always the same.

// 16 queries at a time against the keys before them.
__device__ __forceinline__ void backward_queries(act* dqkv, const float* lse, const act* dout, const act* out, const act* qkv,
                                                 const Mask& mask, float scale, u16* memory) {
    u16* const keys = memory;
    u16* const values = keys + CONTEXT * TILE_STRIDE;
    const u32 sample = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const u64 first = (u64)sample * CONTEXT;
    const u16* const q = qkv + first * 3 * CHANNELS + head * HEAD_DIM;
    load_tile(keys, q + CHANNELS, 3 * CHANNELS);
    load_tile(values, q + 2 * CHANNELS, 3 * CHANNELS);
    __syncthreads();

    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 key = mask.threshold ? mask.keys[sample] : 0;
    const float to_log2 = scale * 1.44269504f;
    for (u32 i = 0; i * WARPS < ROW_BLOCKS; i++) {
        if (row_block(i) >= ROW_BLOCKS) continue;
        const u32 row0 = 16 * row_block(i);
        const u64 at = (first + row0) * CHANNELS + head * HEAD_DIM;
        u32 a[HEAD_DIM / 16][4], d[HEAD_DIM / 16][4], o[HEAD_DIM / 16][4];
        load_rows(a, q + (u64)row0 * 3 * CHANNELS, 3 * CHANNELS);
        load_rows(d, dout + at, CHANNELS);
        load_rows(o, out + at, CHANNELS);
        // Σ_j P_ij dP_ij = dO_i · O_i, dropout or not.
        float delta[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                delta[e % 2] += low_bf16(d[k][e]) * low_bf16(o[k][e]) + high_bf16(d[k][e]) * high_bf16(o[k][e]);
            }
        }
        delta[0] = quad_sum(delta[0]);
        delta[1] = quad_sum(delta[1]);
        const float* const line = lse + (u64)blockIdx.x * CONTEXT + row0;
        const float norm[2] = {line[g], line[g + 8]};
        float dq[HEAD_DIM / 8][4];
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0.0f;
        for (u32 key0 = 0; key0 <= row0; key0 += 16) {
            float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                u32 b[4];
                load_transposed(b, keys, key0, 16 * k);
                mma(s[0], a[k], b[0], b[1]);
                mma(s[1], a[k], b[2], b[3]);
                load_transposed(b, values, key0, 16 * k);
                mma(dp[0], d[k], b[0], b[1]);
                mma(dp[1], d[k], b[2], b[3]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 row = row0 + g + e / 2 * 8, column = key0 + 8 * n + 2 * t + e % 2;
                    const float p = column > row ? 0.0f : exp2_fast(s[n][e] * to_log2 - norm[e / 2]);
                    float f = dp[n][e];
                    if (mask.threshold) f *= factor(mask, key, (head * CONTEXT + row) * CONTEXT + column);
                    s[n][e] = p * (f - delta[e / 2]);
                }
            }
            u32 ds[4];
            as_operand(ds, s[0], s[1]);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                u32 b[4];
                load_straight(b, keys, key0, 16 * n);
                mma(dq[2 * n], ds, b[0], b[1]);
                mma(dq[2 * n + 1], ds, b[2], b[3]);
            }
        }
        store_rows(dqkv + (first + row0) * 3 * CHANNELS + head * HEAD_DIM, 3 * CHANNELS, dq, scale, scale);
    }
}

// 16 keys at a time against the queries behind them; scores and probabilities are transposed.
__device__ __forceinline__ void backward_keys(act* dqkv, const float* lse, const act* dout, const act* out, const act* qkv,
                                              const Mask& mask, float scale, u16* memory) {
    u16* const queries = memory;
    u16* const douts = queries + CONTEXT * TILE_STRIDE;
    float* const norms = (float*)(douts + CONTEXT * TILE_STRIDE);
    float* const deltas = norms + CONTEXT;
    const u32 sample = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const u64 first = (u64)sample * CONTEXT;
    const u16* const q = qkv + first * 3 * CHANNELS + head * HEAD_DIM;
    load_tile(queries, q, 3 * CHANNELS);
    const u32 pieces = HEAD_DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < CONTEXT * pieces; i += 32 * WARPS) {
        const u32 row = i / pieces, piece = i % pieces;
        const u64 at = (first + row) * CHANNELS + head * HEAD_DIM + 8 * piece;
        const uint4 x = *(const uint4*)(dout + at), y = *(const uint4*)(out + at);
        *(uint4*)(douts + row * TILE_STRIDE + 8 * piece) = x;
        float sum = low_bf16(x.x) * low_bf16(y.x) + high_bf16(x.x) * high_bf16(y.x);
        sum += low_bf16(x.y) * low_bf16(y.y) + high_bf16(x.y) * high_bf16(y.y);
        sum += low_bf16(x.z) * low_bf16(y.z) + high_bf16(x.z) * high_bf16(y.z);
        sum += low_bf16(x.w) * low_bf16(y.w) + high_bf16(x.w) * high_bf16(y.w);
#pragma unroll
        for (u32 distance = pieces / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (piece == 0) deltas[row] = sum;
    }
    for (u32 i = threadIdx.x; i < CONTEXT; i += 32 * WARPS) norms[i] = lse[(u64)blockIdx.x * CONTEXT + i];
    __syncthreads();

    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 key = mask.threshold ? mask.keys[sample] : 0;
    const float to_log2 = scale * 1.44269504f;
    for (u32 i = 0; i * WARPS < ROW_BLOCKS; i++) {
        if (row_block(i) >= ROW_BLOCKS) continue;
        const u32 key0 = 16 * row_block(i);
        u32 a[HEAD_DIM / 16][4], v[HEAD_DIM / 16][4];
        load_rows(a, q + CHANNELS + (u64)key0 * 3 * CHANNELS, 3 * CHANNELS);
        load_rows(v, q + 2 * CHANNELS + (u64)key0 * 3 * CHANNELS, 3 * CHANNELS);
        float dk[HEAD_DIM / 8][4], dv[HEAD_DIM / 8][4];
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            dk[n][0] = dk[n][1] = dk[n][2] = dk[n][3] = 0.0f;
            dv[n][0] = dv[n][1] = dv[n][2] = dv[n][3] = 0.0f;
        }
        for (u32 row0 = key0; row0 < CONTEXT; row0 += 16) {
            float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                u32 b[4];
                load_transposed(b, queries, row0, 16 * k);
                mma(s[0], a[k], b[0], b[1]);
                mma(s[1], a[k], b[2], b[3]);
                load_transposed(b, douts, row0, 16 * k);
                mma(dp[0], v[k], b[0], b[1]);
                mma(dp[1], v[k], b[2], b[3]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float2 norm = *(const float2*)(norms + row0 + 8 * n + 2 * t);
                const float2 delta = *(const float2*)(deltas + row0 + 8 * n + 2 * t);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 row = row0 + 8 * n + 2 * t + e % 2, column = key0 + g + e / 2 * 8;
                    const float p = column > row ? 0.0f : exp2_fast(s[n][e] * to_log2 - (e % 2 ? norm.y : norm.x));
                    float f = 1.0f;
                    if (mask.threshold) f = factor(mask, key, (head * CONTEXT + row) * CONTEXT + column);
                    dp[n][e] = p * (f * dp[n][e] - (e % 2 ? delta.y : delta.x));
                    s[n][e] = p * f;
                }
            }
            u32 p[4], ds[4];
            as_operand(p, s[0], s[1]);
            as_operand(ds, dp[0], dp[1]);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                u32 b[4];
                load_straight(b, douts, row0, 16 * n);
                mma(dv[2 * n], p, b[0], b[1]);
                mma(dv[2 * n + 1], p, b[2], b[3]);
                load_straight(b, queries, row0, 16 * n);
                mma(dk[2 * n], ds, b[0], b[1]);
                mma(dk[2 * n + 1], ds, b[2], b[3]);
            }
        }
        u16* const to = dqkv + (first + key0) * 3 * CHANNELS + head * HEAD_DIM;
        store_rows(to + CHANNELS, 3 * CHANNELS, dk, scale, scale);
        store_rows(to + 2 * CHANNELS, 3 * CHANNELS, dv, 1.0f, 1.0f);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
    attention_backward(act* dqkv, const float* lse, const act* dout, const act* out, const act* qkv, Mask mask, float scale) {
    extern __shared__ uint4 memory[];
    if (blockIdx.y == 0) {
        backward_queries(dqkv, lse, dout, out, qkv, mask, scale, (u16*)memory);
    } else {
        backward_keys(dqkv, lse, dout, out, qkv, mask, scale, (u16*)memory);
    }
}
