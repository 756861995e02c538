// Kernels of the labs on GPUs.

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Computes for `busy` nanoseconds, then writes its result: `n` times `value`. One block.
extern "C" __global__ void backward(float* gradients, unsigned long long n, float value, unsigned long long busy) {
    unsigned long long end = nanoseconds() + busy;
    while (nanoseconds() < end) {}
    for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x) gradients[i] = value;
}

// Waits until the word is not zero, for at most `limit` nanoseconds, and writes what it saw.
extern "C" __global__ void await_word(const volatile unsigned* word, unsigned* seen, unsigned long long limit) {
    unsigned long long end = nanoseconds() + limit;
    unsigned value = 0;
    while (!(value = *word) && nanoseconds() < end) {}
    if (blockIdx.x == 0 && threadIdx.x == 0) *seen = value;
}

// So many rounds of arithmetic, then a result: `n` times 1.
extern "C" __global__ void compute(float* gradients, unsigned long long n, unsigned rounds) {
    float x = threadIdx.x;
    for (unsigned i = 0; i < rounds; ++i) x = x * 0.999f + 1.0f;
    const unsigned long long threads = gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) gradients[i] = x < 0 ? x : 1.0f;
}

// The same arithmetic until the word is not zero, for at most `limit` nanoseconds.
extern "C" __global__ void occupy(const volatile unsigned* stop, unsigned long long limit) {
    const unsigned long long end = nanoseconds() + limit;
    float x = threadIdx.x;
    while (!*stop && nanoseconds() < end) {
        for (unsigned i = 0; i < 100000; ++i) x = x * 0.999f + 1.0f;
        if (x < 0) return;
    }
}
