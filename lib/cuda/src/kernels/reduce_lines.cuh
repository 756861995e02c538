// A block's part of calls that reduce, in lines. `stride` is the distance between the segments of the input that
// neighbouring ranks get; without one all get the same, which is an all-reduce.

#ifdef DTYPE

template <typename Lines>
__device__ __forceinline__ void scatter_lines(const Args& args, const Channel& channel, const Words& words) {
    const Team& team = args.team;
    const u8* input = args.input;
    const u64 stride = args.stride;
    const u32 cells = Lines::cells(words);
    for (u32 cell = channel.thread; cell < cells; cell += channel.threads) {
        const auto to_all = [](u32) { return true; };
        if (stride == 0) {
            const typename Lines::Cell mine = Lines::load(input, words, cell);
            push_cells<Lines>(team, channel, cell, to_all, [&](u32) { return mine; });
        } else {
            push_cells<Lines>(team, channel, cell, to_all,
                              [&](u32 peer) { return Lines::load(input + peer * stride, words, cell); });
        }
    }
    const u8* own = input + team.rank * stride;
    for (u32 cell = channel.thread; cell < cells; cell += channel.threads) {
        typename Lines::Cell all[RANKS];
        await_all<Lines>(team, channel, cell, Lines::load(own, words, cell), all);
        Lines::store(args.output, words, cell, reduce_cells(all));
    }
}

template <typename Lines>
__device__ __forceinline__ void root_lines(const Args& args, const Channel& channel, const Words& words) {
    const Team& team = args.team;
    for (u32 cell = channel.thread; cell < Lines::cells(words); cell += channel.threads) {
        const typename Lines::Cell mine = Lines::load(args.input, words, cell);
        if (team.rank != args.root) {
            Lines::push(team, channel, args.root, cell, mine);
        } else {
            typename Lines::Cell all[RANKS];
            await_all<Lines>(team, channel, cell, mine, all);
            Lines::store(args.output, words, cell, reduce_cells(all));
        }
    }
}

#endif
