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

// The segments of a call for one rank: which ranks they go to and come from, and where they lie.
struct Flow {
    const u8* input;
    u8* output;
    u64 stride;
    u64 output_stride;
    u32 rank, root, of;

    __device__ __forceinline__ bool sends() const { return of == FLOW_SCATTER ? rank == root : of != FLOW_GATHER || rank != root; }
    __device__ __forceinline__ bool receives() const { return of == FLOW_GATHER ? rank == root : of != FLOW_SCATTER || rank != root; }
    // Whether it has a segment for itself.
    __device__ __forceinline__ bool keeps() const { return of == FLOW_ALL || rank == root; }
    __device__ __forceinline__ bool goes_to(u32 peer) const { return peer != rank && sends() && (of != FLOW_GATHER || peer == root); }
    __device__ __forceinline__ bool comes_from(u32 peer) const { return peer != rank && receives() && (of != FLOW_SCATTER || peer == root); }
    __device__ __forceinline__ const u8* input_for(u32 peer) const { return input + peer * stride; }
    __device__ __forceinline__ u8* output_of(u32 peer) const { return output + peer * output_stride; }
};

__device__ __forceinline__ Flow flow_of(const Args& args) {
    const u64 output_stride = args.flow == FLOW_SCATTER ? 0 : args.bytes;
    return Flow{args.input, args.output, args.stride, output_stride, args.team.rank, args.root, args.flow};
}

template <typename Lines>
__device__ __forceinline__ void exchange_lines(const Args& args, const Channel& channel, const Words& words) {
    const Team& team = args.team;
    const Flow flow = flow_of(args);
    const u32 cells = Lines::cells(words);
    const u8* own = flow.input_for(team.rank);
    u8* own_output = flow.output_of(team.rank);
    if (flow.sends() || flow.keeps()) {
        for (u32 cell = channel.thread; cell < cells; cell += channel.threads) {
            const typename Lines::Cell mine = Lines::load(own, words, cell);
            push_cells<Lines>(team, channel, cell, [&](u32 peer) { return flow.goes_to(peer); }, [&](u32 peer) {
                return args.stride == 0 ? mine : Lines::load(flow.input_for(peer), words, cell);
            });
            if (flow.keeps() && own != own_output) Lines::store(own_output, words, cell, mine);
        }
    }
    if (!flow.receives()) return;
    for (u32 cell = channel.thread; cell < cells; cell += channel.threads) {
        typename Lines::Cell all[RANKS];
        await_cells<Lines>(team, channel, cell, all, [&](u32 peer) { return flow.comes_from(peer); });
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if (flow.comes_from(s)) Lines::store(flow.output_of(s), words, cell, all[s]);
        }
    }
}
