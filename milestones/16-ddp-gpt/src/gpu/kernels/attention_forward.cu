// Causal attention without its matrix of probabilities in memory (Dao et al. 2022): softmax over 16 keys at a time, with a running
// maximum and sum. A block takes one head of one sequence, its keys and values in shared memory; a warp takes 32 queries at a
// time, so that each load from there feeds four products.

// The running maximum may lag behind by so much (a factor of 2^8): sums stay far from overflow, and most tiles need no new one.
#define LAG 8.0f

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
    for (u32 i = 0; i * WARPS < CONTEXT / 32; i++) {
        if (row_block(i) >= CONTEXT / 32) continue;
        const u32 row0 = 32 * row_block(i);
        u32 a[2][HEAD_DIM / 16][4];
        load_rows(a[0], q + (u64)row0 * 3 * CHANNELS, 3 * CHANNELS);
        load_rows(a[1], q + (u64)(row0 + 16) * 3 * CHANNELS, 3 * CHANNELS);
        float o[2][HEAD_DIM / 8][4] = {};
        float most[2][2] = {{-1e30f, -1e30f}, {-1e30f, -1e30f}}, total[2][2] = {};
        for (u32 key0 = 0; key0 < row0 + 32; key0 += 16) {
            float s[2][2][4] = {};
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                u32 b[4];
                load_transposed(b, keys, key0, 16 * k);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(s[m][0], a[m][k], b[0], b[1]);
                    mma(s[m][1], a[m][k], b[2], b[3]);
                }
            }
            // Only the last tiles have keys behind their queries.
            if (key0 + 15 > row0) {
#pragma unroll
                for (int e = 0; e < 16; e++) {
                    const u32 column = key0 + e / 4 % 2 * 8 + 2 * t + e % 2, row = row0 + e / 8 * 16 + g + e / 2 % 2 * 8;
                    if (column > row) s[e / 8][e / 4 % 2][e % 4] = -1e30f;
                }
            }
            float top[2][2];
            bool higher = false;
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float left = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
                    const float right = fmaxf(s[m][1][2 * r], s[m][1][2 * r + 1]);
                    top[m][r] = fmaxf(left, right) * to_log2;
                    higher = higher || top[m][r] > most[m][r] + LAG;
                }
            }
            if (__any_sync(0xffffffffu, higher)) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float next = fmaxf(most[m][r], quad_max(top[m][r]));
                        const float shrink = exp2_fast(most[m][r] - next);
                        most[m][r] = next;
                        total[m][r] *= shrink;
#pragma unroll
                        for (int n = 0; n < HEAD_DIM / 8; n++) o[m][n][2 * r] *= shrink, o[m][n][2 * r + 1] *= shrink;
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
#pragma unroll
                    for (int n = 0; n < 2; n++) {
#pragma unroll
                        for (int e = 2 * r; e < 2 * r + 2; e++) {
                            const float p = exp2_fast(s[m][n][e] * to_log2 - most[m][r]);
                            total[m][r] += p;
                            s[m][n][e] = p;
                        }
                    }
                }
            }
            if (mask.threshold) {
#pragma unroll
                for (int e = 0; e < 16; e++) {
                    const u32 column = key0 + e / 4 % 2 * 8 + 2 * t + e % 2, row = row0 + e / 8 * 16 + g + e / 2 % 2 * 8;
                    if (!kept(key, (head * CONTEXT + row) * CONTEXT + column, mask.threshold)) s[e / 8][e / 4 % 2][e % 4] = 0.0f;
                }
            }
            u32 p[2][4];
            as_operand(p[0], s[0][0], s[0][1]);
            as_operand(p[1], s[1][0], s[1][1]);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                u32 b[4];
                load_straight(b, values, key0, 16 * n);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(o[m][2 * n], p[m], b[0], b[1]);
                    mma(o[m][2 * n + 1], p[m], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 row = row0 + 16 * m;
            const float upper = quad_sum(total[m][0]), lower = quad_sum(total[m][1]);
            u16* const to = out + ((u64)sample * CONTEXT + row) * CHANNELS + head * HEAD_DIM;
            // Kept probabilities grow by 1 / (1 - p), all at once.
            const float grow = mask.threshold ? mask.scale : 1.0f;
            store_rows(to, CHANNELS, o[m], grow / upper, grow / lower);
            if (t == 0) {
                float* const line = lse + (u64)blockIdx.x * CONTEXT + row;
                line[g] = most[m][0] + __log2f(upper);
                line[g + 8] = most[m][1] + __log2f(lower);
            }
        }
    }
}
