// One-sided messages. A rank's signals are counts in its memory: per rank those that came from it, written by that rank
// alone; then, for our kernels alone, those sent to it, those published to it, and those waited for.
#define SENT RANKS
#define PUBLISHED (2 * RANKS)
#define TAKEN (3 * RANKS)

// How many signals of each rank are awaited; 0: none.
struct Awaited {
    u32 of[MAX_RANKS];
};

#ifdef KERNEL_signal
// One more signal to rank `root`: `input` is our memory of signals, `output` that rank's. Copies before it in the
// stream have arrived.
extern "C" __global__ void signal(const __grid_constant__ Args args) {
    await_kernel_before();
    if (threadIdx.x != 0) return;
    u32* own = (u32*)args.input;
    u32* published = own + PUBLISHED + args.root;
    // Signals of two streams: the later one's count is the greater, and must be written later. The earlier one runs and
    // waits for nobody.
    const u32 before = atomicAdd(own + SENT + args.root, 1u);
    while (load_acquire(published) != before) {}
    __threadfence_system();
    store_release((u32*)args.output + args.team.rank, before + 1);
    store_release(published, before + 1);
}
#endif

#ifdef KERNEL_signal_wait
// Waits for so many more signals of each rank.
extern "C" __global__ void signal_wait(const __grid_constant__ Args args, const __grid_constant__ Awaited awaited) {
    await_kernel_before();
    const u32 peer = threadIdx.x;
    if (peer >= RANKS || awaited.of[peer] == 0) return;
    u32* own = (u32*)args.output;
    const u32 goal = atomicAdd(own + TAKEN + peer, awaited.of[peer]) + awaited.of[peer];
    Wait wait{};
    u32 got = load_acquire(own + peer);
    while ((int)(got - goal) < 0) {
        if (!keep_waiting(args.team, wait, WAITED_SIGNAL, peer, goal, got)) return;
        got = load_acquire(own + peer);
    }
}
#endif
