// Each rank sends segment p to rank p and reduces what it gets. `bytes` is the length of a segment.

extern "C" __global__ void __launch_bounds__(THREADS)
reduce_scatter_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            const u32 peer = next_rank(team.rank, distance);
            const u64 word = load_word(input + peer * bytes, first + line, bytes);
            push_line(line_at(team.window[peer], channel, team.rank, line), word, channel.epoch);
        }
    }
    const u8* own = input + team.rank * bytes;
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        u64 all[RANKS];
        await_lines(team, channel, line, load_word(own, first + line, bytes), all);
        store_word(output, first + line, bytes, reduce_words(all));
    }
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_scatter_simple(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    __shared__ Counters counters;
    const Channel channel = enter(team);
    load_counters(team, counters);
    const Share share = share_of(bytes, 1);
    const u32 rounds = rounds_of(share);
    const u32 warp_peer = threadIdx.x >> 5;
    const bool speaker = (threadIdx.x & 31) == 0 && warp_peer < RANKS && warp_peer != team.rank;
    const u8* own = input + team.rank * bytes;
    for (u32 step = 0; step < rounds + 1; step++) {
        if (step < rounds) {
            if (speaker) await_credit(team, counters, SCATTER, warp_peer);
            __syncthreads();
            const Piece piece = piece_of(share, step, 0);
#pragma unroll
            for (u32 distance = 1; distance < RANKS; distance++) {
                const u32 peer = next_rank(team.rank, distance);
                u8* slot = outgoing(team, counters, SCATTER, peer);
#pragma unroll 4
                for (u32 i = threadIdx.x; i < piece.packs; i += THREADS) {
                    fill_slot(slot, i, load_pack(input + peer * bytes, piece.first + i, bytes));
                }
            }
            __syncthreads();
            if (speaker) post_slot(team, counters, SCATTER, warp_peer);
        }
        if (step >= 1) {
            if (speaker) await_slot(team, counters, SCATTER, warp_peer);
            __syncthreads();
            const Piece piece = piece_of(share, step - 1, 0);
            const u8* from[RANKS];
#pragma unroll
            for (int s = 0; s < RANKS; s++) from[s] = incoming(team, counters, SCATTER, s);
#pragma unroll 2
            for (u32 i = threadIdx.x; i < piece.packs; i += THREADS) {
                u64 a[RANKS], b[RANKS];
#pragma unroll
                for (int s = 0; s < RANKS; s++) {
                    const Pack pack = s == (int)team.rank ? load_pack(own, piece.first + i, bytes) : load_slot(from[s], i);
                    a[s] = pack.a;
                    b[s] = pack.b;
                }
                const Pack reduced = {reduce_words(a), reduce_words(b)};
                store_pack(output, piece.first + i, bytes, reduced);
            }
            __syncthreads();
            if (speaker) free_slot(team, counters, SCATTER, warp_peer);
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}
