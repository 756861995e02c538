// Reduce-scatter, then all-gather, each straight between all pairs of ranks, with flags beside the data: two crossings
// of the link, 2(n-1)/n x the bytes sent (and the flags). The thread that reduced a cell forwards it, so no barrier is
// needed.

template <typename Lines>
__device__ __forceinline__ void two_shot_lines(const Team& team, const u8* input, u8* output, u64 bytes) {
    const Channel channel = enter(team);
    const Words words = words_of_block(bytes);
    // The second half of the lines is for reduced cells.
    const u32 half = Lines::MOST / 2;
    const auto segment = [&](u32 rank) { return segment_of(words, rank, RANKS); };
    const auto other = [&](u32 peer) { return peer != team.rank; };
    const u32 most = Lines::cells(longest_segment(words, RANKS));
    for (u32 cell = threadIdx.x; cell < most; cell += THREADS) {
        push_cells<Lines>(
            team, channel, cell, [&](u32 peer) { return cell < Lines::cells(segment(peer)); },
            [&](u32 peer) { return Lines::load(input, segment(peer), cell); });
    }
    const Words ours = segment(team.rank);
    for (u32 cell = threadIdx.x; cell < Lines::cells(ours); cell += THREADS) {
        typename Lines::Cell all[RANKS];
        await_all<Lines>(team, channel, cell, Lines::load(input, ours, cell), all);
        const typename Lines::Cell reduced = reduce_cells(all);
        push_cells<Lines>(team, channel, half + cell, other, [&](u32) { return reduced; });
        Lines::store(output, ours, cell, reduced);
    }
    take_segments<Lines>(team, channel, output, half, most, other, segment);
    leave(team, channel);
}

#ifdef KERNEL_all_reduce_two_shot_ll
extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_two_shot_ll(const __grid_constant__ Args args) {
    two_shot_lines<Ll>(args.team, args.input, args.output, args.bytes);
}
#endif

#ifdef KERNEL_all_reduce_two_shot_ll128
extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_two_shot_ll128(const __grid_constant__ Args args) {
    two_shot_lines<Ll128>(args.team, args.input, args.output, args.bytes);
}
#endif
