// Reduce-scatter, then all-gather, each straight between all pairs of ranks, with flags beside the data: two crossings of the
// link, 2(n-1)/n x the bytes sent (and as many flags). A line is passed on by the thread that reduced it; no barrier.

extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_two_shot_ll(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    // Segment s of this block's words belongs to rank s. The second half of the lines is for what was reduced.
    const u32 half = LL_LINES / 2;
    u8* window = team.window[team.rank];
#pragma unroll
    for (u32 distance = 1; distance < RANKS; distance++) {
        const u32 peer = next_rank(team.rank, distance);
        const u32 begin = count * peer / RANKS, end = count * (peer + 1) / RANKS;
        for (u32 line = threadIdx.x; line < end - begin; line += blockDim.x) {
            const u64 mine = load_word(input, first + begin + line, bytes);
            push_line(line_at(team.window[peer], channel, team.rank, line), mine, channel.epoch);
        }
    }
    const u32 begin = count * team.rank / RANKS, end = count * (team.rank + 1) / RANKS;
    for (u32 line = threadIdx.x; line < end - begin; line += blockDim.x) {
        u64 all[RANKS];
        await_lines(team, channel, line, load_word(input, first + begin + line, bytes), all);
        const u64 reduced = reduce_words(all);
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            const u32 peer = next_rank(team.rank, distance);
            push_line(line_at(team.window[peer], channel, team.rank, half + line), reduced, channel.epoch);
        }
        store_word(output, first + begin + line, bytes, reduced);
    }
#pragma unroll
    for (u32 distance = 1; distance < RANKS; distance++) {
        const u32 peer = next_rank(team.rank, distance);
        const u32 begin = count * peer / RANKS, end = count * (peer + 1) / RANKS;
        for (u32 line = threadIdx.x; line < end - begin; line += blockDim.x) {
            const u64 reduced = await_line(team, line_at(window, channel, peer, half + line), channel.epoch, peer);
            store_word(output, first + begin + line, bytes, reduced);
        }
    }
    leave(team, channel);
}
