// Gradient descent with momentum: v = momentum v + g; p -= rate v.

extern "C" __global__ void momentum_step(float* p, float* v, const float* g, long count, float rate, float momentum) {
    const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    v[i] = momentum * v[i] + g[i];
    p[i] -= rate * v[i];
}
