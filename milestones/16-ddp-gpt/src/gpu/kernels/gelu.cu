// GELU in its tanh form, x·σ(2u), as in ops/gelu.rs. Threads take 8 values.

__device__ __forceinline__ float gate(float x) {
    const float two_u = 1.595769f * (x + 0.044715f * x * x * x);
    return __fdividef(1.0f, 1.0f + __expf(-two_u));
}

extern "C" __global__ void gelu_forward(act* out, const act* x, u32 eighths) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= eighths) return;
    float v[8];
    load8(v, x + 8ull * i);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= gate(v[k]);
    store8(out + 8ull * i, v);
}

// d *= gelu'(x)
extern "C" __global__ void gelu_backward(act* d, const act* x, u32 eighths) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= eighths) return;
    float v[8], g[8];
    load8(v, x + 8ull * i);
    load8(g, d + 8ull * i);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float s = gate(v[k]);
        g[k] *= s + v[k] * s * (1.0f - s) * (1.595769f * (1.0f + 3.0f * 0.044715f * v[k] * v[k]));
    }
    store8(d + 8ull * i, g);
}
