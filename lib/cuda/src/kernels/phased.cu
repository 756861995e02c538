// For ranks of several processes on one GPU. Their kernels run in turns, so none of these waits for another rank: the
// stream waits between them (`cuda/phased`). An area is a part of the slots' memory; areas of a sender are used in
// turn.

// The place in it of this block's piece.
__device__ __forceinline__ u8* area_at(const Team& team, u32 to, u32 from, u32 number, const Piece& piece) {
    const u64 index = (u64)(number % AREAS) * SENDERS + sender_of(to, from);
    return team.extension[to] + SLOTS + (u64)AREA_BYTES * index + 16 * piece.first;
}

__device__ __forceinline__ Piece piece_of_block(u64 bytes) {
    const Share share = share_of(bytes, 1);
    return Piece{share.first, (u32)(share.last - share.first)};
}

// Per rank: a count, and whether the rank takes part (bit of `who`). `flag`: which count phased_signal tells, TAIL or
// HEAD.
struct Counts {
    u32 of[MAX_RANKS];
    u32 who;
    u32 flag;
};

// A released stream must not announce data that it did not get, nor overwrite data that others have not read. Only one
// block calls this: the host's memory answers one block after the other, at 2 us each (team.cuh).
__device__ __forceinline__ bool was_let_go(const Team& team) {
    return load_relaxed(&team.report->abort) != 0 || load_relaxed(&team.report->state) != 0;
}

// Whether our area `number` at `peer` is free. If the stream was released, the count is far above any valid one
// (`cuda/phased/watch.rs`), or, if the peer has signalled since, below the awaited one.
__device__ __forceinline__ bool is_free(const Team& team, u32 peer, u32 number) {
    const u32 freed = load_relaxed(flag_at(team.window[team.rank], HEAD, SCATTER, 0, peer));
    return freed - (number + 1 - AREAS) < AREAS;
}

#ifdef KERNEL_phased_push
// Writes `bytes` at `input + p * stride` into our area of rank p's window.
extern "C" __global__ void __launch_bounds__(THREADS)
phased_push(const __grid_constant__ Args args, const __grid_constant__ Counts counts) {
    await_kernel_before();
    const Team& team = args.team;
    const u8* input = args.input;
    const u64 bytes = args.bytes, stride = args.stride;
    const Piece piece = piece_of_block(bytes);
    for (u32 peer = 0; peer < RANKS; peer++) {
        if ((counts.who >> peer & 1) == 0 || !is_free(team, peer, counts.of[peer])) continue;
        fill_from(whole_block(), area_at(team, peer, team.rank, counts.of[peer], piece), input + peer * stride, piece, bytes);
    }
}
#endif

#ifdef KERNEL_phased_take
// Copies rank s's data to `output + s * stride`.
extern "C" __global__ void __launch_bounds__(THREADS)
phased_take(const __grid_constant__ Args args, const __grid_constant__ Counts counts) {
    await_kernel_before();
    const Team& team = args.team;
    u8* output = args.output;
    const u64 bytes = args.bytes, stride = args.stride;
    const Piece piece = piece_of_block(bytes);
    for (u32 peer = 0; peer < RANKS; peer++) {
        if ((counts.who >> peer & 1) == 0) continue;
        store_from(whole_block(), output + peer * stride, piece, bytes, area_at(team, team.rank, peer, counts.of[peer], piece));
    }
}
#endif

// The call for which a rank filled an area, beside that rank's flag: one word per area, because a rank may be an area
// ahead.
__device__ __forceinline__ volatile u64* purpose_at(u32* flag, u32 number) {
    static_assert(8 + 8 * AREAS <= FLAG_BYTES, "a flag's sector holds the purposes");
    return (volatile u64*)(flag + 2 + 2 * (number % AREAS));
}

#ifdef KERNEL_phased_signal
// Publishes our progress to each rank that takes part (TAIL: areas filled, and the call of the last; HEAD: areas
// freed).
extern "C" __global__ void phased_signal(const __grid_constant__ Args args, const __grid_constant__ Counts counts) {
    await_kernel_before();
    const Team& team = args.team;
    const u32 peer = threadIdx.x;
    if (peer >= RANKS || (counts.who >> peer & 1) == 0 || was_let_go(team)) return;
    u32* flag = flag_at(team.window[peer], counts.flag, SCATTER, 0, team.rank);
    if (counts.flag == TAIL) *purpose_at(flag, counts.of[peer] - 1) = team.call;
    store_release(flag, counts.of[peer]);
}
#endif

#ifdef KERNEL_phased_compare
// Whether the ranks that filled an area make the same call. (Not for messages: their two ends are different calls.)
extern "C" __global__ void phased_compare(const __grid_constant__ Args args, const __grid_constant__ Counts counts) {
    await_kernel_before();
    const Team& team = args.team;
    const u32 peer = threadIdx.x;
    if (peer >= RANKS || (counts.who >> peer & 1) == 0) return;
    u32* flag = flag_at(team.window[team.rank], TAIL, SCATTER, 0, peer);
    const u64 theirs = *purpose_at(flag, counts.of[peer]);
    if (theirs != team.call) give_up(team, MISMATCH, peer, 0, 0, theirs);
}
#endif

#ifdef KERNEL_phased_reduce
// Reduces our own `input` with all others' data.
extern "C" __global__ void __launch_bounds__(THREADS)
phased_reduce(const __grid_constant__ Args args, const __grid_constant__ Counts counts) {
    await_kernel_before();
    const Team& team = args.team;
    const u8* input = args.input;
    u8* output = args.output;
    const u64 bytes = args.bytes;
    const Piece piece = piece_of_block(bytes);
    const u8* from[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++) from[s] = area_at(team, team.rank, s, counts.of[s], piece);
    reduce_slots(whole_block(), team, input, output, piece, bytes, from, [](u64, Pack) {});
}
#endif
