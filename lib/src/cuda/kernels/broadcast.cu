// The root sends to everyone. Larger buffers are scattered by the root and passed on by who got a segment, so that the root's
// link carries the buffer once and not n-1 times.

extern "C" __global__ void __launch_bounds__(THREADS)
broadcast_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes, u32 root) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    u8* window = team.window[team.rank];
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        if (team.rank == root) {
            const u64 mine = load_word(input, first + line, bytes);
#pragma unroll
            for (u32 distance = 1; distance < RANKS; distance++) {
                const u32 peer = next_rank(root, distance);
                push_line(line_at(team.window[peer], channel, root, line), mine, channel.epoch);
            }
            if (output != input) store_word(output, first + line, bytes, mine);
        } else {
            const u64 data = await_line(team, line_at(window, channel, root, line), channel.epoch, root);
            store_word(output, first + line, bytes, data);
        }
    }
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
broadcast_simple(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes, u32 root) {
    __shared__ Counters counters;
    const Channel channel = enter(team);
    load_counters(team, counters);
    const u32 parts = RANKS - 1;
    const Share share = share_of(bytes, parts);
    const u32 rounds = rounds_of(share);
    const u32 warp_peer = threadIdx.x >> 5;
    const bool speaker = (threadIdx.x & 31) == 0 && warp_peer < RANKS && warp_peer != team.rank;
    const bool others = speaker && warp_peer != root;
    const u32 my_part = (team.rank + RANKS - root - 1) % RANKS;
    if (team.rank == root) {
        for (u32 step = 0; step < rounds; step++) {
            if (speaker) await_credit(team, counters, SCATTER, warp_peer);
            __syncthreads();
            for (u32 q = 0; q < parts; q++) {
                const u32 peer = next_rank(root, q + 1);
                const Piece piece = piece_of(share, step, q);
                u8* slot = outgoing(team, counters, SCATTER, peer);
                const bool copies = output != input;
                either(is_whole(input, piece.first + piece.packs, bytes) && is_whole(output, piece.first + piece.packs, bytes),
                       [&](auto whole) {
                           for_packs<8>(
                               piece.packs, [&](u32 i) { return load_pack(whole, input, piece.first + i, bytes); },
                               [&](u32 i, Pack pack) {
                                   fill_slot(slot, i, pack);
                                   if (copies) store_pack(whole, output, piece.first + i, bytes, pack);
                               });
                       });
            }
            __syncthreads();
            if (speaker) post_slot(team, counters, SCATTER, warp_peer);
        }
    } else {
        for (u32 step = 0; step < rounds + 1; step++) {
            if (step < rounds) {
                if (speaker && warp_peer == root) await_slot(team, counters, SCATTER, root);
                if (others) await_credit(team, counters, GATHER, warp_peer);
                __syncthreads();
                const Piece piece = piece_of(share, step, my_part);
                const u8* slot = incoming(team, counters, SCATTER, root);
                u8* to[RANKS];
#pragma unroll
                for (int s = 0; s < RANKS; s++) to[s] = outgoing(team, counters, GATHER, s);
                either(is_whole(output, piece.first + piece.packs, bytes), [&](auto whole) {
                    for_packs<8>(
                        piece.packs, [&](u32 i) { return load_slot(slot, i); },
                        [&](u32 i, Pack pack) {
#pragma unroll
                            for (int s = 0; s < RANKS; s++) {
                                if (s != (int)team.rank && s != (int)root) fill_slot(to[s], i, pack);
                            }
                            store_pack(whole, output, piece.first + i, bytes, pack);
                        });
                });
                __syncthreads();
                if (others) post_slot(team, counters, GATHER, warp_peer);
                if (speaker && warp_peer == root) free_slot(team, counters, SCATTER, root);
            }
            if (step >= 1) {
                if (others) await_slot(team, counters, GATHER, warp_peer);
                __syncthreads();
                for (u32 q = 0; q < parts; q++) {
                    const u32 peer = next_rank(root, q + 1);
                    if (peer == team.rank) continue;
                    const Piece piece = piece_of(share, step - 1, q);
                    const u8* slot = incoming(team, counters, GATHER, peer);
                    store_from(output, piece, bytes, slot);
                }
                __syncthreads();
                if (others) free_slot(team, counters, GATHER, warp_peer);
            }
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}
