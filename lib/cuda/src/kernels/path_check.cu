// The start-up check of the path between GPUs. Each rank writes a pattern through its mapping of every other window,
// piece by piece with a count after each, and checks the data in its own window as soon as the count has arrived.
// `cuda/path_check.rs` launches it.
//
// It uses the memory of the lines, which the host clears afterwards: a part of `area` bytes for each sender. Its last
// bytes are the count and the findings.

#define PATH_ROUNDS 8
#define PATH_WRITES 1
#define PATH_READS 2

#define PATH_SOUND 1
#define PATH_SILENT 2
#define PATH_WRONG 3

struct Finding {
    u32 state;
    u32 word; // its place in the pattern, or the pieces that came
    u64 expected;
    u64 got;
};

// Different for each word of each pair of ranks, and never 0. (splitmix64)
__device__ __forceinline__ u64 pattern(u32 from, u32 to, u32 word) {
    u64 x = ((u64)(from * MAX_RANKS + to + 1) << 32 | word) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (x ^ (x >> 31)) | 1;
}

__device__ __forceinline__ void found(Finding* finding, u32 state, u32 word, u64 expected, u64 got) {
    if (atomicCAS(&finding->state, 0u, state) != 0u) return;
    finding->word = word;
    finding->expected = expected;
    finding->got = got;
}

struct Check {
    u64 area;
    u64 limit; // nanoseconds
    u32 parts; // PATH_*
    u32 spoil; // write something else
};

// Blocks 0..RANKS write, one to each rank; the others read.
extern "C" __global__ void __launch_bounds__(THREADS)
path_check(const __grid_constant__ Args args, const __grid_constant__ Check check) {
    const Team& team = args.team;
    const u64 area = check.area;
    __shared__ u32 came;
    const u32 peer = blockIdx.x % RANKS;
    const bool writes = blockIdx.x < RANKS;
    if (peer == team.rank || (check.parts & (writes ? PATH_WRITES : PATH_READS)) == 0) return;
    const u32 from = writes ? team.rank : peer, to = writes ? peer : team.rank;
    u8* base = team.window[to] + CALLS + area * sender_of(to, from);
    const u64 stride = (area - 128) / PATH_ROUNDS / 16 * 16;
    u32* count = (u32*)(base + area - 128);
    Finding* finding = (Finding*)(base + area - 64);
    const u64 begin = now();
    for (u32 round = 0; round < PATH_ROUNDS; round++) {
        const u32 word = 2 * (round * THREADS + threadIdx.x);
        Pack* at = (Pack*)(base + stride * round + 16 * threadIdx.x);
        const Pack right = {pattern(from, to, word), pattern(from, to, word + 1)};
        if (writes) {
            *at = check.spoil ? Pack{right.a, right.b ^ 2} : right;
            __syncthreads();
            if (threadIdx.x == 0) store_release(count, round + 1);
            continue;
        }
        if (threadIdx.x == 0) {
            while ((came = load_acquire(count)) <= round && now() - begin < check.limit) {}
        }
        __syncthreads();
        if (came <= round) {
            if (threadIdx.x == 0) found(finding, PATH_SILENT, came, PATH_ROUNDS, came);
            return;
        }
        Pack got;
        asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(got.a), "=l"(got.b) : "l"(at) : "memory");
        if (got.a != right.a) found(finding, PATH_WRONG, word, right.a, got.a);
        if (got.b != right.b) found(finding, PATH_WRONG, word + 1, right.b, got.b);
        __syncthreads();
    }
    if (!writes && threadIdx.x == 0) found(finding, PATH_SOUND, 0, 0, 0);
}
