// A block's part of calls that move data, in lines.

template <typename Lines>
__device__ __forceinline__ void broadcast_lines(const Args& args, const Channel& channel, const Words& words) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    for (u32 cell = channel.thread; cell < Lines::cells(words); cell += channel.threads) {
        if (team.rank == args.root) {
            const typename Lines::Cell mine = Lines::load(input, words, cell);
#pragma unroll
            for (u32 distance = 1; distance < RANKS; distance++) {
                Lines::push(team, channel, next_rank(args.root, distance), cell, mine);
            }
            if (output != input) Lines::store(output, words, cell, mine);
        } else {
            Lines::store(output, words, cell, Lines::await(team, channel, args.root, cell));
        }
    }
}

template <typename Lines>
__device__ __forceinline__ void exchange_lines(const Args& args, const Channel& channel, const Words& words) {
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes, stride = args.stride;
    const u32 cells = Lines::cells(words);
    const u8* own = input + team.rank * stride;
    u8* own_output = output + team.rank * bytes;
    const auto other = [&](u32 peer) { return peer != team.rank; };
    for (u32 cell = channel.thread; cell < cells; cell += channel.threads) {
        const typename Lines::Cell mine = Lines::load(own, words, cell);
        push_cells<Lines>(team, channel, cell, other, [&](u32 peer) {
            return stride == 0 ? mine : Lines::load(input + peer * stride, words, cell);
        });
        if (own != own_output) Lines::store(own_output, words, cell, mine);
    }
    for (u32 cell = channel.thread; cell < cells; cell += channel.threads) {
        typename Lines::Cell all[RANKS];
        await_cells<Lines>(team, channel, cell, all, other);
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if (other(s)) Lines::store(output + s * bytes, words, cell, all[s]);
        }
    }
}
