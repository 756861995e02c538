// Each rank sends segment p to rank p and reduces what it gets. `bytes` is the length of a segment. With a distance of 0
// between the segments that is an all-reduce: between two ranks it sends no more than any other and has one step less.

__device__ __forceinline__ void scatter_ll(const Team& team, const u8* input, u8* output, u64 bytes, u64 stride) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        u64 word = load_word(input, first + line, bytes);
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            const u32 peer = next_rank(team.rank, distance);
            if (stride != 0) word = load_word(input + peer * stride, first + line, bytes);
            push_line(line_at(team.window[peer], channel, team.rank, line), word, channel.epoch);
        }
    }
    const u8* own = input + team.rank * stride;
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        u64 all[RANKS];
        await_lines(team, channel, line, load_word(own, first + line, bytes), all);
        store_word(output, first + line, bytes, reduce_words(all));
    }
    leave(team, channel);
}

__device__ __forceinline__ void scatter_simple(const Team& team, const u8* input, u8* output, u64 bytes, u64 stride) {
    __shared__ Counters counters;
    const Channel channel = enter(team);
    load_counters(team, counters);
    const Share share = share_of(bytes, 1);
    const u32 rounds = rounds_of(share);
    const u32 warp_peer = threadIdx.x >> 5;
    const bool speaker = (threadIdx.x & 31) == 0 && warp_peer < RANKS && warp_peer != team.rank;
    const u8* own = input + team.rank * stride;
    for (u32 step = 0; step < rounds + 1; step++) {
        if (step < rounds) {
            if (speaker) await_credit(team, counters, SCATTER, warp_peer);
            __syncthreads();
            const Piece piece = piece_of(share, step, 0);
            for (u32 distance = 1; distance < RANKS; distance++) {
                const u32 peer = next_rank(team.rank, distance);
                fill_from(outgoing(team, counters, SCATTER, peer), input + peer * stride, piece, bytes);
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
            const bool whole_output = is_whole(output, piece.first + piece.packs, bytes);
            reduce_slots(team, own, piece, bytes, from, [&](u32 i, Pack reduced) {
                if (whole_output) store_pack(Is<true>{}, output, piece.first + i, bytes, reduced);
                else store_pack(Is<false>{}, output, piece.first + i, bytes, reduced);
            });
            __syncthreads();
            if (speaker) free_slot(team, counters, SCATTER, warp_peer);
        }
    }
    store_counters(team, counters);
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS)
reduce_scatter_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    scatter_ll(team, input, output, bytes, bytes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
reduce_scatter_simple(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    scatter_simple(team, input, output, bytes, bytes);
}

// Everyone sends everything to everyone, and each rank reduces for itself: one crossing of the link, (n-1) x the bytes sent.
extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_one_shot_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    scatter_ll(team, input, output, bytes, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
all_reduce_one_shot(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    scatter_simple(team, input, output, bytes, 0);
}
