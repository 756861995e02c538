// Causal attention without its matrix of probabilities in memory (Dao et al. 2022): softmax over 32 keys at a time, with a running
// maximum and sum. A block takes one head of one sequence, its keys and values in shared memory; a warp takes 16 queries at a
// time.

// qkv[sample·CONTEXT + t][3][HEADS][HEAD_DIM]; out[..][HEADS][HEAD_DIM]; lse[sample][head][t] = log2 Σ exp2(scores·log2 e).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
    attention_forward(act* out, float* lse, const act* qkv, Mask mask, float scale) {
    extern __shared__ uint4 memory[];
    u16* const keys = (u16*)memory;
    u16* const values = keys + CONTEXT * TILE_STRIDE;
    const u32 sample = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const u16* const q = qkv + (u64)sample * CONTEXT * 3 * CHANNELS + head * HEAD_DIM;
    load_tile(keys, q + CHANNELS, 3 * CHANNELS);
    load_tile(values, q + 2 * CHANNELS, 3 * CHANNELS);
    __syncthreads();

    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 key = mask.threshold ? mask.keys[sample] : 0;
    const float to_log2 = scale * 1.44269504f;
    for (u32 i = 0; i * WARPS < ROW_BLOCKS; i++) {
        if (row_block(i) >= ROW_BLOCKS) continue;
        const u32 row0 = 16 * row_block(i);
        u32 a[HEAD_DIM / 16][4];
        load_rows(a, q + (u64)row0 * 3 * CHANNELS, 3 * CHANNELS);
        float o[HEAD_DIM / 8][4];
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
        float most[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
        for (u32 key0 = 0; key0 < row0 + 16; key0 += 32) {
            float s[4][4];
#pragma unroll
            for (int n = 0; n < 4; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (key0 + 16 * half > row0 + 15) continue;
#pragma unroll
                for (int k = 0; k < HEAD_DIM / 16; k++) {
                    u32 b[4];
                    load_transposed(b, keys, key0 + 16 * half, 16 * k);
                    mma(s[2 * half], a[k], b[0], b[1]);
                    mma(s[2 * half + 1], a[k], b[2], b[3]);
                }
            }
            // Only the last tile has keys behind its queries.
            const bool edge = key0 + 31 > row0;
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[n][e] *= to_log2;
                    if (edge && key0 + 8 * n + 2 * t + e % 2 > row0 + g + e / 2 * 8) s[n][e] = -1e30f;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = -1e30f;
#pragma unroll
                for (int n = 0; n < 4; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
                top = fmaxf(most[r], quad_max(top));
                const float shrink = exp2_fast(most[r] - top);
                most[r] = top;
                total[r] *= shrink;
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        s[n][e] = exp2_fast(s[n][e] - top);
                        total[r] += s[n][e];
                    }
                }
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) o[n][2 * r] *= shrink, o[n][2 * r + 1] *= shrink;
            }
            if (mask.threshold) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const u32 row = row0 + g + e / 2 * 8, column = key0 + 8 * n + 2 * t + e % 2;
                        if (!kept(key, (head * CONTEXT + row) * CONTEXT + column, mask.threshold)) s[n][e] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (key0 + 16 * half > row0 + 15) continue;
                u32 p[4];
                as_operand(p, s[2 * half], s[2 * half + 1]);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 16; n++) {
                    u32 b[4];
                    load_straight(b, values, key0 + 16 * half, 16 * n);
                    mma(o[2 * n], p, b[0], b[1]);
                    mma(o[2 * n + 1], p, b[2], b[3]);
                }
            }
        }
        total[0] = quad_sum(total[0]);
        total[1] = quad_sum(total[1]);
        // Kept probabilities grow by 1 / (1 - p), all at once.
        const float grow = mask.threshold ? mask.scale : 1.0f;
        u16* const to = out + ((u64)sample * CONTEXT + row0) * CHANNELS + head * HEAD_DIM;
        store_rows(to, CHANNELS, o, grow / total[0], grow / total[1]);
        if (t == 0) {
            float* const line = lse + (u64)blockIdx.x * CONTEXT + row0;
            line[g] = most[0] + __log2f(total[0]);
            line[g + 8] = most[1] + __log2f(total[1]);
        }
    }
}
