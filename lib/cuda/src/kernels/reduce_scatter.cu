// Each rank sends segment p to rank p and reduces the segments that it receives. `bytes` is the length of a segment.
// With a distance of 0 between the segments that is an all-reduce: all ranks send everything to all, (n-1) x the bytes,
// and each reduces by itself. That crosses the link once, and between two ranks it sends no more than any other.

__device__ __forceinline__ void scatter_slots(const Team& team, const Channel& channel,
                                              const u8* input, u8* output, u64 bytes, u64 stride) {
    __shared__ Counters counters;
    const Subgroup group = subgroup_of(THREADS / 2, THREADS / 2);
    const Rounds rounds = begin_rounds(team, channel, counters, group, bytes, 1);
    const u8* own = input + team.rank * stride;
    for (u32 step = 0; step < rounds.count; step++) {
        const Piece piece = piece_of(rounds.share, step, 0);
        if (group.index == 0) {
            in_turn(
                rounds, [&](u32 peer) { await_credit(team, counters, SCATTER, peer); },
                [&] {
                    const Pieces pieces = pieces_of(
                        team, [&](u32 peer) { return input + peer * stride; }, [&](u32) { return piece; },
                        [&](u32 peer) { return outgoing(team, counters, SCATTER, peer); });
                    fill_all(group, pieces, bytes);
                },
                [&](u32 peer) { post_slot(team, counters, SCATTER, peer); });
            tell_read(rounds, counters, step);
        } else {
            in_turn(
                rounds,
                [&](u32 peer) {
                    await_slot(team, counters, SCATTER, peer);
                    await_read(counters, step);
                },
                [&] {
                    const u8* from[RANKS];
#pragma unroll
                    for (int s = 0; s < RANKS; s++) from[s] = incoming(team, counters, SCATTER, s);
                    reduce_slots(group, team, own, output, piece, bytes, from, [](u64, Pack) {});
                },
                [&](u32 peer) { free_slot(team, counters, SCATTER, peer); });
        }
    }
    store_counters(team, counters);
}

#ifdef KERNEL_reduce_scatter_ll
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_scatter_ll(const __grid_constant__ Args args) {
    one_call<scatter_lines<Ll>>(args);
}
#endif

#ifdef KERNEL_reduce_scatter_ll128
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_scatter_ll128(const __grid_constant__ Args args) {
    one_call<scatter_lines<Ll128>>(args);
}
#endif

#ifdef KERNEL_reduce_scatter_simple
extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_scatter_simple(const __grid_constant__ Args args) {
    const Channel channel = enter(args.team);
    scatter_slots(args.team, channel, args.input, args.output, args.bytes, args.stride);
    leave(args.team, channel);
}
#endif

#ifdef KERNEL_reduce_scatter_direct
// Each rank reads its segment of both inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_scatter_direct(const __grid_constant__ Args args) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes;
    __shared__ Reach reach;
    const Channel channel = enter(team);
    if (!meet(team, channel, args.remote, input, output, reach)) return close(team, channel);
    if (bytes % 16 != 0 || !reached(reach.input)) {
        scatter_slots(team, channel, input, output, bytes, bytes);
        return close(team, channel);
    }
    const Output to = output_of(output, 0, bytes / 16, bytes);
    reduce_buffers(
        reach.input, team.rank * bytes, 0, bytes / 16, bytes, false, [&](u64 i, Pack reduced) { put(to, i, reduced); },
        [](u64, Pack) {});
    depart(team, channel);
    close(team, channel);
}
#endif

#ifdef KERNEL_all_reduce_direct
// Each rank reads its half of both inputs and writes the result into both outputs: both steps in one pass. Only one
// rank accesses a half's input and output, so they may be the same buffer.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
all_reduce_direct(const __grid_constant__ Args args) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes, packs = bytes / 16;
    __shared__ Reach reach;
    const Channel channel = enter(team);
    if (!meet(team, channel, args.remote, input, output, reach)) return close(team, channel);
    if (!reached(reach.input) || !reached(reach.output)) {
        scatter_slots(team, channel, input, output, bytes, 0);
        return close(team, channel);
    }
    u8* to[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++) to[s] = reach.output[s];
    reduce_buffers(
        reach.input, 0, border(packs, team.rank, RANKS), border(packs, team.rank + 1, RANKS), bytes, team.rank == 0,
        [&](u64 i, Pack reduced) {
#pragma unroll
            for (int s = 0; s < RANKS; s++) ((Pack*)to[s])[i] = reduced;
        },
        [&](u64 i, Pack reduced) {
            for (int s = 0; s < RANKS; s++) store_odd_pack(to[s], i, bytes, reduced);
        });
    depart(team, channel);
    close(team, channel);
}
#endif
