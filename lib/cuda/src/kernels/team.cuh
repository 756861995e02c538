// The ranks of a communicator as a kernel sees them, and how it waits for them. `cuda/window/mod.rs` has the same
// layout.

// Filled by the first thread that gives up; in the host's memory. `cuda/report.rs` reads it.
struct Report {
    u32 abort; // written by the host: leave at once
    u32 state; // 0 nothing, 1 being written, 2 written
    u32 kind;  // what was waited for: one of WAITED_*, or MISMATCH
    u32 channel;
    u32 peer;
    u32 expected;
    u32 got;
    u32 call;
    u64 ours; // MISMATCH: what the ranks are in
    u64 theirs;
    u32 cut; // a thread has left a call before its end
};

#define WAITED_LINE 1
#define WAITED_SLOT 2
#define WAITED_CREDIT 3
#define MISMATCH 4
#define WAITED_END 6
#define WAITED_SIGNAL 7

struct Team {
    u8* window[MAX_RANKS];    // every rank's window, in the order of the ranks
    u8* extension[MAX_RANKS]; // and the extension of each; null until a call needs it
    Report* report;
    u64 patience; // nanoseconds without progress until a wait is given up
    u64 call;     // what this call is: collective, dtype, op, root and a checksum of the count
    u32 rank;
    u32 number; // of this call, for messages
    u32 guarded; // whether calls look at GUARD when they begin
    u32 unused;
};

__device__ __forceinline__ u64 now() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__device__ __forceinline__ u32 load_relaxed(const u32* at) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u32* at, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

// Kernels begin while the one before in their stream still ends (`launch_with`). From here on it has ended, and its
// writes are visible: no kernel accesses memory before. (CUDA: programmatic dependent launch)
__device__ __forceinline__ void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// One thread's patience in one wait.
struct Wait {
    u32 turns;
    u64 begin;
    u64 look; // when to look at the host's memory next
};

__device__ __forceinline__ void give_up(const Team& team, u32 kind, u32 peer, u32 expected, u32 got, u64 ours,
                                        u64 theirs) {
    Report* report = team.report;
    if (atomicCAS_system(&report->state, 0u, 1u) != 0u) return;
    volatile Report* to = report;
    to->kind = kind;
    to->channel = blockIdx.x;
    to->peer = peer;
    to->expected = expected;
    to->got = got;
    to->call = team.number;
    to->ours = ours;
    to->theirs = theirs;
    __threadfence_system();
    to->state = 2;
}

__device__ __forceinline__ void give_up(const Team& team, u32 kind, u32 peer, u32 expected, u32 got, u64 theirs) {
    give_up(team, kind, peer, expected, got, team.call, theirs);
}

// Interval at which a waiting thread reads the host's memory, in nanoseconds. The reads are not cheap: blocks that read
// at the same time get their answers one after the other, 1 to 2 us apart, and the awaited data may arrive meanwhile.
#define LOOK_PERIOD 5000000ull

// Called each time that awaited data has not arrived. False: stop waiting.
__device__ __noinline__ bool keep_waiting(const Team& team, Wait& wait, u32 kind, u32 peer, u32 expected, u32 got) {
    if (wait.turns == 0) {
        wait.begin = now();
        wait.look = wait.begin + LOOK_PERIOD;
    }
    if ((++wait.turns & 63) != 0) return true;
    const u64 time = now();
    if (time < wait.look) return true;
    wait.look = time + LOOK_PERIOD;
    if (load_relaxed(&team.report->abort) != 0 || load_relaxed(&team.report->state) != 0) {
        store_relaxed(&team.report->cut, 1);
        return false;
    }
    if (time - wait.begin < team.patience) return true;
    give_up(team, kind, peer, expected, got, 0);
    return false;
}

// Barriers of the block continue without it.
__device__ __forceinline__ void end_thread() {
    asm volatile("exit;");
}

// Places in a window.
#define EPOCHS 0
#define COUNTERS (EPOCHS + EPOCH_BYTES)
#define FLAGS (COUNTERS + 4 * 2 * KINDS * CHANNELS * MAX_RANKS)
#define CALLS ((FLAGS + FLAG_BYTES * 2 * KINDS * CHANNELS * MAX_RANKS + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES)
#define LINES (CALLS + 16ull * CHANNELS * LINE_SETS * SENDERS * CALL_LINES)
#define MESSAGES (LINES + 16ull * (LINE_SETS + 2 * LINE_CHANNELS) * SENDERS * LL_LINES)
#define TABLE (MESSAGES + 16ull * SENDERS * SLOT_COUNT * MESSAGE_LINES)
#define DIRECT_COUNT (TABLE + 8ull * RANKS * REGISTRATIONS)
#define PROGRESS (DIRECT_COUNT + 8)
#define GUARD (PROGRESS + 8)

// Places in its extension.
#define LINES128 0
#define SLOTS (LINES128 + (u64)LINE_BYTES * CHANNELS * 2 * SENDERS * LL128_LINES)

// Records that call `number` has begun, or is over, for a host that asks: the first block's part of it. In memory of the
// device, since the end of a kernel waits for writes to the host's (0.1 us in a graph, 0.5 us between launches). By the
// last thread, which has nothing else to do in short calls.
__device__ __forceinline__ void count_at(const Team& team, u32 place, u32 number) {
    if (blockIdx.x == 0 && threadIdx.x == THREADS - 1) {
        *(volatile u32*)(team.window[team.rank] + PROGRESS + place) = number;
    }
}

__device__ __forceinline__ void count_started(const Team& team, u32 number) {
    count_at(team, 0, number);
}

__device__ __forceinline__ void count_finished(const Team& team, u32 number) {
    count_at(team, 4, number);
}

// Whether this call begins behind a wait that a failure has released (`cuda/hosts`): its input may not have come, and it
// must not reach the other ranks, who wait until they hear of the failure.
__device__ __forceinline__ bool was_cut_off(const Team& team) {
    if (!team.guarded || load_relaxed((const u32*)(team.window[team.rank] + GUARD)) == 0) return false;
    if (threadIdx.x == 0) store_relaxed(&team.report->cut, 1);
    return true;
}

// A rank's number among those that send to `to`, which are all others.
__device__ __forceinline__ u32 sender_of(u32 to, u32 from) {
    return RANKS == 2 ? 0 : from - (from > to);
}
