// c[i] = a[i] + b[i], with four ways to distribute the work over threads. Compiled at run time; compile.rs looks the
// functions up by name. extern "C" keeps the names unmangled.

typedef unsigned long long u64;

// One thread per element. The last block may extend past the end: the guard stops its extra threads.
extern "C" __global__ void add_element(const float* a, const float* b, float* c, u64 n) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// As many threads as the device holds at once, each taking every stride-th element. Neighbouring threads still take
// neighbouring elements: a warp's 32 loads are one 128-byte access.
// EXERCISE 3 (The four kernels; needs GPU): each thread takes every stride-th element, starting at its own number, so
// that neighbouring threads take neighbouring elements.
extern "C" __global__ void add_strided(const float* a, const float* b, float* c, u64 n) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) c[i] = a[i] + b[i];
}

// 16 bytes per access: a quarter of the instructions, four times the bytes in flight per thread. Addresses must be
// multiples of 16; the last n % 4 elements go one by one.
// EXERCISE 4 (The four kernels; needs GPU): the same, 16 bytes per access by float4; the last n % 4 elements go one
// by one.
extern "C" __global__ void add_vector(const float* a, const float* b, float* c, u64 n) {
    u64 stride = (u64)gridDim.x * blockDim.x, first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const float4* a4 = (const float4*)a;
    const float4* b4 = (const float4*)b;
    float4* c4 = (float4*)c;
    for (u64 i = first; i < n / 4; i += stride) {
        float4 x = a4[i], y = b4[i];
        c4[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    for (u64 i = n / 4 * 4 + first; i < n; i += stride) c[i] = a[i] + b[i];
}

// Wrong on a GPU: each thread walks through its own run of elements, so a warp's 32 loads touch 32 places.
extern "C" __global__ void add_blocked(const float* a, const float* b, float* c, u64 n) {
    u64 threads = (u64)gridDim.x * blockDim.x, each = (n + threads - 1) / threads;
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * each;
    u64 last = first + each < n ? first + each : n;
    for (u64 i = first; i < last; ++i) c[i] = a[i] + b[i];
}
