// Sums of device memory, and their comparison over ranks, for calls that TINYNCCL_VERIFY chooses. `cuda/verify.rs`
// launches them.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Memory at `at`: segments of `bytes` bytes, each in `parts` parts. The sum of each part goes to `to`, or is added to it
// if several blocks share a part.
struct Sums {
    u64 at;
    u64 bytes;
    u64 to;
    u32 parts;
    u32 split; // blocks per part
    u32 blocks; // of all parts of all segments
    u32 unused;
};

#define MOST_JOBS 4

struct Jobs {
    Sums job[MOST_JOBS];
};

// A bijection for each place: a word that differs makes another sum.
__device__ __forceinline__ u64 mixed(u64 word, u64 place) {
    const u64 x = (word + place * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    return x ^ (x >> 32);
}

extern "C" __global__ void __launch_bounds__(THREADS) verify_sums(const __grid_constant__ Jobs jobs) {
    __shared__ u64 sums[THREADS / 32];
    u32 block = blockIdx.x, index = 0;
    while (block >= jobs.job[index].blocks) block -= jobs.job[index++].blocks;
    const Sums& s = jobs.job[index];
    const u32 unit = block / s.split, sub = block % s.split;
    const u64 words = (s.bytes + 7) / 8, per = (words + s.parts - 1) / s.parts;
    const u64 first = (unit % s.parts) * per, end = min(first + per, words);
    const u8* segment = (const u8*)s.at + (unit / s.parts) * s.bytes;
    const u64 stride = (u64)s.split * THREADS;
    // Up to here whole words can be read as such.
    const u64 whole = ((u64)segment & 7) == 0 ? min(end, s.bytes / 8) : first;
    u64 sum = 0, i = first + sub * THREADS + threadIdx.x;
#pragma unroll 4
    for (; i < whole; i += stride) sum += mixed(((const u64*)segment)[i], i);
    for (; i < end; i += stride) {
        u64 word = 0;
        for (u64 b = 8 * i; b < min(8 * i + 8, s.bytes); b++) word |= (u64)segment[b] << (8 * (b - 8 * i));
        sum += mixed(word, i);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 warp = 1; warp < THREADS / 32; warp++) sum += sums[warp];
    u64* to = (u64*)s.to + unit;
    if (s.split == 1) *to = sum;
    else atomicAdd(to, sum);
}

#define REDUCES 0    // a rank's result, and that of the same call again
#define ALL_REDUCES 1
#define SAME_SEGMENT 2 // output o is input 0 of rank o
#define OF_ROOT 3      // the output is input 0 of the root
#define EXCHANGES 4    // output o is input r of rank o

struct Compare {
    u64 table; // the sums of all ranks: of their inputs, then of their outputs
    u64 finding;
    u32 ranks;
    u32 kind;
    u32 inputs; // segments; in a reduction the repetition's
    u32 outputs;
    u32 parts;
    u32 root;
    u32 number;
    u32 extra; // sums behind the others, 0 or 2: equal
};

// In the host's memory; the first one stays.
struct Finding {
    u32 state;
    u32 number;
    u64 table[MOST_SUMS];
};

extern "C" __global__ void __launch_bounds__(THREADS) verify_compare(const __grid_constant__ Compare c) {
    const u64* table = (const u64*)c.table;
    const u32 sums = (c.inputs + c.outputs) * c.parts, words = sums + c.extra, outputs = c.outputs * c.parts;
    volatile Finding* finding = (volatile Finding*)c.finding;
    bool differs = false;
    for (u32 i = threadIdx.x; i < c.ranks * outputs; i += THREADS) {
        const u32 rank = i / outputs, output = i % outputs / c.parts, part = i % c.parts;
        const u64 got = table[rank * words + c.inputs * c.parts + i % outputs];
        const u32 source = c.kind == OF_ROOT ? c.root : c.kind >= SAME_SEGMENT ? output : rank;
        const u32 segment = c.kind == EXCHANGES ? rank : c.kind >= SAME_SEGMENT ? 0 : output;
        differs |= got != table[source * words + segment * c.parts + part];
        if (c.kind == ALL_REDUCES) differs |= got != table[c.inputs * c.parts + i % outputs];
    }
    if (c.extra > 0 && threadIdx.x < c.ranks) {
        const u64* pair = table + threadIdx.x * words + sums;
        differs |= pair[0] != pair[1];
    }
    if (!__syncthreads_or(differs) || finding->state != 0) return;
    for (u32 i = threadIdx.x; i < c.ranks * words && i < MOST_SUMS; i += THREADS) finding->table[i] = table[i];
    if (threadIdx.x == 0) finding->number = c.number;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) finding->state = 1;
}

struct Flip {
    u64 at;
    u32 bit;
    u32 delay; // nanoseconds
};

// For tests.
extern "C" __global__ void verify_flip(const __grid_constant__ Flip f) {
    u64 begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    if (threadIdx.x != 0) return;
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < f.delay);
    atomicXor((u32*)(f.at & ~3ull), 1u << (f.bit % 8 + 8 * (f.at & 3)));
}
