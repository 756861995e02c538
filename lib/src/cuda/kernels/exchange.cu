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
            if (stride == 0) {
#pragma unroll 4
                for (u32 i = threadIdx.x; i < piece.packs; i += THREADS) {
                    const Pack pack = load_pack(own, piece.first + i, bytes);
#pragma unroll
                    for (int s = 0; s < RANKS; s++) {
                        if (s != (int)team.rank) fill_slot(slot[s], i, pack);
                    }
                    if (own != own_output) store_pack(own_output, piece.first + i, bytes, pack);
                }
            } else {
#pragma unroll
                for (int s = 0; s < RANKS; s++) {
                    const u8* from = input + s * stride;
#pragma unroll 4
                    for (u32 i = threadIdx.x; i < piece.packs; i += THREADS) {
                        const Pack pack = load_pack(from, piece.first + i, bytes);
                        if (s != (int)team.rank) fill_slot(slot[s], i, pack);
                        else if (own != own_output) store_pack(own_output, piece.first + i, bytes, pack);
                    }
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
#pragma unroll 4
                for (u32 i = threadIdx.x; i < piece.packs; i += THREADS) {
                    store_pack(output + peer * bytes, piece.first + i, bytes, load_slot(slot, i));
                }
            }
            __syncthreads();
            if (speaker) free_slot(team, counters, SCATTER, warp_peer);
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}
