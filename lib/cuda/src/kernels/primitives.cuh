// NCCL's primitives (send, recv, copy, recv_reduce_copy, recv_copy_send, ...) for schedules: received data is read
// once, combined with our own operand, and stored and forwarded from the registers. (NCCL: src/device/primitives.h)
//
// A block runs one channel of the schedule. Each lane of the channel is run by a subgroup: the whole block, or a half
// of it.

#define MAX_LANES 2
#define MAX_STEPS 96
#define NOBODY 255
#define STEP_READS 1
#define STEP_WRITES 2
#define STEP_LAST 4
#define STEP_LOCAL 8

// These three as in cuda/peer/program.rs.
struct __align__(8) Step {
    u8 flags; // STEP_*
    u8 from;  // rank or NOBODY
    u8 to;
    u8 src; // buffer in the upper two bits (0 input, 1 output, 2 scratch), segment below
    u8 dst;
    u8 part; // of the channel's
    u8 span;
    u8 unused;
};

struct Program {
    Step steps[MAX_STEPS];
    unsigned short lanes[2][MAX_LANES][2]; // for even and odd channels: first step and end
    u32 lane_count[2];
    u32 parts; // of a channel
    u32 sources; // ranks at most of which one rank receives in a channel
};

// How segments of `count` elements are cut into windows and parts, in units of several elements.
// (schedule/partition.rs)
struct Cut {
    u64 count, windows, unit, base, extra;
    u64 large[2]; // of the first `extra` windows: units of each part, and how many parts have one more
    u64 small[2];
    u64 scratch; // elements of a segment of scratch memory
    u64 elem;
    u64 shares; // LL128: not 0 where messages take shares of the lines
};

struct Range {
    u64 first, count; // elements
};

__device__ __forceinline__ u64 least(u64 a, u64 b) {
    return a < b ? a : b;
}

__device__ __forceinline__ u64 units_before(const u64 (&cut)[2], u64 part) {
    return part * cut[0] + least(part, cut[1]);
}

__device__ __forceinline__ Range part_of(const Cut& cut, u64 window, u32 part, u32 span) {
    const u64 start = window * cut.base + least(window, cut.extra);
    const bool large = window < cut.extra;
    const u64 first = large ? units_before(cut.large, part) : units_before(cut.small, part);
    const u64 end = large ? units_before(cut.large, part + span) : units_before(cut.small, part + span);
    Range range;
    range.first = least((start + first) * cut.unit, cut.count);
    range.count = least((start + end) * cut.unit, cut.count) - range.first;
    return range;
}

// In scratch memory a part lies where it does in the largest window.
__device__ __forceinline__ u64 scratch_start(const Cut& cut, u32 part) {
    return least((cut.extra ? units_before(cut.large, part) : units_before(cut.small, part)) * cut.unit, cut.count);
}

struct Buffers {
    const u8* input;
    u8* output;
    u8* scratch;
};

__device__ __forceinline__ u8* address_of(const Buffers& buffers, const Cut& cut, u8 place, const Range& range, u32 part) {
    const u32 buffer = place >> 6;
    const u64 segment = place & 63;
    if (buffer == 2) return buffers.scratch + (segment * cut.scratch + scratch_start(cut, part)) * cut.elem;
    u8* base = buffer == 0 ? (u8*)buffers.input : buffers.output;
    return base + (segment * cut.count + range.first) * cut.elem;
}

// One step in one window, as addresses. Missing operands are null.
struct Move {
    const u8* in;    // a filled slot; a local reduction: our own memory
    const u8* own;
    u8* dst;
    u8* out; // a free slot
    u32 bytes;
    bool last;
    bool from_input; // `own` is
};

#ifdef DTYPE

#ifdef IS_FLOAT
__device__ __forceinline__ bool is_negative(Stored x) {
#if DTYPE == 0
    return __float_as_int(x) < 0;
#elif DTYPE == 1
    return __double_as_longlong(x) < 0;
#else
    return x >> (8 * sizeof(Stored) - 1);
#endif
}
#endif

// `own op received`, rounded to the stored type at every step, as on the CPU: bit for bit.
__device__ __forceinline__ Stored pairwise(Stored own, Stored received, bool last) {
#if EXACT
    static_assert(RANKS == 2, "a partial sum of more ranks would be rounded");
    const Stored both[2] = {own, received};
    return exact(both);
#else
    const Acc a = widen(own), b = widen(received);
#if defined(IS_FLOAT) && (OP == 2 || OP == 3)
    // -0 is below +0.
    if (a == b) return is_negative(own) == (OP == 2) ? own : received;
#endif
    const Stored one = narrow(combine(a, b));
#if OP == 4 && !SCALES
    if (last) return narrow(widen(one) / (Acc)RANKS);
#endif
    return one;
#endif
}

// Our own operand, scaled where it comes from the input and the call scales that.
__device__ __forceinline__ u64 own_word(u64 word, const Move& move) {
#if SCALES
    if (!move.from_input) return word;
    Elements x;
    x.word = word;
#pragma unroll
    for (int e = 0; e < (int)PER_WORD; e++) x.of[e] = operand(x.of[e]);
    return x.word;
#else
    return word;
#endif
}

__device__ __forceinline__ u64 pairwise_word(u64 own, u64 received, bool last) {
    Elements a, b, out;
    a.word = own;
    b.word = received;
#pragma unroll
    for (int e = 0; e < (int)PER_WORD; e++) out.of[e] = pairwise(a.of[e], b.of[e], last);
    return out.word;
}

#else

// A schedule that only moves data has no such step.
__device__ __forceinline__ u64 pairwise_word(u64 own, u64, bool) {
    return own;
}

__device__ __forceinline__ u64 own_word(u64 word, const Move&) {
    return word;
}

#define SCALES 0
#endif

__device__ __forceinline__ Pack pairwise_pack(const Pack& own, const Pack& received, bool last) {
    return Pack{pairwise_word(own.a, received.a, last), pairwise_word(own.b, received.b, last)};
}

__device__ __forceinline__ Pack own_pack(const Pack& pack, const Move& move) {
    return Pack{own_word(pack.a, move), own_word(pack.b, move)};
}

// IN: an incoming operand. OWN: our own operand. LOCAL: the incoming operand is in our memory. If both exist, they are
// combined.
template <bool IN, bool OWN> __device__ __forceinline__ Pack result_of(const Pack& loaded, const Pack& in, const Move& move) {
    if (!OWN) return in;
    const Pack own = own_pack(loaded, move);
    return IN ? pairwise_pack(own, in, move.last) : own;
}

template <bool IN, bool OWN, bool LOCAL>
__device__ __forceinline__ void move_packs(const Subgroup& group, const Move& move) {
    const u32 packs = move.bytes / 16;
    const u64 addresses = (u64)move.dst | (OWN ? (u64)move.own : 0) | (LOCAL ? (u64)move.in : 0);
    either((addresses & 15) == 0, [&](auto whole) {
        constexpr u32 BATCH = decltype(whole)::yes ? 4 : 1;
        const auto load_in = [&](u32 i) { return LOCAL ? load_pack(whole, move.in, i, move.bytes) : load_slot(move.in, i); };
        const auto store = [&](u32 i, const Pack& pack) {
            if (move.dst) store_pack(whole, move.dst, i, move.bytes, pack);
            if (move.out) fill_slot(move.out, i, pack);
        };
        // All loads of a batch are under way before its first store.
        for (u32 i = group.thread; i < packs; i += BATCH * group.threads) {
            Pack in[BATCH], own[BATCH];
#pragma unroll
            for (u32 k = 0; k < BATCH; k++) {
                if (i + k * group.threads >= packs) break;
                if (IN) in[k] = load_in(i + k * group.threads);
                if (OWN) own[k] = load_pack(whole, move.own, i + k * group.threads, move.bytes);
            }
#pragma unroll
            for (u32 k = 0; k < BATCH; k++) {
                if (i + k * group.threads >= packs) break;
                store(i + k * group.threads, result_of<IN, OWN>(own[k], in[k], move));
            }
        }
    });
    // A last pack that is not whole.
    if ((move.bytes & 15) != 0 && group.thread == packs % group.threads) {
        Pack in, own;
        if (IN) in = LOCAL ? load_odd_pack(move.in, packs, move.bytes) : load_slot(move.in, packs);
        if (OWN) own = load_odd_pack(move.own, packs, move.bytes);
        const Pack pack = result_of<IN, OWN>(own, in, move);
        if (move.dst) store_odd_pack(move.dst, packs, move.bytes, pack);
        if (move.out) fill_slot(move.out, packs, pack);
    }
}

// As keep_waiting of team.cuh, but sometimes checks that the peer is in the same call: ranks that differ may wait for
// messages that never arrive.
__device__ __noinline__ bool wait_on(const Team& team, const Channel& channel, Wait& wait, u32 kind, u32 peer, u32 expected, u32 got) {
    if (!keep_waiting(team, wait, kind, peer, expected, got)) return false;
    if ((wait.turns & 255) != 0) return true;
    u64 theirs;
    if (!peek_line(call_line_at(team, channel, team.rank, peer, HELLO), channel.epoch, theirs)) return true;
    if (theirs == team.call) return true;
    give_up(team, MISMATCH, peer, 0, 0, theirs);
    return false;
}

// Protocol Simple: a slot in, a slot out.

// As await_count of fifo.cuh; false when it gave up.
__device__ __forceinline__ bool count_came(const Team& team, const Channel& channel, const u32* flag, u32 count, u32 what, u32 peer) {
    Wait wait = {0, 0, 0};
    u32 got;
    while ((int)((got = load_acquire(flag)) - count) < 0) {
        if (!wait_on(team, channel, wait, what, peer, count, got)) return false;
    }
    return true;
}

__device__ __forceinline__ bool slot_came(const Team& team, const Channel& channel, const Counters& counters, u32 peer) {
    const u32* tail = flag_at(team.window[team.rank], TAIL, SCATTER, blockIdx.x, peer);
    return count_came(team, channel, tail, counters.received[SCATTER][peer] + 1, WAITED_SLOT, peer);
}

__device__ __forceinline__ bool credit_came(const Team& team, const Channel& channel, const Counters& counters, u32 peer) {
    const u32* head = flag_at(team.window[team.rank], HEAD, SCATTER, blockIdx.x, peer);
    return count_came(team, channel, head, counters.sent[SCATTER][peer] + 1 - SLOT_COUNT, WAITED_CREDIT, peer);
}

// Waiting and posting is for one thread per direction, in warps of their own. `stopped` is the subgroup's, and shared
// by its threads. False: given up.
__device__ __forceinline__ bool move_slots(const Team& team, const Channel& channel, Counters& counters, const Subgroup& group,
                                           const Step& step, Move move, volatile u32& stopped) {
    const bool receives = step.from != NOBODY, sends = step.to != NOBODY;
    const bool hears = receives && group.thread == 0, speaks = sends && group.thread == 32;
    if (receives || sends) {
        if (hears && !slot_came(team, channel, counters, step.from)) stopped = 1;
        if (speaks && !credit_came(team, channel, counters, step.to)) stopped = 1;
        sync_subgroup(group);
        if (stopped) return false;
        if (receives) move.in = incoming(team, counters, SCATTER, step.from);
        if (sends) move.out = outgoing(team, counters, SCATTER, step.to);
    }
#ifdef DTYPE
    if (receives && move.own) move_packs<true, true, false>(group, move);
    else if (step.flags & STEP_LOCAL) move_packs<true, true, true>(group, move);
    else
#endif
    if (receives) move_packs<true, false, false>(group, move);
    else move_packs<false, true, false>(group, move);
    sync_subgroup(group);
    if (hears) free_slot(team, counters, SCATTER, step.from);
    if (speaks) post_slot(team, counters, SCATTER, step.to);
    return true;
}

// Protocol LL: each message has lines of its own, behind those of the sender's message before. They were free when the
// call began (ll.cuh), so no sender waits.
struct LineCounts {
    u32 sent[RANKS];
    u32 received[RANKS];
};

__device__ __forceinline__ u32 take_lines(u32 (&counts)[RANKS], u32 peer, u32 words) {
    u32 first = 0;
#pragma unroll
    for (u32 s = 0; s < RANKS; s++) {
        if (s == peer) {
            first = counts[s];
            counts[s] += words;
        }
    }
    return first;
}

// After one failed wait the others return at once, with undefined words.
__device__ __forceinline__ u64 word_of(const Team& team, const Channel& channel, const u8* line, u32 peer) {
    Wait wait = {0, 0, 0};
    u64 word;
    while (!peek_line(line, channel.epoch, word)) {
        if (!wait_on(team, channel, wait, WAITED_LINE, peer, channel.epoch, 0)) break;
    }
    return word;
}

__device__ __forceinline__ void move_lines(const Team& team, const Channel& channel, LineCounts& counts, const Subgroup& group,
                                           const Step& step, const Move& move) {
    const bool receives = step.from != NOBODY, sends = step.to != NOBODY, local = step.flags & STEP_LOCAL;
    const u32 words = (move.bytes + 7) / 8;
    const u8* in = nullptr;
    u8* out = nullptr;
    if (receives) in = line_at(team, channel, team.rank, step.from, take_lines(counts.received, step.from, words));
    if (sends) out = line_at(team, channel, step.to, team.rank, take_lines(counts.sent, step.to, words));
    for (u32 i = group.thread; i < words; i += group.threads) {
        u64 word = 0;
        if (move.own) word = own_word(load_word(move.own, i, move.bytes), move);
        if (local) word = pairwise_word(word, load_word(move.in, i, move.bytes), move.last);
        if (receives) {
            const u64 came = word_of(team, channel, in + 16 * i, step.from);
            word = move.own ? pairwise_word(word, came, move.last) : came;
        }
        if (sends) push_line(out + 16 * i, word, channel.epoch);
        if (move.dst) store_word(move.dst, i, move.bytes, word);
    }
    // The next step may read what another thread wrote.
    sync_subgroup(group);
}

// Protocol LL128, of whole warps: each message has lines of its own, as in LL. Where that is too much, a FIFO's
// messages take turns through SLOT_COUNT shares of its lines; a sender reuses a share when the receiver has read it.
// For the counters each such message is a slot. A rank that receives from one other only has the lines of all senders
// for it: in this set nobody else writes in this call, and nobody reads lines of another.

// The first cells of a message, and its flags, at both ends of this rank.
struct Lines128 {
    u32 sent, received;
    u64 sent_flag, received_flag;
};

__device__ __forceinline__ u8* cells_of(const Team& team, const Channel& channel, u32 sources, u32 to, u32 from, u32 first) {
    const u64 row = (u64)channel.row_128 * SENDERS + (sources == 1 ? 0 : sender_of(to, from));
    return team.extension[to] + LINES128 + 16 * (row * Ll128::MOST + first);
}

// Cells of a share.
__device__ __forceinline__ u32 share_cells(u32 sources) {
    return (sources == 1 ? SENDERS : 1) * LL128_LINES / SLOT_COUNT / 8 * 8 * 8;
}

// As word_of; false, for the whole warp: given up.
__device__ __forceinline__ bool pack_came(const Team& team, const Channel& channel, const u8* at, u32 cell, u64 flag, u32 peer, Pack& pack) {
    Wait wait = {0, 0, 0};
    while (!Ll128::peek_at(at, cell, flag, pack)) {
        const bool goes_on = wait_on(team, channel, wait, WAITED_LINE, peer, channel.epoch, 0);
        if (!Ll128::all_say(goes_on)) return false;
    }
    return true;
}

// False: given up.
__device__ __forceinline__ bool move_lines_128(const Team& team, const Channel& channel, const Subgroup& group, const Step& step,
                                               const Move& move, u32 sources, const Lines128& lines) {
    const bool receives = step.from != NOBODY, sends = step.to != NOBODY, local = step.flags & STEP_LOCAL;
    const Words words = {0, (move.bytes + 7) / 8, move.bytes};
    const u8* in = nullptr;
    u8* out = nullptr;
    if (receives) in = cells_of(team, channel, sources, team.rank, step.from, lines.received);
    if (sends) out = cells_of(team, channel, sources, step.to, team.rank, lines.sent);
    const u32 cells = Ll128::cells(words);
    bool given_up = false;
    for (u32 cell = group.thread; cell < cells; cell += group.threads) {
        Pack own = {0, 0}, came;
        if (move.own) own = own_pack(Ll128::load(move.own, words, cell), move);
        if (local) came = Ll128::load(move.in, words, cell);
        if (receives && !pack_came(team, channel, in + 16 * cell, cell, lines.received_flag, step.from, came)) {
            given_up = true;
            break;
        }
        const Pack pack = !receives && !local ? own : move.own ? pairwise_pack(own, came, move.last) : came;
        if (sends) Ll128::push_at(out + 16 * cell, cell, lines.sent_flag, pack);
        if (move.dst) Ll128::store(move.dst, words, cell, pack);
    }
    // The next step may read what another thread wrote.
    return !sync_subgroup_or(group, given_up);
}
