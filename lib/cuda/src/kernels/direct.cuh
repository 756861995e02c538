// Protocol Direct: data goes from one rank's buffer into another's, without slots. That needs the other's buffer to be
// registered (`cuda/peer/registry.rs`). A rank names its buffers in its lines of this call, so ranks agree here, on the
// device, and a captured launch agrees again at each replay. If a needed buffer is not registered, or its address is
// not a multiple of 16, every rank sees that and takes the slots.

#define INPUT_LINE 1
#define OUTPUT_LINE 2
#define END_LINE 3

// All ranks' buffers as this rank reaches them; null: it does not. In shared memory.
struct Reach {
    u8* input[RANKS];
    u8* output[RANKS];
};

// A buffer as `peer` names it (`Remote`). The table in our window has the begin of each allocation as it is mapped
// here.
__device__ __forceinline__ u8* resolve(const Team& team, u32 peer, u64 remote) {
    if (remote == 0) return nullptr;
    const u64* table = (const u64*)(team.window[team.rank] + TABLE);
    const u64 base = *(const volatile u64*)(table + (u64)peer * REGISTRATIONS + (remote >> 48) - 1);
    return (u8*)(base + (remote & 0xffffffffffffull));
}

// Publishes this rank's buffers, waits for those of all ranks, and checks that all make the same call: no rank may
// write into another's buffer before. From here on the others' inputs are ready, and their outputs may be written.
// False, for the whole block: a rank did not arrive or makes another call.
__device__ __forceinline__ bool meet(const Team& team, const Channel& channel, const Remote& remote, const u8* input,
                                     u8* output, Reach& reach) {
    const u32 peer = threadIdx.x;
    bool well = true;
    if (peer < RANKS && peer != team.rank) {
        push_line(call_line_at(team, channel, peer, team.rank, INPUT_LINE), remote.input, channel.epoch);
        push_line(call_line_at(team, channel, peer, team.rank, OUTPUT_LINE), remote.output, channel.epoch);
        u64 from = 0, to = 0;
        well = line_came(team, call_line_at(team, channel, team.rank, peer, INPUT_LINE), channel.epoch, peer, from) &&
               line_came(team, call_line_at(team, channel, team.rank, peer, OUTPUT_LINE), channel.epoch, peer, to) &&
               means_the_same(team, channel, peer);
        // The others' earlier writes become visible to the whole block: a fence here, a barrier below.
        __threadfence_system();
        reach.input[peer] = well ? resolve(team, peer, from) : nullptr;
        reach.output[peer] = well ? resolve(team, peer, to) : nullptr;
    }
    if (peer == team.rank) {
        reach.input[peer] = remote.input != 0 ? (u8*)input : nullptr;
        reach.output[peer] = remote.output != 0 ? output : nullptr;
    }
    return __syncthreads_and(well);
}

__device__ __forceinline__ bool reached(const u8* at) {
    return at != nullptr && ((u64)at & 15) == 0;
}

// All ranks' but that of `except`. An allocation begins at a multiple of 16 however it is mapped, so ranks agree.
__device__ __forceinline__ bool reached(u8* const (&of)[RANKS], u32 except = RANKS) {
    bool all = true;
#pragma unroll
    for (u32 s = 0; s < RANKS; s++) all = all && (s == except || reached(of[s]));
    return all;
}

// Whether this thread handles the bytes after the last whole pack.
__device__ __forceinline__ bool has_tail(u64 bytes) {
    return bytes % 16 != 0 && blockIdx.x == 0 && threadIdx.x == 0;
}

// By one thread of a call or message that uses no slots.
__device__ __forceinline__ void count_direct(const Team& team) {
    atomicAdd((u64*)(team.window[team.rank] + DIRECT_COUNT), 1ull);
}

// Ends the block's accesses to others' buffers, and waits until blocks of the same number have ended theirs to ours:
// only then may the stream go on, which will write over an input or read an output.
__device__ __forceinline__ void depart(const Team& team, const Channel& channel) {
    __syncthreads();
    const u32 peer = threadIdx.x;
    if (blockIdx.x == 0 && peer == team.rank) count_direct(team);
    if (peer < RANKS && peer != team.rank) {
        store_release((u32*)call_line_at(team, channel, peer, team.rank, END_LINE), channel.epoch);
        const u32* ended = (const u32*)call_line_at(team, channel, team.rank, peer, END_LINE);
        await_count(team, ended, channel.epoch, WAITED_END, peer);
    }
}
