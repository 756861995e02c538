// Each rank but the root reduces a segment and sends it to the root, with flags beside the data: the root's link
// carries the buffer once and not n-1 times, for a second crossing. The thread that reduced a cell forwards it, so no
// barrier is needed.

template <typename Lines>
__device__ __forceinline__ void root_two_shot_lines(const Team& team, const u8* input, u8* output, u64 bytes, u32 root) {
    const Channel channel = enter(team);
    const Words words = words_of_block(bytes);
    // The second half of the lines is for reduced cells.
    const u32 half = Lines::MOST / 2;
    const auto part_of = [&](u32 rank) { return (rank + RANKS - root - 1) % RANKS; };
    const auto segment = [&](u32 rank) { return segment_of(words, part_of(rank), RANKS - 1); };
    const u32 most = Lines::cells(longest_segment(words, RANKS - 1));
    for (u32 cell = threadIdx.x; cell < most; cell += THREADS) {
        push_cells<Lines>(
            team, channel, cell, [&](u32 peer) { return peer != root && cell < Lines::cells(segment(peer)); },
            [&](u32 peer) { return Lines::load(input, segment(peer), cell); });
    }
    if (team.rank != root) {
        const Words ours = segment(team.rank);
        for (u32 cell = threadIdx.x; cell < Lines::cells(ours); cell += THREADS) {
            typename Lines::Cell all[RANKS];
            await_all<Lines>(team, channel, cell, Lines::load(input, ours, cell), all);
            Lines::push(team, channel, root, half + cell, reduce_cells(all));
        }
    } else {
        take_segments<Lines>(team, channel, output, half, most, [&](u32 peer) { return peer != root; }, segment);
    }
    leave(team, channel);
}

#ifdef KERNEL_reduce_two_shot_ll
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_two_shot_ll(const __grid_constant__ Args args) {
    root_two_shot_lines<Ll>(args.team, args.input, args.output, args.bytes, args.root);
}
#endif

#ifdef KERNEL_reduce_two_shot_ll128
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_two_shot_ll128(const __grid_constant__ Args args) {
    root_two_shot_lines<Ll128>(args.team, args.input, args.output, args.bytes, args.root);
}
#endif
