// LayerNorm and what stands before it: the embedding or a residual connection, so that the stream is read once. A warp takes a
// row and keeps it in registers; blocks have 8 warps.

#define QUADS (CHANNELS / 4)
#define PER_LANE ((QUADS + 31) / 32)
typedef float Row[PER_LANE][4];

// The loop over a row's groups of four that this lane holds: `i` counts them, `c` is the first channel.
#define FOR_QUADS(i, c)                                                                                                \
    _Pragma("unroll") for (u32 i = 0, c = 4 * (threadIdx.x % 32); i < PER_LANE; i++, c += 128) if (c < CHANNELS)

__device__ __forceinline__ void normalize(const Row& x, u32 row, act* out, float2* stats, const float* weight) {
    float sum = 0.0f;
    FOR_QUADS(i, c) sum += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
    const float mean = warp_sum(sum) / CHANNELS;
    float squares = 0.0f;
    FOR_QUADS(i, c) {
#pragma unroll
        for (int k = 0; k < 4; k++) squares += (x[i][k] - mean) * (x[i][k] - mean);
    }
    const float rstd = rsqrtf(warp_sum(squares) / CHANNELS + 1e-5f);
    if (threadIdx.x % 32 == 0) stats[row] = make_float2(mean, rstd);
    FOR_QUADS(i, c) {
        float w[4], y[4];
        load4(w, weight + c);
#pragma unroll
        for (int k = 0; k < 4; k++) y[k] = (x[i][k] - mean) * rstd * w[k];
        store4(out + (u64)row * CHANNELS + c, y);
    }
}

// stream = dropout(wte[token] + wpe[position]); out = layernorm(stream).
extern "C" __global__ void embed_norm(float* stream, act* out, float2* stats, const u32* tokens, const float* wte,
                                      const float* wpe, const float* weight, Mask mask, u32 rows) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u32 sample = row / CONTEXT, t = row % CONTEXT, token = tokens[row];
    const u64 key = mask.threshold ? mask.keys[sample] : 0;
    Row x;
    FOR_QUADS(i, c) {
        float a[4], b[4];
        load4(a, wte + (u64)token * CHANNELS + c);
        load4(b, wpe + (u64)t * CHANNELS + c);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[i][k] = a[k] + b[k];
            if (mask.threshold) x[i][k] *= factor(mask, key, t * CHANNELS + c + k);
        }
        store4(stream + (u64)row * CHANNELS + c, x[i]);
    }
    normalize(x, row, out, stats, weight);
}

// stream = before + dropout(branch); out = layernorm(stream).
extern "C" __global__ void residual_norm(float* stream, act* out, float2* stats, const float* before, const act* branch,
                                         const float* weight, Mask mask, u32 rows) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u32 sample = row / CONTEXT, t = row % CONTEXT;
    const u64 key = mask.threshold ? mask.keys[sample] : 0;
    Row x;
    FOR_QUADS(i, c) {
        float a[4], b[4];
        load4(a, before + (u64)row * CHANNELS + c);
        load4(b, branch + (u64)row * CHANNELS + c);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (mask.threshold) b[k] *= factor(mask, key, t * CHANNELS + c + k);
            x[i][k] = a[k] + b[k];
        }
        store4(stream + (u64)row * CHANNELS + c, x[i]);
    }
    normalize(x, row, out, stats, weight);
}

// stream (a gradient) += the gradient through layernorm, or = with `first`; branch = dropout(stream), the gradient of the branch
// that comes next on the way back. partial[block]: the block's share of the weight's gradient, for column_sum.
extern "C" __global__ void norm_backward(float* stream, act* branch, float* partial, const act* dy, const float* x,
                                         const float2* stats, const float* weight, Mask mask, u32 rows, u32 first) {
    __shared__ float sums[8][CHANNELS];
    const u32 warp = threadIdx.x / 32;
    Row dw;
    FOR_QUADS(i, c) dw[i][0] = dw[i][1] = dw[i][2] = dw[i][3] = 0.0f;
    for (u32 row = blockIdx.x * 8 + warp; row < rows; row += gridDim.x * 8) {
        const u64 at = (u64)row * CHANNELS;
        const float2 moments = stats[row];
        const float mean = moments.x, rstd = moments.y;
        Row g, xhat;
        float sum = 0.0f, dot = 0.0f;
        FOR_QUADS(i, c) {
            float w[4], d[4];
            load4(w, weight + c);
            load4(d, dy + at + c);
            load4(xhat[i], x + at + c);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                xhat[i][k] = (xhat[i][k] - mean) * rstd;
                dw[i][k] += d[k] * xhat[i][k];
                g[i][k] = d[k] * w[k];
                sum += g[i][k];
                dot += g[i][k] * xhat[i][k];
            }
        }
        sum = warp_sum(sum) / CHANNELS;
        dot = warp_sum(dot) / CHANNELS;
        const u32 sample = row / CONTEXT, t = row % CONTEXT;
        const u64 key = mask.threshold ? mask.keys[sample] : 0;
        FOR_QUADS(i, c) {
            float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (!first) load4(s, stream + at + c);
#pragma unroll
            for (int k = 0; k < 4; k++) s[k] += rstd * (g[i][k] - sum - xhat[i][k] * dot);
            store4(stream + at + c, s);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (mask.threshold) s[k] *= factor(mask, key, t * CHANNELS + c + k);
            }
            store4(branch + at + c, s);
        }
    }
    FOR_QUADS(i, c) store4(&sums[warp][c], dw[i]);
    __syncthreads();
    for (u32 c = threadIdx.x; c < CHANNELS; c += blockDim.x) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) sum += sums[w][c];
        partial[(u64)blockIdx.x * CHANNELS + c] = sum;
    }
}

// out[c] = the sum of partial[·][c]. Blocks of 32 columns and 32 lines.
extern "C" __global__ void column_sum(float* out, const float* partial, u32 lines) {
    __shared__ float sums[32][33];
    const u32 c = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < CHANNELS) {
        for (u32 line = threadIdx.y; line < lines; line += 32) sum += partial[(u64)line * CHANNELS + c];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    const u32 column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < CHANNELS) out[column] = sum;
}

// dwpe[t] = the sum of d[sample][t] over the samples. A thread takes four channels.
extern "C" __global__ void positions_backward(float* dwpe, const act* d, u32 samples) {
    const u32 quad = blockIdx.x * blockDim.x + threadIdx.x;
    if (quad >= CONTEXT * QUADS) return;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (u32 sample = 0; sample < samples; sample++) {
        float v[4];
        load4(v, d + (u64)sample * CONTEXT * CHANNELS + 4 * quad);
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k] += v[k];
    }
    store4(dwpe + 4 * quad, sum);
}
