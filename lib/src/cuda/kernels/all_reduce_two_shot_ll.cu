// Reduce-scatter, then all-gather, each straight between all pairs of ranks, with flags beside the data: two crossings of the
// link, 2(n-1)/n x the bytes sent (and the flags). A cell is passed on by the thread that reduced it; no barrier.

template <typename Lines>
__device__ __forceinline__ void two_shot_lines(const Team& team, const u8* input, u8* output, u64 bytes) {
    const Channel channel = enter(team);
    const Words words = words_of_block(bytes);
    // The second half of the lines is for what was reduced.
    const u32 half = Lines::MOST / 2;
#pragma unroll
    for (u32 distance = 1; distance < RANKS; distance++) {
        const u32 peer = next_rank(team.rank, distance);
        const Words theirs = segment_of(words, peer);
        for (u32 cell = threadIdx.x; cell < Lines::cells(theirs); cell += THREADS) {
            Lines::push(team, channel, peer, cell, Lines::load(input, theirs, cell));
        }
    }
    const Words ours = segment_of(words, team.rank);
    for (u32 cell = threadIdx.x; cell < Lines::cells(ours); cell += THREADS) {
        typename Lines::Cell all[RANKS];
        Lines::await_all(team, channel, cell, Lines::load(input, ours, cell), all);
        const typename Lines::Cell reduced = reduce_cells(all);
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            Lines::push(team, channel, next_rank(team.rank, distance), half + cell, reduced);
        }
        Lines::store(output, ours, cell, reduced);
    }
#pragma unroll
    for (u32 distance = 1; distance < RANKS; distance++) {
        const u32 peer = next_rank(team.rank, distance);
        const Words theirs = segment_of(words, peer);
        for (u32 cell = threadIdx.x; cell < Lines::cells(theirs); cell += THREADS) {
            Lines::store(output, theirs, cell, Lines::await(team, channel, peer, half + cell));
        }
    }
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_two_shot_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    two_shot_lines<Ll>(team, input, output, bytes);
}

extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_two_shot_ll128(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    two_shot_lines<Ll128>(team, input, output, bytes);
}
