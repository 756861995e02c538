// Calls of which each rank sends segments of `bytes` to others, and stores received ones by sender: all-gather and
// all-to-all, gather and scatter. `stride` is the distance between the segments sent to neighbouring ranks: 0 where
// all get the same.

__device__ __forceinline__ void exchange_slots(const Args& args, const Channel& channel) {
    __shared__ Counters counters;
    const Team& team = args.team;
    const Flow flow = flow_of(args);
    const u64 bytes = args.bytes;
    // A rank with one task takes all threads for it.
    const bool both = flow.sends() && flow.receives();
    const Subgroup group = both ? subgroup_of(THREADS / 2, THREADS / 2) : whole_block();
    const Rounds rounds = begin_rounds(team, channel, counters, group, bytes, 1, args.flow == FLOW_SCATTER ? FOR_ONE : FOR_EACH);
    const u8* own = flow.input_for(team.rank);
    u8* own_output = flow.output_of(team.rank);
    const bool copies = flow.keeps() && own != own_output;
    for (u32 step = 0; step < rounds.count; step++) {
        const Piece piece = piece_of(rounds.share, step, 0);
        const u64 end = piece.first + piece.packs;
        const auto copy_own = [&] {
            if (!copies) return;
            either(is_whole(own, end, bytes) && is_whole(own_output, end, bytes), [&](auto whole) {
                for_packs<batch_of<decltype(whole)>(1)>(
                    group, piece.packs, [&](u32 i) { return load_pack(whole, own, piece.first + i, bytes); },
                    [&](u32 i, Pack pack) { store_pack(whole, own_output, piece.first + i, bytes, pack); });
            });
        };
        if (flow.sends() && group.index == 0) {
            in_turn(
                rounds,
                [&](u32 peer) {
                    if (flow.goes_to(peer)) await_credit(team, counters, SCATTER, peer);
                },
                [&] {
                    if (args.stride != 0 || args.flow != FLOW_ALL) {
                        // Blocks begin with different ranks, so that they do not all copy while the link is idle.
                        for (u32 turn = 0; turn < RANKS; turn++) {
                            const u32 peer = (blockIdx.x + turn) % RANKS;
                            if (peer == team.rank) copy_own();
                            if (!flow.goes_to(peer)) continue;
                            fill_from(group, outgoing(team, counters, SCATTER, peer), flow.input_for(peer), piece, bytes);
                        }
                        return;
                    }
                    u8* slot[OTHERS];
#pragma unroll
                    for (int d = 0; d < OTHERS; d++) slot[d] = outgoing(team, counters, SCATTER, next_rank(team.rank, d + 1));
                    either(is_whole(own, end, bytes) && is_whole(own_output, end, bytes), [&](auto whole) {
                        for_packs<batch_of<decltype(whole)>(1)>(
                            group, piece.packs, [&](u32 i) { return load_pack(whole, own, piece.first + i, bytes); },
                            [&](u32 i, Pack pack) {
#pragma unroll
                                for (int d = 0; d < OTHERS; d++) fill_slot(slot[d], i, pack);
                                if (copies) store_pack(whole, own_output, piece.first + i, bytes, pack);
                            });
                    });
                },
                [&](u32 peer) {
                    if (flow.goes_to(peer)) post_slot(team, counters, SCATTER, peer);
                });
            if (both) tell_read(rounds, counters, step);
        } else {
            in_turn(
                rounds,
                [&](u32 peer) {
                    if (flow.comes_from(peer)) await_slot(team, counters, SCATTER, peer);
                    if (both) await_read(counters, step);
                },
                [&] {
                    const Pieces pieces = pieces_of(
                        team, [&](u32 peer) { return flow.output_of(peer); },
                        [&](u32 peer) { return flow.comes_from(peer) ? piece : Piece{0, 0}; },
                        [&](u32 peer) { return incoming(team, counters, SCATTER, peer); });
                    store_all(group, pieces, bytes);
                    if (!flow.sends()) copy_own();
                },
                [&](u32 peer) {
                    if (flow.comes_from(peer)) free_slot(team, counters, SCATTER, peer);
                });
        }
    }
    store_counters(team, counters);
}

#ifdef KERNEL_exchange_ll
extern "C" __global__ void __launch_bounds__(THREADS)
exchange_ll(const __grid_constant__ Args args) {
    one_call<exchange_lines<Ll>>(args);
}
#endif

#ifdef KERNEL_exchange_ll128
extern "C" __global__ void __launch_bounds__(THREADS)
exchange_ll128(const __grid_constant__ Args args) {
    one_call<exchange_lines<Ll128>>(args);
}
#endif

#ifdef KERNEL_exchange_simple
extern "C" __global__ void __launch_bounds__(THREADS, 1)
exchange_simple(const __grid_constant__ Args args) {
    const Channel channel = enter(args.team);
    exchange_slots(args, channel);
    leave(args.team, channel);
}
#endif

#ifdef KERNEL_exchange_direct
// Straight into the others' outputs. Every rank sees the names of all ranks' buffers, so all make the same choice.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
exchange_direct(const __grid_constant__ Args args) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes, stride = args.stride;
    __shared__ Reach reach;
    const Channel channel = enter(team);
    if (!meet(team, channel, args.remote, input, output, reach)) return close(team, channel);
    if (bytes % 16 != 0 || !reached(reach.output)) {
        exchange_slots(args, channel);
        return close(team, channel);
    }
    const u64 packs = bytes / 16;
    const u8* own = input + team.rank * stride;
    const bool copies = own != output + team.rank * bytes;
    // By distance, the segment that a rank gets from us. Our own part is copied along, while the link is busy.
    const u8* from[RANKS];
    u8* to[RANKS];
    bool whole_input = true;
#pragma unroll
    for (int d = 0; d < RANKS; d++) {
        const u32 rank = next_rank(team.rank, d);
        from[d] = input + rank * stride;
        to[d] = d == 0 && !copies ? nullptr : reach.output[rank] + team.rank * bytes;
        whole_input = whole_input && is_whole(from[d], packs, bytes);
    }
    either(whole_input, [&](auto whole) {
        if (stride == 0) {
            for_grid<8>(
                0, packs, [&](u64 i) { return load_pack(whole, own, i, bytes); },
                [&](u64 i, Pack pack) {
#pragma unroll
                    for (int s = 0; s < RANKS; s++) {
                        if (to[s] != nullptr) ((Pack*)to[s])[i] = pack;
                    }
                });
            return;
        }
        struct Row {
            Pack of[RANKS];
        };
        for_grid<(RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1)>(
            0, packs,
            [&](u64 i) {
                Row row;
#pragma unroll
                for (int s = 0; s < RANKS; s++) row.of[s] = load_pack(whole, from[s], i, bytes);
                return row;
            },
            [&](u64 i, const Row& row) {
#pragma unroll
                for (int s = 0; s < RANKS; s++) {
                    if (to[s] != nullptr) ((Pack*)to[s])[i] = row.of[s];
                }
            });
    });
    depart(team, channel);
    close(team, channel);
}
#endif
