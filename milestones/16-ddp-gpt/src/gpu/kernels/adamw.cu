// The optimizer over one flat buffer: the gradient's norm, then everything else in one pass.

// partial[block] = the block's share of Σ g².
extern "C" __global__ void square_sum(float* partial, const float* g, u64 quads) {
    __shared__ float scratch[32];
    float sum = 0.0f;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += (u64)gridDim.x * blockDim.x) {
        float v[4];
        load4(v, g + 4 * i);
        sum += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// What changes from step to step: lr / (1 - beta1^t), 1 / (1 - beta2^t), 1 - lr·decay.
struct __align__(16) Rates {
    float rate, correction, keep, unused;
};

// Clips the gradient to `most` and updates the parameters; `copy` receives them in the type that products read. decays[i /
// CHANNELS] says whether value i belongs to a tensor that decays: every tensor's length is a multiple of CHANNELS.
extern "C" __global__ void adamw(float* values, act* copy, float* mean, float* square, const float* gradient,
                                 const u8* decays, const float* partial, u32 partials, const Rates* schedule,
                                 const u64* clock, float beta1, float beta2, float most, u64 quads) {
    __shared__ float scratch[32];
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < partials; i += blockDim.x) squares += partial[i];
    const float norm = sqrtf(block_sum(squares, scratch));
    const float clip = norm > most ? most / norm : 1.0f;
    const Rates rates = schedule[*clock];
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += (u64)gridDim.x * blockDim.x) {
        float p[4], m[4], v[4], g[4];
        load4(p, values + 4 * i), load4(m, mean + 4 * i), load4(v, square + 4 * i), load4(g, gradient + 4 * i);
        const float keep = decays[4 * i / CHANNELS] ? rates.keep : 1.0f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float d = g[k] * clip;
            m[k] = beta1 * m[k] + (1.0f - beta1) * d;
            v[k] = beta2 * v[k] + (1.0f - beta2) * d * d;
            p[k] = p[k] * keep - rates.rate * m[k] / (sqrtf(v[k] * rates.correction) + 1e-8f);
        }
        store4(values + 4 * i, p), store4(mean + 4 * i, m), store4(square + 4 * i, v);
#if ACT_BF16
        store4(copy + 4 * i, p);
#endif
    }
}

// The parameters in the type that products read, before the first step.
extern "C" __global__ void copy_values(act* copy, const float* values, u64 quads) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= quads) return;
    float v[4];
    load4(v, values + 4 * i);
    store4(copy + 4 * i, v);
}
