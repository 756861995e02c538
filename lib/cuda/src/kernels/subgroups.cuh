// A block may be cut into subgroups of neighbouring threads with their own barriers, which advance independently. One
// subgroup can send while another waits to receive.

struct Subgroup {
    u32 index;
    u32 thread;
    u32 threads;
};

// Barrier 0 is that of the whole block.
__device__ __forceinline__ void sync_subgroup(const Subgroup& group) {
    asm volatile("bar.sync %0, %1;" : : "r"(group.index + 1), "r"(group.threads) : "memory");
}

// The same, and whether `mine` is true for any of its threads.
__device__ __forceinline__ bool sync_subgroup_or(const Subgroup& group, bool mine) {
    u32 any;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"((u32)mine), "r"(group.index + 1), "r"(group.threads) : "memory");
    return any;
}

__device__ __forceinline__ Subgroup whole_block() {
    return Subgroup{0, threadIdx.x, THREADS};
}

// This thread's subgroup, if there are subgroups of so many threads, one behind the other; the last has the rest.
__device__ __forceinline__ Subgroup subgroup_of(u32 first, u32 second) {
    if (threadIdx.x < first) return Subgroup{0, threadIdx.x, first};
    if (threadIdx.x < first + second) return Subgroup{1, threadIdx.x - first, second};
    return Subgroup{2, threadIdx.x - first - second, THREADS - first - second};
}

// Packs of a batch, of so many buffers each. Those at odd addresses are not worth any: the calls would keep them from
// the registers.
template <typename Whole> __device__ __forceinline__ constexpr int batch_of(int buffers) {
    return !Whole::yes ? 1 : buffers == 1 ? 8 : buffers <= 2 ? 4 : buffers <= 4 ? 3 : 1;
}

// The subgroup's threads go through `count` packs. Loads of a batch are all under way before its first store: the
// compiler may not move a load over a store to memory that might be the same.
template <int BATCH, typename Load, typename Store>
__device__ __forceinline__ void for_packs(const Subgroup& group, u32 count, Load load, Store store) {
    for (u32 i = group.thread; i < count; i += BATCH * group.threads) {
        Pack pack[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * group.threads < count) pack[k] = load(i + k * group.threads);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * group.threads < count) store(i + k * group.threads, pack[k]);
        }
    }
}

#define OTHERS (RANKS - 1)

// The same for a piece of each other rank, `counts[d]` packs of the one at distance d + 1: `load(d, i)`, `store(d, i,
// pack)`. A batch has packs of all of them, so that a wait for memory is one wait for all ranks.
template <int BATCH, typename Load, typename Store>
__device__ __forceinline__ void for_others(const Subgroup& group, const u32 (&counts)[OTHERS], Load load, Store store) {
    u32 most = 0;
#pragma unroll
    for (int d = 0; d < OTHERS; d++) most = counts[d] > most ? counts[d] : most;
    for (u32 i = group.thread; i < most; i += BATCH * group.threads) {
        Pack pack[BATCH][OTHERS];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
#pragma unroll
            for (int d = 0; d < OTHERS; d++) {
                if (i + k * group.threads < counts[d]) pack[k][d] = load(d, i + k * group.threads);
            }
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
#pragma unroll
            for (int d = 0; d < OTHERS; d++) {
                if (i + k * group.threads < counts[d]) store(d, i + k * group.threads, pack[k][d]);
            }
        }
    }
}
