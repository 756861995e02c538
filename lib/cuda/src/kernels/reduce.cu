// All ranks send to the root, which reduces. For larger buffers the ranks other than the root each reduce a segment
// first, so that the root's link carries the buffer once and not n-1 times: one subgroup sends the segments, another
// reduces received ones and sends the sum to the root; at the root it stores the sums.

__device__ __forceinline__ void root_slots(const Team& team, const Channel& channel,
                                           const u8* input, u8* output, u64 bytes, u32 root) {
    __shared__ Counters counters;
    // With two ranks the root reduces itself: a detour would double what its link carries.
    const u32 parts = RANKS == 2 ? 1 : RANKS - 1;
    const Subgroup group = RANKS == 2 ? whole_block() : subgroup_of(THREADS / 2, THREADS / 2);
    const Rounds rounds = begin_rounds(team, channel, counters, group, bytes, parts);
    // The rank that reduces each part; none: a number without a part.
    const u32 shift = RANKS == 2 ? 0 : 1;
    const auto part_of = [&](u32 rank) { return (rank + RANKS - root - shift) % RANKS; };
    const bool reduces = part_of(team.rank) < parts;
    for (u32 step = 0; step < rounds.count; step++) {
        const auto piece = [&](u32 rank) {
            if (part_of(rank) >= parts) return Piece{0, 0};
            return piece_of(rounds.share, step, part_of(rank));
        };
        if (group.index == 0 && (RANKS > 2 || !reduces)) {
            in_turn(
                rounds,
                [&](u32 peer) {
                    if (part_of(peer) < parts) await_credit(team, counters, SCATTER, peer);
                },
                [&] {
                    const Pieces pieces = pieces_of(team, [&](u32) { return input; }, piece,
                                                    [&](u32 peer) { return outgoing(team, counters, SCATTER, peer); });
                    fill_all(group, pieces, bytes);
                },
                [&](u32 peer) {
                    if (part_of(peer) < parts) post_slot(team, counters, SCATTER, peer);
                });
        } else if (reduces) {
            in_turn(
                rounds,
                [&](u32 peer) {
                    await_slot(team, counters, SCATTER, peer);
                    if (team.rank != root && peer == root) await_credit(team, counters, GATHER, root);
                },
                [&] {
                    const Piece mine = piece(team.rank);
                    const u8* from[RANKS];
#pragma unroll
                    for (int s = 0; s < RANKS; s++) from[s] = incoming(team, counters, SCATTER, s);
                    u8* slot = outgoing(team, counters, GATHER, root);
                    reduce_slots(group, team, input, team.rank == root ? output : nullptr, mine, bytes, from,
                                 [&](u64 i, Pack reduced) {
                                     if (team.rank != root) fill_slot(slot, i, reduced);
                                 });
                },
                [&](u32 peer) {
                    free_slot(team, counters, SCATTER, peer);
                    if (team.rank != root && peer == root) post_slot(team, counters, GATHER, root);
                });
        } else {
            in_turn(
                rounds, [&](u32 peer) { await_slot(team, counters, GATHER, peer); },
                [&] {
                    const Pieces pieces = pieces_of(team, [&](u32) { return output; }, piece,
                                                    [&](u32 peer) { return incoming(team, counters, GATHER, peer); });
                    store_all(group, pieces, bytes);
                },
                [&](u32 peer) { free_slot(team, counters, GATHER, peer); });
        }
    }
    store_counters(team, counters);
}

#ifdef KERNEL_reduce_ll
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_ll(const __grid_constant__ Args args) {
    one_call<root_lines<Ll>>(args);
}
#endif

#ifdef KERNEL_reduce_ll128
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_ll128(const __grid_constant__ Args args) {
    one_call<root_lines<Ll128>>(args);
}
#endif

#ifdef KERNEL_reduce_simple
extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_simple(const __grid_constant__ Args args) {
    const Channel channel = enter(args.team);
    root_slots(args.team, channel, args.input, args.output, args.bytes, args.root);
    leave(args.team, channel);
}
#endif

#ifdef KERNEL_reduce_direct
// The root reads the others' inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_direct(const __grid_constant__ Args args) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes;
    const u32 root = args.root;
    __shared__ Reach reach;
    const Channel channel = enter(team);
    if (!meet(team, channel, args.remote, input, output, reach)) return close(team, channel);
    if (!reached(reach.input)) {
        root_slots(team, channel, input, output, bytes, root);
        return close(team, channel);
    }
    if (team.rank == root) {
        const Output to = output_of(output, 0, bytes / 16, bytes);
        reduce_buffers(
            reach.input, 0, 0, bytes / 16, bytes, true, [&](u64 i, Pack reduced) { put(to, i, reduced); },
            [&](u64 i, Pack reduced) { store_odd_pack(output, i, bytes, reduced); });
    }
    depart(team, channel);
    close(team, channel);
}
#endif
