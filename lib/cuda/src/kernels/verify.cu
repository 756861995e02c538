// Sums of device memory, and their comparison over ranks, for calls that TINYNCCL_VERIFY chooses. `cuda/verify.rs`
// launches them.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// `segments` segments of `bytes` bytes from `at` on, each in `parts` parts: a sum of each part is added to `to`.
struct Sums {
    u64 at;
    u64 bytes;
    u64 to;
    u32 segments;
    u32 parts;
    u32 split; // blocks per part
    u32 unused;
};

// A bijection for each place (splitmix64): a word that differs makes another sum.
__device__ __forceinline__ u64 mixed(u64 word, u64 place) {
    u64 x = word + (place + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

extern "C" __global__ void __launch_bounds__(THREADS) verify_sums(const __grid_constant__ Sums s) {
    const u32 unit = blockIdx.x / s.split, sub = blockIdx.x % s.split;
    const u64 words = (s.bytes + 7) / 8, per = (words + s.parts - 1) / s.parts;
    const u64 first = (unit % s.parts) * per, end = min(first + per, words);
    const u8* segment = (const u8*)s.at + (unit / s.parts) * s.bytes;
    const bool aligned = ((u64)segment & 7) == 0;
    u64 sum = 0;
    for (u64 i = first + sub * THREADS + threadIdx.x; i < end; i += (u64)s.split * THREADS) {
        u64 word = 0;
        if (aligned && 8 * i + 8 <= s.bytes) {
            word = ((const u64*)segment)[i];
        } else {
            for (u64 b = 8 * i; b < min(8 * i + 8, s.bytes); b++) word |= (u64)segment[b] << (8 * (b - 8 * i));
        }
        sum += mixed(word, i);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd((u64*)s.to + unit, sum);
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
    u32 unused;
};

// For tests.
extern "C" __global__ void verify_flip(const __grid_constant__ Flip f) {
    atomicXor((u32*)(f.at & ~3ull), 1u << (f.bit % 8 + 8 * (f.at & 3)));
}
