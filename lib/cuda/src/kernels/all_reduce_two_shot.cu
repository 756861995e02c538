// Reduce-scatter, then all-gather, each straight between all pairs of ranks, in rounds of one slot per pair. A subgroup
// sends the pieces of a round, the next reduces received pieces and forwards the sums, the last stores the others'
// sums.

__device__ __forceinline__ void two_shot_slots(const Team& team, const Channel& channel, const u8* input, u8* output, u64 bytes) {
    __shared__ Counters counters;
    const Subgroup group = subgroup_of(THREADS / 4, THREADS / 2);
    const Rounds rounds = begin_rounds(team, channel, counters, group, bytes, RANKS);
    for (u32 step = 0; step < rounds.count; step++) {
        const auto piece = [&](u32 rank) { return piece_of(rounds.share, step, rank); };
        if (group.index == 0) {
            in_turn(
                rounds, [&](u32 peer) { await_credit(team, counters, SCATTER, peer); },
                [&] {
                    const Pieces pieces = pieces_of(team, [&](u32) { return input; }, piece,
                                                    [&](u32 peer) { return outgoing(team, counters, SCATTER, peer); });
                    fill_all(group, pieces, bytes);
                },
                [&](u32 peer) { post_slot(team, counters, SCATTER, peer); });
        } else if (group.index == 1) {
            in_turn(
                rounds,
                [&](u32 peer) {
                    await_slot(team, counters, SCATTER, peer);
                    await_credit(team, counters, GATHER, peer);
                },
                [&] {
                    const Piece mine = piece(team.rank);
                    const u8* from[RANKS];
                    u8* to[RANKS];
#pragma unroll
                    for (int s = 0; s < RANKS; s++) {
                        from[s] = incoming(team, counters, SCATTER, s);
                        to[s] = outgoing(team, counters, GATHER, s);
                    }
                    reduce_slots(group, team, input, output, mine, bytes, from, [&](u64 i, Pack reduced) {
#pragma unroll
                        for (int s = 0; s < RANKS; s++) {
                            if (s != (int)team.rank) fill_slot(to[s], i, reduced);
                        }
                    });
                },
                [&](u32 peer) {
                    free_slot(team, counters, SCATTER, peer);
                    post_slot(team, counters, GATHER, peer);
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

#ifdef KERNEL_all_reduce_two_shot_simple
extern "C" __global__ void __launch_bounds__(THREADS, 1)
all_reduce_two_shot_simple(const __grid_constant__ Args args) {
    const Channel channel = enter(args.team);
    two_shot_slots(args.team, channel, args.input, args.output, args.bytes);
    leave(args.team, channel);
}
#endif
