// Runs a schedule: the same steps that the CPU executes, and that are verified without running. Block c is channel c.

// `body(step, move)` for each step of this thread's lane, until it returns false.
template <typename Body>
__device__ __forceinline__ void for_moves(const Buffers& buffers, const Program& program, const Cut& cut, const Subgroup& group, Body body) {
    // Two channels represent all of them.
    const u32 variant = blockIdx.x % 2;
    if (group.index >= program.lane_count[variant]) return;
    const u32 begin = program.lanes[variant][group.index][0], end = program.lanes[variant][group.index][1];
    const u32 first_part = blockIdx.x * program.parts;
    for (u64 window = 0; window < cut.windows; window++) {
        for (u32 at = begin; at < end; at++) {
            const Step step = program.steps[at];
            const u32 part = first_part + step.part;
            const Range range = part_of(cut, window, part, step.span);
            // No rank sends or awaits it.
            if (range.count == 0) continue;
            Move move = {};
            move.bytes = (u32)(range.count * cut.elem);
            move.last = step.flags & STEP_LAST;
            if (step.flags & STEP_READS) move.own = address_of(buffers, cut, step.src, range, part);
            move.from_input = step.src >> 6 == 0;
            if (step.flags & STEP_WRITES) move.dst = address_of(buffers, cut, step.dst, range, part);
            if (step.flags & STEP_LOCAL) {
                move.in = move.dst;
            } else if (!SCALES && move.own == move.dst && step.from == NOBODY && step.to == NOBODY) {
                continue; // a copy in place
            }
            if (!body(step, move)) return;
        }
    }
}

// This thread's lane.
__device__ __forceinline__ Subgroup lane_of(const Program& program) {
    const u32 threads = program.lane_count[blockIdx.x % 2] == 2 ? THREADS / 2 : THREADS;
    return Subgroup{threadIdx.x / threads, threadIdx.x % threads, threads};
}

__device__ __forceinline__ Buffers buffers_of(const Args& args) {
    return Buffers{args.input, args.output, args.scratch};
}

#ifdef KERNEL_schedule_simple
extern "C" __global__ void __launch_bounds__(THREADS, 1)
schedule_simple(const __grid_constant__ Args args, const __grid_constant__ Program program, const __grid_constant__ Cut cut) {
    __shared__ Counters counters;
    __shared__ u32 stopped[MAX_LANES];
    const Channel channel = enter(args.team);
    if (threadIdx.x < MAX_LANES) stopped[threadIdx.x] = 0;
    begin_slots(args.team, channel, counters, program.sources == 1 ? FOR_ONE : FOR_EACH);
    if (counters.given_up) return leave(args.team, channel);
    const Subgroup group = lane_of(program);
    for_moves(buffers_of(args), program, cut, group, [&](const Step& step, const Move& move) {
        return move_slots(args.team, channel, counters, group, step, move, stopped[group.index]);
    });
    store_counters(args.team, counters);
    leave(args.team, channel);
}
#endif

#ifdef KERNEL_schedule_ll
extern "C" __global__ void __launch_bounds__(THREADS, 1)
schedule_ll(const __grid_constant__ Args args, const __grid_constant__ Program program, const __grid_constant__ Cut cut) {
    const Channel channel = enter(args.team);
    __syncthreads();
    const Subgroup group = lane_of(program);
    LineCounts counts = {};
    for_moves(buffers_of(args), program, cut, group, [&](const Step& step, const Move& move) {
        move_lines(args.team, channel, counts, group, step, move);
        return true;
    });
    __syncthreads();
    leave(args.team, channel);
}
#endif

#ifdef KERNEL_schedule_ll128
extern "C" __global__ void __launch_bounds__(THREADS, 1)
schedule_ll128(const __grid_constant__ Args args, const __grid_constant__ Program program, const __grid_constant__ Cut cut) {
    __shared__ Counters counters;
    const Team& team = args.team;
    const Channel channel = enter(team);
    load_counters(team, counters);
    const Subgroup group = lane_of(program);
    LineCounts counts = {};
    const bool in_shares = cut.shares != 0;
    for_moves(buffers_of(args), program, cut, group, [&](const Step& step, const Move& move) {
        const bool receives = step.from != NOBODY, sends = step.to != NOBODY, leads = group.thread == 0;
        const u32 cells = Ll128::cells(Words{0, (move.bytes + 7) / 8, move.bytes});
        Lines128 lines = {0, 0, Ll128::flag_of(channel), Ll128::flag_of(channel)};
        if (in_shares) {
            const auto share = [&](u32 number, u32& first, u64& flag) {
                first = number % SLOT_COUNT * share_cells(program.sources);
                flag = (u64)channel.epoch << 32 | number;
            };
            if (sends) share(take_lines(counts.sent, step.to, 1), lines.sent, lines.sent_flag);
            if (receives) share(take_lines(counts.received, step.from, 1), lines.received, lines.received_flag);
            const bool given_up = leads && sends && !credit_came(team, channel, counters, step.to);
            if (sends && sync_subgroup_or(group, given_up)) return false;
        } else {
            if (sends) lines.sent = take_lines(counts.sent, step.to, cells);
            if (receives) lines.received = take_lines(counts.received, step.from, cells);
        }
        if (!move_lines_128(team, channel, group, step, move, program.sources, lines)) return false;
        if (in_shares && leads) {
            if (receives) free_slot(team, counters, SCATTER, step.from);
            if (sends) counters.sent[SCATTER][step.to]++;
        }
        return true;
    });
    store_counters(team, counters);
    leave(team, channel);
}
#endif
