// Reduce-scatter, then all-gather, each straight between all pairs of ranks, in rounds of one slot per pair. Three rounds are
// under way at a time: the pieces of one are sent, those of the round before reduced, those of the one before that stored.

extern "C" __global__ void __launch_bounds__(THREADS, 1)
all_reduce_two_shot(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    __shared__ Counters counters;
    const Channel channel = enter(team);
    load_counters(team, counters);
    const Share share = share_of(bytes, RANKS);
    const u32 rounds = rounds_of(share);
    const u32 warp_peer = threadIdx.x >> 5;
    const bool speaker = (threadIdx.x & 31) == 0 && warp_peer < RANKS && warp_peer != team.rank;
    for (u32 step = 0; step < rounds + 2; step++) {
        if (step < rounds) {
            if (speaker) await_credit(team, counters, SCATTER, warp_peer);
            __syncthreads();
            for (u32 distance = 1; distance < RANKS; distance++) {
                const u32 peer = next_rank(team.rank, distance);
                fill_from(outgoing(team, counters, SCATTER, peer), input, piece_of(share, step, peer), bytes);
            }
            __syncthreads();
            if (speaker) post_slot(team, counters, SCATTER, warp_peer);
        }
        if (step >= 1 && step - 1 < rounds) {
            if (speaker) {
                await_slot(team, counters, SCATTER, warp_peer);
                await_credit(team, counters, GATHER, warp_peer);
            }
            __syncthreads();
            const Piece piece = piece_of(share, step - 1, team.rank);
            const u8* from[RANKS];
            u8* to[RANKS];
#pragma unroll
            for (int s = 0; s < RANKS; s++) {
                from[s] = incoming(team, counters, SCATTER, s);
                to[s] = outgoing(team, counters, GATHER, s);
            }
            const bool whole_output = is_whole(output, piece.first + piece.packs, bytes);
            reduce_slots(team, input, piece, bytes, from, [&](u32 i, Pack reduced) {
#pragma unroll
                for (int s = 0; s < RANKS; s++) {
                    if (s != (int)team.rank) fill_slot(to[s], i, reduced);
                }
                if (whole_output) store_pack(Is<true>{}, output, piece.first + i, bytes, reduced);
                else store_pack(Is<false>{}, output, piece.first + i, bytes, reduced);
            });
            __syncthreads();
            if (speaker) {
                post_slot(team, counters, GATHER, warp_peer);
                free_slot(team, counters, SCATTER, warp_peer);
            }
        }
        if (step >= 2) {
            if (speaker) await_slot(team, counters, GATHER, warp_peer);
            __syncthreads();
            for (u32 distance = 1; distance < RANKS; distance++) {
                const u32 peer = next_rank(team.rank, distance);
                store_from(output, piece_of(share, step - 2, peer), bytes, incoming(team, counters, GATHER, peer));
            }
            __syncthreads();
            if (speaker) free_slot(team, counters, GATHER, warp_peer);
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}
