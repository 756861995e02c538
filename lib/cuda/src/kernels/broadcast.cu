// The root sends to all ranks. It scatters larger buffers, and each rank forwards its segment, so that the root's link
// carries the buffer once and not n-1 times: a subgroup forwards its own parts, another stores those that the others
// forward.

__device__ __forceinline__ void broadcast_slots(const Team& team, const Channel& channel,
                                                const u8* input, u8* output, u64 bytes, u32 root) {
    __shared__ Counters counters;
    const u32 parts = RANKS - 1;
    const bool is_root = team.rank == root;
    // Between two ranks, and at the root, there is one task.
    const Subgroup group = is_root || RANKS == 2 ? whole_block() : subgroup_of(THREADS / 2, THREADS / 2);
    const Rounds rounds = begin_rounds(team, channel, counters, group, bytes, parts);
    const auto part_of = [&](u32 rank) { return (rank + RANKS - root - 1) % RANKS; };
    for (u32 step = 0; step < rounds.count; step++) {
        // From the rank that forwards it.
        const auto piece = [&](u32 rank) {
            if (rank == root) return Piece{0, 0};
            return piece_of(rounds.share, step, part_of(rank));
        };
        if (is_root) {
            in_turn(
                rounds, [&](u32 peer) { await_credit(team, counters, SCATTER, peer); },
                [&] {
                    const Pieces pieces = pieces_of(team, [&](u32) { return input; }, piece,
                                                    [&](u32 peer) { return outgoing(team, counters, SCATTER, peer); });
                    fill_all(group, pieces, bytes, output != input ? output : nullptr);
                },
                [&](u32 peer) { post_slot(team, counters, SCATTER, peer); });
        } else if (group.index == 0) {
            in_turn(
                rounds,
                [&](u32 peer) {
                    if (peer == root) await_slot(team, counters, SCATTER, root);
                    else await_credit(team, counters, GATHER, peer);
                },
                [&] {
                    const Piece mine = piece(team.rank);
                    const u8* slot = incoming(team, counters, SCATTER, root);
                    u8* to[RANKS];
#pragma unroll
                    for (int s = 0; s < RANKS; s++) to[s] = outgoing(team, counters, GATHER, s);
                    either(is_whole(output, mine.first + mine.packs, bytes), [&](auto whole) {
                        for_packs<batch_of<decltype(whole)>(1)>(
                            group, mine.packs, [&](u32 i) { return load_slot(slot, i); },
                            [&](u32 i, Pack pack) {
#pragma unroll
                                for (int s = 0; s < RANKS; s++) {
                                    if (s != (int)team.rank && s != (int)root) fill_slot(to[s], i, pack);
                                }
                                store_pack(whole, output, mine.first + i, bytes, pack);
                            });
                    });
                },
                [&](u32 peer) {
                    if (peer == root) free_slot(team, counters, SCATTER, root);
                    else post_slot(team, counters, GATHER, peer);
                });
        } else {
            in_turn(
                rounds,
                [&](u32 peer) {
                    if (peer != root) await_slot(team, counters, GATHER, peer);
                },
                [&] {
                    const Pieces pieces = pieces_of(team, [&](u32) { return output; }, piece,
                                                    [&](u32 peer) { return incoming(team, counters, GATHER, peer); });
                    store_all(group, pieces, bytes);
                },
                [&](u32 peer) {
                    if (peer != root) free_slot(team, counters, GATHER, peer);
                });
        }
    }
    store_counters(team, counters);
}

#ifdef KERNEL_broadcast_ll
extern "C" __global__ void __launch_bounds__(THREADS)
broadcast_ll(const __grid_constant__ Args args) {
    one_call<broadcast_lines<Ll>>(args);
}
#endif

#ifdef KERNEL_broadcast_ll128
extern "C" __global__ void __launch_bounds__(THREADS)
broadcast_ll128(const __grid_constant__ Args args) {
    one_call<broadcast_lines<Ll128>>(args);
}
#endif

#ifdef KERNEL_broadcast_simple
extern "C" __global__ void __launch_bounds__(THREADS, 1)
broadcast_simple(const __grid_constant__ Args args) {
    const Channel channel = enter(args.team);
    broadcast_slots(args.team, channel, args.input, args.output, args.bytes, args.root);
    leave(args.team, channel);
}
#endif

#ifdef KERNEL_broadcast_direct
// The root writes into the other's output.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
broadcast_direct(const __grid_constant__ Args args) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes, packs = bytes / 16;
    const u32 root = args.root;
    __shared__ Reach reach;
    const Channel channel = enter(team);
    if (!meet(team, channel, args.remote, input, output, reach)) return close(team, channel);
    if (!reached(reach.output, root)) {
        broadcast_slots(team, channel, input, output, bytes, root);
        return close(team, channel);
    }
    if (team.rank == root) {
        u8* to = reach.output[1 - root];
        u8* copy = output != input ? output : nullptr;
        either(is_whole(input, packs, bytes) && (copy == nullptr || is_whole(copy, packs, bytes)), [&](auto whole) {
            for_grid<8>(
                0, packs, [&](u64 i) { return load_pack(whole, input, i, bytes); },
                [&](u64 i, Pack pack) {
                    ((Pack*)to)[i] = pack;
                    if (copy != nullptr) store_pack(whole, copy, i, bytes, pack);
                });
        });
        if (has_tail(bytes)) {
            const Pack pack = load_odd_pack(input, packs, bytes);
            store_odd_pack(to, packs, bytes, pack);
            if (copy != nullptr) store_odd_pack(copy, packs, bytes, pack);
        }
    }
    depart(team, channel);
    close(team, channel);
}
#endif
