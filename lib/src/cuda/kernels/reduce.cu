// Everyone sends to the root, which reduces. For larger buffers the ranks other than the root each reduce a segment first, so
// that the root's link carries the buffer once and not n-1 times.

extern "C" __global__ void __launch_bounds__(THREADS)
reduce_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes, u32 root) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        const u64 mine = load_word(input, first + line, bytes);
        if (team.rank != root) {
            push_line(line_at(team.window[root], channel, team.rank, line), mine, channel.epoch);
        } else {
            u64 all[RANKS];
            await_lines(team, channel, line, mine, all);
            store_word(output, first + line, bytes, reduce_words(all));
        }
    }
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_simple(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes, u32 root) {
    __shared__ Counters counters;
    const Channel channel = enter(team);
    load_counters(team, counters);
    // With two ranks the root reduces itself: a detour would double what its link carries.
    const u32 parts = RANKS == 2 ? 1 : RANKS - 1;
    const Share share = share_of(bytes, parts);
    const u32 rounds = rounds_of(share);
    const u32 warp_peer = threadIdx.x >> 5;
    const bool speaker = (threadIdx.x & 31) == 0 && warp_peer < RANKS && warp_peer != team.rank;
    // Who reduces part q, and which part a rank reduces.
    const u32 shift = RANKS == 2 ? 0 : 1;
    const u32 part = team.rank + RANKS - root - shift; // modulo RANKS
    const u32 my_part = part % RANKS;
    const bool owner = my_part < parts;
    for (u32 step = 0; step < rounds + 2; step++) {
        if (step < rounds) {
            const u32 peer_part = (warp_peer + RANKS - root - shift) % RANKS;
            if (speaker && peer_part < parts) await_credit(team, counters, SCATTER, warp_peer);
            __syncthreads();
            for (u32 q = 0; q < parts; q++) {
                const u32 peer = (root + shift + q) % RANKS;
                if (peer == team.rank) continue;
                const Piece piece = piece_of(share, step, q);
                u8* slot = outgoing(team, counters, SCATTER, peer);
                fill_from(slot, input, piece, bytes);
            }
            __syncthreads();
            if (speaker && peer_part < parts) post_slot(team, counters, SCATTER, warp_peer);
        }
        if (step >= 1 && step - 1 < rounds && owner) {
            if (speaker) await_slot(team, counters, SCATTER, warp_peer);
            if (speaker && team.rank != root && warp_peer == root) await_credit(team, counters, GATHER, root);
            __syncthreads();
            const Piece piece = piece_of(share, step - 1, my_part);
            const u8* from[RANKS];
#pragma unroll
            for (int s = 0; s < RANKS; s++) from[s] = incoming(team, counters, SCATTER, s);
            u8* to = outgoing(team, counters, GATHER, root);
            const bool whole_output = is_whole(output, piece.first + piece.packs, bytes);
            reduce_slots(team, input, piece, bytes, from, [&](u32 i, Pack reduced) {
                if (team.rank != root) fill_slot(to, i, reduced);
                else if (whole_output) store_pack(Is<true>{}, output, piece.first + i, bytes, reduced);
                else store_pack(Is<false>{}, output, piece.first + i, bytes, reduced);
            });
            __syncthreads();
            if (speaker) free_slot(team, counters, SCATTER, warp_peer);
            if (speaker && team.rank != root && warp_peer == root) post_slot(team, counters, GATHER, root);
        }
        if (step >= 2 && team.rank == root && parts > 1) {
            if (speaker) await_slot(team, counters, GATHER, warp_peer);
            __syncthreads();
            for (u32 q = 0; q < parts; q++) {
                const u32 peer = (root + shift + q) % RANKS;
                const Piece piece = piece_of(share, step - 2, q);
                const u8* slot = incoming(team, counters, GATHER, peer);
                store_from(output, piece, bytes, slot);
            }
            __syncthreads();
            if (speaker) free_slot(team, counters, GATHER, warp_peer);
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}
