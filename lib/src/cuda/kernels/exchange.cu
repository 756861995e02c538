// All-gather and all-to-all: each rank sends one segment of `bytes` to each other, and stores what it gets by sender.
// `stride` is the distance between the segments sent to neighbouring ranks: 0 for all-gather, whose ranks all get the same.

extern "C" __global__ void __launch_bounds__(THREADS)
exchange_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes, u64 stride) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    const u8* own = input + team.rank * stride;
    u8* window = team.window[team.rank];
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            const u32 peer = next_rank(team.rank, distance);
            const u64 word = load_word(input + peer * stride, first + line, bytes);
            push_line(line_at(team.window[peer], channel, team.rank, line), word, channel.epoch);
        }
        if (own != output + team.rank * bytes) {
            store_word(output + team.rank * bytes, first + line, bytes, load_word(own, first + line, bytes));
        }
    }
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            const u32 peer = next_rank(team.rank, distance);
            const u64 word = await_line(team, line_at(window, channel, peer, line), channel.epoch, peer);
            store_word(output + peer * bytes, first + line, bytes, word);
        }
    }
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
exchange_simple(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes, u64 stride) {
    __shared__ Counters counters;
    const Channel channel = enter(team);
    load_counters(team, counters);
    const Share share = share_of(bytes, 1);
    const u32 rounds = rounds_of(share);
    const u32 warp_peer = threadIdx.x >> 5;
    const bool speaker = (threadIdx.x & 31) == 0 && warp_peer < RANKS && warp_peer != team.rank;
    const u8* own = input + team.rank * stride;
    u8* own_output = output + team.rank * bytes;
    for (u32 step = 0; step < rounds + 1; step++) {
        if (step < rounds) {
            if (speaker) await_credit(team, counters, SCATTER, warp_peer);
            __syncthreads();
            const Piece piece = piece_of(share, step, 0);
            u8* slot[RANKS];
#pragma unroll
            for (int s = 0; s < RANKS; s++) slot[s] = outgoing(team, counters, SCATTER, s);
            const bool copies = own != own_output;
            const u64 end = piece.first + piece.packs;
            if (stride == 0) {
                either(is_whole(own, end, bytes) && is_whole(own_output, end, bytes), [&](auto whole) {
                    for_packs<8>(
                        piece.packs, [&](u32 i) { return load_pack(whole, own, piece.first + i, bytes); },
                        [&](u32 i, Pack pack) {
#pragma unroll
                            for (int s = 0; s < RANKS; s++) {
                                if (s != (int)team.rank) fill_slot(slot[s], i, pack);
                            }
                            if (copies) store_pack(whole, own_output, piece.first + i, bytes, pack);
                        });
                });
            } else {
                for (u32 distance = 1; distance < RANKS; distance++) {
                    const u32 peer = next_rank(team.rank, distance);
                    fill_from(outgoing(team, counters, SCATTER, peer), input + peer * stride, piece, bytes);
                }
                if (copies) {
                    either(is_whole(own, end, bytes) && is_whole(own_output, end, bytes), [&](auto whole) {
                        for_packs<8>(
                            piece.packs, [&](u32 i) { return load_pack(whole, own, piece.first + i, bytes); },
                            [&](u32 i, Pack pack) { store_pack(whole, own_output, piece.first + i, bytes, pack); });
                    });
                }
            }
            __syncthreads();
            if (speaker) post_slot(team, counters, SCATTER, warp_peer);
        }
        if (step >= 1) {
            if (speaker) await_slot(team, counters, SCATTER, warp_peer);
            __syncthreads();
            const Piece piece = piece_of(share, step - 1, 0);
#pragma unroll
            for (u32 distance = 1; distance < RANKS; distance++) {
                const u32 peer = next_rank(team.rank, distance);
                const u8* slot = incoming(team, counters, SCATTER, peer);
                store_from(output + peer * bytes, piece, bytes, slot);
            }
            __syncthreads();
            if (speaker) free_slot(team, counters, SCATTER, warp_peer);
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}
