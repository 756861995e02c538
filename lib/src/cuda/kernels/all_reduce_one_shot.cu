// Everyone sends everything to everyone, and each rank reduces for itself: one crossing of the link, (n-1) x the bytes sent.

extern "C" __global__ void __launch_bounds__(THREADS)
all_reduce_one_shot(const __grid_constant__ Team team, const u8* input, u8* output, u64 bytes) {
    const Channel channel = enter(team);
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / gridDim.x;
    const u32 count = (u32)(words * (blockIdx.x + 1) / gridDim.x - first);
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        const u64 mine = load_word(input, first + line, bytes);
#pragma unroll
        for (u32 distance = 1; distance < RANKS; distance++) {
            const u32 peer = next_rank(team.rank, distance);
            push_line(line_at(team.window[peer], channel, team.rank, line), mine, channel.epoch);
        }
    }
    for (u32 line = threadIdx.x; line < count; line += blockDim.x) {
        u64 all[RANKS];
        await_lines(team, channel, line, load_word(input, first + line, bytes), all);
        store_word(output, first + line, bytes, reduce_words(all));
    }
    leave(team, channel);
}
