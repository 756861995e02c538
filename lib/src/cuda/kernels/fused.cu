// Several calls in one launch, one after the other, each with the blocks and the epochs that a launch of its own would
// give it: for the other ranks it makes no difference, and they may launch the same calls otherwise.
//
// A block begins a call when all its threads are through the one before, and all ranks have begun that one. So the two
// sets of lines are enough, as they are for kernels that follow each other.

#define FUSED 8

#define FUSED_SCATTER 0
#define FUSED_ROOT 1
#define FUSED_BROADCAST 2
#define FUSED_EXCHANGE 3
#define FUSED_LL128 4

// `peer/fused.rs` has the same.
struct FusedCall {
    Args args;
    u32 blocks;
    u32 part; // one of those above, and FUSED_LL128 or not
};

struct Fused {
    FusedCall calls[FUSED];
    u32 count;
    u32 unused;
};

template <typename Lines>
__device__ __forceinline__ void fused_part(const FusedCall& call, const Channel& channel, const Words& words) {
    switch (call.part & ~FUSED_LL128) {
#ifdef DTYPE
    case FUSED_SCATTER: return scatter_lines<Lines>(call.args, channel, words);
    case FUSED_ROOT: return root_lines<Lines>(call.args, channel, words);
#endif
    case FUSED_BROADCAST: return broadcast_lines<Lines>(call.args, channel, words);
    case FUSED_EXCHANGE: return exchange_lines<Lines>(call.args, channel, words);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused(const __grid_constant__ Fused fused) {
    volatile u32* epoch = epoch_of(fused.calls[0].args.team);
    u32 finished = *epoch;
    for (u32 i = 0; i < fused.count; i++) {
        const FusedCall& call = fused.calls[i];
        const Team& team = call.args.team;
        if (blockIdx.x >= call.blocks) continue;
        const Channel channel = enter_after(team, finished);
        const Words words = words_of_block(call.args.bytes, call.blocks);
        if (call.part & FUSED_LL128) fused_part<Ll128>(call, channel, words);
        else fused_part<Ll>(call, channel, words);
        if (!all_agree(team, channel)) break;
        finished = channel.epoch;
    }
    if (threadIdx.x == 0) *epoch = finished;
}
