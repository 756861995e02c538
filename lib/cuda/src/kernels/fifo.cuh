// Protocol Simple: a FIFO of slots in the extension of the receiver's window for each (kind, channel, sender). The
// sender counts filled slots in the receiver's window (tail), the receiver counts freed ones in the sender's (head).
// All data of a slot is written before its tail: the subgroup's barrier, then a release at system scope. (NCCL:
// prims_simple.h)

#define TAIL 0
#define HEAD 1

__device__ __forceinline__ u32* flag_at(u8* window, u32 which, u32 kind, u32 channel, u32 peer) {
    const u64 index = (((u64)which * KINDS + kind) * CHANNELS + channel) * MAX_RANKS + peer;
    return (u32*)(window + FLAGS + FLAG_BYTES * index);
}

// Slots sent to (TAIL) or received from (HEAD) a peer before this call; private to this rank.
__device__ __forceinline__ u32* counter_at(u8* window, u32 which, u32 kind, u32 channel, u32 peer) {
    const u64 index = (((u64)which * KINDS + kind) * CHANNELS + channel) * MAX_RANKS + peer;
    return (u32*)(window + COUNTERS + 4 * index);
}

// How a channel's slots are cut: some for each kind of collectives and sender, or long ones, where a rank has one
// sender in a call. Between two ranks that is the same.
#define FOR_EACH 0
#define FOR_ONE (SENDERS > 1)
#define LONG_SLOT_BYTES ((u64)SLOT_BYTES * SLOT_KINDS * SENDERS)

// Of this block's channel. Between two ranks GATHER has no slots.
__device__ __forceinline__ u8* slot_at(const Team& team, u32 cut, u32 to, u32 kind, u32 from, u32 number) {
    u8* slots = team.extension[to] + SLOTS + LONG_SLOT_BYTES * SLOT_COUNT * blockIdx.x;
    const u32 turn = number % SLOT_COUNT;
    if (cut != FOR_EACH) return slots + LONG_SLOT_BYTES * turn;
    return slots + (u64)SLOT_BYTES * ((kind * SENDERS + sender_of(to, from)) * SLOT_COUNT + turn);
}

// False: given up.
__device__ __forceinline__ bool count_came(const Team& team, const u32* flag, u32 count, u32 what, u32 peer) {
    Wait wait = {0, 0, 0};
    u32 got;
    while ((int)((got = load_acquire(flag)) - count) < 0) {
        if (!keep_waiting(team, wait, what, peer, count, got)) return false;
    }
    return true;
}

// For a thread that waits and signals by itself: it signals nothing after it has given up.
__device__ __forceinline__ void await_count(const Team& team, const u32* flag, u32 count, u32 what, u32 peer) {
    if (!count_came(team, flag, count, what, peer)) end_thread();
}

// Slots of all ranks' blocks, as numbers that the block shares. `sent[SCATTER]` has for the rank itself how the slots
// are cut, the same on all ranks.
struct Counters {
    u32 sent[KINDS][MAX_RANKS];
    u32 received[KINDS][MAX_RANKS];
    u32 given_up; // by a thread of the block: what it has is worth nothing, and nobody is told of it
    u32 read;     // rounds whose part of the input the sending subgroup has read
};

__device__ __forceinline__ u32 cut_of(const Team& team, const Counters& counters) {
    return counters.sent[SCATTER][team.rank];
}

__device__ __forceinline__ void load_counters(const Team& team, Counters& counters) {
    u8* window = team.window[team.rank];
    if (threadIdx.x == 0) counters.given_up = counters.read = 0;
    for (u32 i = threadIdx.x; i < KINDS * RANKS; i += blockDim.x) {
        const u32 kind = i / RANKS, peer = i % RANKS;
        counters.sent[kind][peer] = *(volatile u32*)counter_at(window, TAIL, kind, blockIdx.x, peer);
        counters.received[kind][peer] = *(volatile u32*)counter_at(window, HEAD, kind, blockIdx.x, peer);
    }
    __syncthreads();
}

// A block's first use of slots in a call. Where they are cut otherwise than before, another sender's data may still be
// unread: the block waits until all ranks have begun this call, and so have ended those before.
__device__ __forceinline__ void begin_slots(const Team& team, const Channel& channel, Counters& counters, u32 cut) {
    load_counters(team, counters);
    if (cut_of(team, counters) == cut) return;
    const bool agree = all_agree(team, channel);
    if (threadIdx.x == 0) {
        counters.sent[SCATTER][team.rank] = cut;
        counters.given_up = !agree;
    }
    __syncthreads();
}

__device__ __forceinline__ void store_counters(const Team& team, const Counters& counters) {
    u8* window = team.window[team.rank];
    __syncthreads();
    for (u32 i = threadIdx.x; i < KINDS * RANKS; i += blockDim.x) {
        const u32 kind = i / RANKS, peer = i % RANKS;
        *(volatile u32*)counter_at(window, TAIL, kind, blockIdx.x, peer) = counters.sent[kind][peer];
        *(volatile u32*)counter_at(window, HEAD, kind, blockIdx.x, peer) = counters.received[kind][peer];
    }
}

// A free slot at `peer`, and one filled by `peer`. Called by one thread each; the subgroup's barrier comes after.
__device__ __forceinline__ void await_credit(const Team& team, Counters& counters, u32 kind, u32 peer) {
    const u32* head = flag_at(team.window[team.rank], HEAD, kind, blockIdx.x, peer);
    const u32 count = counters.sent[kind][peer] + 1 - SLOT_COUNT;
    if (!count_came(team, head, count, WAITED_CREDIT, peer)) *(volatile u32*)&counters.given_up = 1;
}

__device__ __forceinline__ void await_slot(const Team& team, Counters& counters, u32 kind, u32 peer) {
    const u32* tail = flag_at(team.window[team.rank], TAIL, kind, blockIdx.x, peer);
    const u32 count = counters.received[kind][peer] + 1;
    if (!count_came(team, tail, count, WAITED_SLOT, peer)) *(volatile u32*)&counters.given_up = 1;
}

__device__ __forceinline__ u8* outgoing(const Team& team, const Counters& counters, u32 kind, u32 peer) {
    return slot_at(team, cut_of(team, counters), peer, kind, team.rank, counters.sent[kind][peer]);
}

__device__ __forceinline__ const u8* incoming(const Team& team, const Counters& counters, u32 kind, u32 peer) {
    return slot_at(team, cut_of(team, counters), team.rank, kind, peer, counters.received[kind][peer]);
}

// After the subgroup's barrier, by one thread each. Threads of one warp wait for one fence together.
__device__ __forceinline__ void post_slot(const Team& team, Counters& counters, u32 kind, u32 peer) {
    const u32 count = ++counters.sent[kind][peer];
    if (*(volatile u32*)&counters.given_up) return;
    store_release(flag_at(team.window[peer], TAIL, kind, blockIdx.x, team.rank), count);
}

// Without a fence, which would also wait for the block's own writes to other ranks: whoever has stored or sent on what
// was in the slot has read it.
__device__ __forceinline__ void free_slot(const Team& team, Counters& counters, u32 kind, u32 peer) {
    const u32 count = ++counters.received[kind][peer];
    if (*(volatile u32*)&counters.given_up) return;
    store_relaxed(flag_at(team.window[peer], HEAD, kind, blockIdx.x, team.rank), count);
}

__device__ __forceinline__ Pack load_slot(const u8* slot, u64 index) {
    Pack pack;
    asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(pack.a), "=l"(pack.b) : "l"(slot + 16 * index) : "memory");
    return pack;
}

__device__ __forceinline__ void fill_slot(u8* slot, u64 index, Pack pack) {
    *(Pack*)(slot + 16 * index) = pack;
}

// This block's part of a buffer, in packs, cut into rounds of `parts` pieces that each fit a slot. There are several
// rounds, so that the steps of one overlap with those of the next, but none so short that the flags would cost more
// than the data.
struct Share {
    u64 first, last;
    u32 parts;
    u32 round; // packs of a round, but for the last
};

#define ROUNDS 4
#define LEAST_PIECE (4096 / (RANKS - 1))

__device__ __forceinline__ Share share_of(u64 bytes, u32 parts, u32 cut = FOR_EACH) {
    const u64 packs = (bytes + 15) / 16;
    Share share;
    share.first = border(packs, blockIdx.x, gridDim.x);
    share.last = border(packs, blockIdx.x + 1, gridDim.x);
    share.parts = parts;
    // For the largest part: the same for all blocks.
    u64 piece = (whole_lines((packs + gridDim.x - 1) / gridDim.x) + ROUNDS * parts - 1) / (ROUNDS * parts);
    piece = whole_lines(piece > LEAST_PIECE ? piece : LEAST_PIECE);
    const u64 most = (cut == FOR_EACH ? SLOT_BYTES : LONG_SLOT_BYTES) / 16;
    if (piece > most) piece = most;
    share.round = (u32)piece * parts;
    return share;
}

__device__ __forceinline__ u32 rounds_of(const Share& share) {
    return (u32)((share.last - share.first + share.round - 1) / share.round);
}

struct Piece {
    u64 first;
    u32 packs;
};

__device__ __forceinline__ Piece piece_of(const Share& share, u32 round, u32 part) {
    const u64 base = share.first + (u64)round * share.round;
    const u64 here = share.last - base < share.round ? share.last - base : share.round;
    Piece piece;
    const u64 begin = border(here, part, share.parts);
    piece.first = base + begin;
    piece.packs = (u32)(border(here, part + 1, share.parts) - begin);
    return piece;
}

// The initial state of a subgroup in a kernel of rounds.
struct Rounds {
    Share share;
    u32 count;
    Subgroup group;
    u32 peer;     // the rank that this thread speaks to
    bool speaker; // whether it speaks
};

__device__ __forceinline__ Rounds begin_rounds(const Team& team, const Channel& channel, Counters& counters, const Subgroup& group,
                                               u64 bytes, u32 parts, u32 cut = FOR_EACH) {
    begin_slots(team, channel, counters, cut);
    Rounds rounds;
    rounds.share = share_of(bytes, parts, cut);
    rounds.count = rounds_of(rounds.share);
    rounds.group = group;
    // In one warp: see post_slot.
    rounds.peer = group.thread;
    rounds.speaker = rounds.peer < RANKS && rounds.peer != team.rank;
    return rounds;
}

// One step of a round: speakers wait, all threads of the subgroup work, speakers signal the other ranks.
template <typename Await, typename Work, typename Tell>
__device__ __forceinline__ void in_turn(const Rounds& rounds, Await await, Work work, Tell tell) {
    if (rounds.speaker) await(rounds.peer);
    sync_subgroup(rounds.group);
    work();
    sync_subgroup(rounds.group);
    if (rounds.speaker) tell(rounds.peer);
}

// Input and output may be the same buffer: a subgroup that writes a round's part of it waits for the subgroup that
// sends that part. All threads of the sending subgroup call the first after a round; any thread calls the second.
__device__ __forceinline__ void tell_read(const Rounds& rounds, Counters& counters, u32 step) {
    if (rounds.group.thread == 0) atomicExch(&counters.read, step + 1);
}

__device__ __forceinline__ void await_read(Counters& counters, u32 step) {
    while (atomicAdd(&counters.read, 0u) <= step) {}
}

// Slots to and from a user's buffer.
__device__ __forceinline__ void fill_from(const Subgroup& group, u8* slot, const u8* base, const Piece& piece, u64 bytes) {
    either(is_whole(base, piece.first + piece.packs, bytes), [&](auto whole) {
        for_packs<batch_of<decltype(whole)>(1)>(
            group, piece.packs, [&](u32 i) { return load_pack(whole, base, piece.first + i, bytes); },
            [&](u32 i, Pack pack) { fill_slot(slot, i, pack); });
    });
}

__device__ __forceinline__ void store_from(const Subgroup& group, u8* base, const Piece& piece, u64 bytes, const u8* slot) {
    either(is_whole(base, piece.first + piece.packs, bytes), [&](auto whole) {
        for_packs<batch_of<decltype(whole)>(1)>(
            group, piece.packs, [&](u32 i) { return load_slot(slot, i); },
            [&](u32 i, Pack pack) { store_pack(whole, base, piece.first + i, bytes, pack); });
    });
}
