// Runs a schedule: the same steps that the CPU executes, and that are verified without running. Block c is channel c.

template <bool IN_LINES>
__device__ __forceinline__ void run_schedule(const Team& team, const Buffers& buffers, const Program& program, const Cut& cut) {
    __shared__ Counters counters;
    __shared__ u32 stopped[MAX_LANES];
    const Channel channel = enter(team);
    if (threadIdx.x < MAX_LANES) stopped[threadIdx.x] = 0;
    if (IN_LINES) __syncthreads();
    else load_counters(team, counters);
    // Two channels represent all of them.
    const u32 variant = blockIdx.x % 2;
    const u32 lanes = program.lane_count[variant];
    const u32 threads = lanes == 2 ? THREADS / 2 : THREADS;
    const Subgroup group = {threadIdx.x / threads, threadIdx.x % threads, threads};
    if (group.index < lanes) {
        const u32 begin = program.lanes[variant][group.index][0], end = program.lanes[variant][group.index][1];
        const u32 first_part = blockIdx.x * program.parts;
        LineCounts counts = {};
        bool going = true;
        for (u64 window = 0; going && window < cut.windows; window++) {
            for (u32 at = begin; going && at < end; at++) {
                const Step step = program.steps[at];
                const u32 part = first_part + step.part;
                const Range range = part_of(cut, window, part, step.span);
                // No rank sends or awaits it.
                if (range.count == 0) continue;
                Move move = {};
                move.bytes = (u32)(range.count * cut.elem);
                move.last = step.flags & STEP_LAST;
                if (step.flags & STEP_READS) move.own = address_of(buffers, cut, step.src, range, part);
                if (step.flags & STEP_WRITES) move.dst = address_of(buffers, cut, step.dst, range, part);
                if (step.flags & STEP_LOCAL) {
                    move.in = move.dst;
                } else if (move.own == move.dst && step.from == NOBODY && step.to == NOBODY) {
                    continue; // a copy in place
                }
                if (IN_LINES) move_lines(team, channel, counts, group, step, move);
                else going = move_slots(team, channel, counters, group, step, move, stopped[group.index]);
            }
        }
    }
    if (IN_LINES) __syncthreads();
    else store_counters(team, counters);
    leave(team, channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
schedule_simple(const __grid_constant__ Args args, const __grid_constant__ Program program, const __grid_constant__ Cut cut) {
    run_schedule<false>(args.team, Buffers{args.input, args.output, args.scratch}, program, cut);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
schedule_ll(const __grid_constant__ Args args, const __grid_constant__ Program program, const __grid_constant__ Cut cut) {
    run_schedule<true>(args.team, Buffers{args.input, args.output, args.scratch}, program, cut);
}
