// What begins a step: its number, the keys of its dropout masks, its batch. All of it is computed here, so that a step can be
// replayed as a graph without anything from the host.

// clock[0] becomes the number of the step that runs, clock[1] that of the next. keys[site][sample]: one block computes them all.
extern "C" __global__ void begin_step(u64* clock, u64* keys, u64 seed, u32 sites, u32 samples, u64 first_sample) {
    const u64 step = clock[1];
    const u64 base = absorb(absorb(mix64(seed), 4), step);
    for (u32 i = threadIdx.x; i < sites * samples; i += blockDim.x) {
        keys[i] = absorb(absorb(base, i / samples), first_sample + i % samples);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        clock[0] = step;
        clock[1] = step + 1;
    }
}

// Inputs, and the same one character later; one block per sequence. The start is a hash of (seed, stream, step, sequence).
extern "C" __global__ void fill_batch(u32* inputs, u32* targets, const u32* text, u64 length, const u64* step, u64 seed,
                                      u64 stream, u64 first_sample) {
    const u64 bits = absorb(absorb(absorb(mix64(seed), stream), *step), first_sample + blockIdx.x);
    const u64 start = __umul64hi(bits, length - CONTEXT);
    for (u32 t = threadIdx.x; t < CONTEXT; t += blockDim.x) {
        inputs[blockIdx.x * CONTEXT + t] = text[start + t];
        targets[blockIdx.x * CONTEXT + t] = text[start + t + 1];
    }
}

// Nanoseconds of the device's clock: what a trace is made of.
extern "C" __global__ void stamp(u64* place) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *place = now;
}

// The time that steps wait for averages: waits[0] is the clock when they begin (end = 0), waits[1] the sum until they end.
extern "C" __global__ void count_wait(u64* waits, u32 end) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (end) {
        waits[1] += now - waits[0];
    } else {
        waits[0] = now;
    }
}
