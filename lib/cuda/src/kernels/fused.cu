// Several calls in one launch, one after the other, each with the blocks and the epochs that a launch of its own would
// give it: for the other ranks it makes no difference, and they may launch the same calls otherwise.
//
// Calls of one block run up to four at a time, by different threads, because each is a chain of loads and a flight over
// the link that wait for each other (ll.cuh says why that overwrites nothing). A block begins others when all its
// threads are through those before, and all ranks have sent those.

static_assert(TOGETHER == 4, "the threads are cut into at most four shares");

#define FUSED 8

#define FUSED_SCATTER 0
#define FUSED_ROOT 1
#define FUSED_BROADCAST 2
#define FUSED_EXCHANGE 3
#define FUSED_LL128 4
#define FUSED_FLOW 8 // times FLOW_*

// `peer/fused.rs` has the same.
struct FusedCall {
    const u8* input;
    u8* output;
    u64 bytes;
    u64 stride;
    u64 call; // what it is, as in Team
    u32 number;
    u32 root;
    u32 blocks;
    u32 part; // one of those above, FUSED_LL128 or not, and the flow
};

struct Fused {
    Team team;
    FusedCall calls[FUSED];
    u32 count;
    u32 unused;
};

// The arguments of every call, by all threads of a block: each line of parameters is a miss in the constant cache, and
// these misses are under way together.
__device__ __forceinline__ void unfold(const Fused& fused, Args (&args)[FUSED]) {
    const u32 words = sizeof(Team) / 4;
    for (u32 i = threadIdx.x; i < fused.count * words; i += THREADS) {
        ((u32*)&args[i / words].team)[i % words] = ((const u32*)&fused.team)[i % words];
    }
    __syncthreads();
    if (threadIdx.x < fused.count) {
        const FusedCall& call = fused.calls[threadIdx.x];
        Args& to = args[threadIdx.x];
        to.team.call = call.call;
        to.team.number = call.number;
        to.input = call.input;
        to.output = call.output;
        to.bytes = call.bytes;
        to.stride = call.stride;
        to.root = call.root;
        to.flow = call.part / FUSED_FLOW;
    }
    __syncthreads();
}

template <typename Lines>
__device__ __forceinline__ void fused_part(u32 part, const Args& args, const Channel& channel, const Words& words) {
    switch (part % FUSED_LL128) {
#ifdef DTYPE
    case FUSED_SCATTER: return scatter_lines<Lines>(args, channel, words);
    case FUSED_ROOT: return root_lines<Lines>(args, channel, words);
#endif
    case FUSED_BROADCAST: return broadcast_lines<Lines>(args, channel, words);
    case FUSED_EXCHANGE: return exchange_lines<Lines>(args, channel, words);
    }
}

// The first call from number `i` on of which this block has a part.
__device__ __forceinline__ u32 part_from(const Fused& fused, u32 i) {
    while (i < fused.count && blockIdx.x >= fused.calls[i].blocks) i++;
    return i;
}

// How many calls from number `i` on run at the same time, each by an equal share of the threads: those of one block.
__device__ __forceinline__ u32 together(const Fused& fused, u32 i) {
    u32 calls = 0;
    while (calls < TOGETHER && i + calls < fused.count) {
        const FusedCall& call = fused.calls[i + calls];
        if (call.blocks != 1 || (call.part & FUSED_LL128)) break;
        calls++;
    }
    return calls > 1 ? calls : 1;
}

#ifdef KERNEL_fused
extern "C" __global__ void __launch_bounds__(THREADS)
fused(const __grid_constant__ Fused fused) {
    __shared__ Args args[FUSED];
    await_kernel_before();
    volatile u32* epoch = epoch_of(fused.team);
    u32 finished = *epoch, last = fused.calls[0].number - 1;
    count_started(fused.team, fused.calls[0].number);
    unfold(fused, args);
    for (u32 i = part_from(fused, 0), calls; i < fused.count; i = part_from(fused, i + calls)) {
        calls = together(fused, i);
        const u32 threads = THREADS >> (calls > 2 ? 2 : calls - 1), share = threadIdx.x / threads;
        const u32 mine = share < calls ? share : calls - 1;
        const FusedCall& call = fused.calls[i + mine];
        const Args& own = args[i + mine];
        Channel channel = channel_after(finished + mine, call.blocks);
        channel.threads = threads;
        // Of three calls a quarter of the threads has none.
        channel.thread = share < calls ? threadIdx.x % threads : ~0u;
        greet(own.team, channel);
        const Words words = words_of_block(own.bytes, call.blocks);
        if (call.part & FUSED_LL128) fused_part<Ll128>(call.part, own, channel, words);
        else fused_part<Ll>(call.part, own, channel, words);
        if (!all_agree(own.team, channel)) break;
        finished += calls;
        last = fused.calls[i + calls - 1].number;
    }
    if (threadIdx.x == 0) *epoch = finished;
    count_finished(fused.team, last);
}
#endif
