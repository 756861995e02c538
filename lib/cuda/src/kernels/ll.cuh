// Protocol LL (low latency): every 8 bytes travel with their flags, in a line of 16 bytes of which each half arrives as
// a whole. The receiver needs neither a fence nor a second message; half of the sent bytes are flags. (NCCL:
// prims_ll.h)
//
// Two sets of lines are used in turn. A rank that has finished call k has received a line of call k from every rank, so
// all have finished call k-1: writing into the set of call k+1, which is that of k-1, overwrites nothing unread. Hence
// each kernel sends at least the hello line to everyone and waits for everyone's.
//
// A fused kernel runs TOGETHER calls of one block at the same time. Lines of such calls, and those about calls, have
// LINE_SETS. Whoever sends call k has finished call k-TOGETHER, and so received a line of it from all ranks, who had
// then finished call k-2*TOGETHER: the one before in the same set. A call with two sets runs when all before it are
// finished, and none behind it before it is.
#define TOGETHER (LINE_SETS / 2)

// Lines about the call itself.
#define HELLO 0

// A block's part of a call: its sets, which depend on its number and the call's blocks alone, equal on all ranks, and
// the threads that take it.
struct Channel {
    u32 epoch;
    u32 thread; // this one's number among them
    u32 threads;
    u32 row;       // of lines
    u32 row_128;   // of lines of LL128
    u32 row_calls; // of lines about calls
};

// In the call after so many of this block. Rows of calls of one block come first.
__device__ __forceinline__ Channel channel_after(u32 finished, u32 blocks) {
    const u32 epoch = finished + 1, of_two = blockIdx.x * 2 + epoch % 2;
    return Channel{epoch, threadIdx.x, THREADS, blocks == 1 ? epoch % LINE_SETS : LINE_SETS + of_two, of_two,
                   blockIdx.x * LINE_SETS + epoch % LINE_SETS};
}

__device__ __forceinline__ u8* line_at(const Team& team, const Channel& channel, u32 to, u32 from, u32 line) {
    return team.window[to] + LINES + 16 * (((u64)channel.row * SENDERS + sender_of(to, from)) * LL_LINES + line);
}

__device__ __forceinline__ u8* call_line_at(const Team& team, const Channel& channel, u32 to, u32 from, u32 line) {
    return team.window[to] + CALLS + 16 * (((u64)channel.row_calls * SENDERS + sender_of(to, from)) * CALL_LINES + line);
}

__device__ __forceinline__ void push_line(u8* to, u64 data, u32 flag) {
    const u64 f = (u64)flag << 32;
    const u64 low = (data & 0xffffffffu) | f;
    const u64 high = (data >> 32) | f;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" : : "l"(to), "l"(low), "l"(high) : "memory");
}

// A line as it is now.
__device__ __forceinline__ Pack look_at(const u8* from) {
    Pack line;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(line.a), "=l"(line.b) : "l"(from) : "memory");
    return line;
}

// Its data, and whether both its halves have this flag.
__device__ __forceinline__ bool has_come(const Pack& line, u32 flag, u64& data) {
    data = (line.a & 0xffffffffu) | (line.b << 32);
    return (u32)(line.a >> 32) == flag && (u32)(line.b >> 32) == flag;
}

__device__ __forceinline__ bool peek_line(const u8* from, u32 flag, u64& data) {
    return has_come(look_at(from), flag, data);
}

// False: given up, and `data` is undefined.
__device__ __forceinline__ bool line_came(const Team& team, const u8* from, u32 flag, u32 peer, u64& data) {
    Wait wait = {0, 0, 0};
    while (!peek_line(from, flag, data)) {
        if (!keep_waiting(team, wait, WAITED_LINE, peer, flag, 0)) return false;
    }
    return true;
}

// A thread that has given up forwards nothing.
__device__ __forceinline__ u64 await_line(const Team& team, const u8* from, u32 flag, u32 peer) {
    u64 data;
    if (!line_came(team, from, flag, peer, data)) end_thread();
    return data;
}

// Words of a buffer of `bytes`.
struct Words {
    u64 first;
    u32 count;
    u64 bytes;
};

// Those that this block handles, one of so many.
__device__ __forceinline__ Words words_of_block(u64 bytes, u32 blocks = gridDim.x) {
    const u64 words = (bytes + 7) / 8;
    const u64 first = words * blockIdx.x / blocks;
    return Words{first, (u32)(words * (blockIdx.x + 1) / blocks - first), bytes};
}

// Segment `index` of so many.
__device__ __forceinline__ Words segment_of(const Words& all, u32 index, u32 segments) {
    const u32 begin = all.count * index / segments, end = all.count * (index + 1) / segments;
    return Words{all.first + begin, end - begin, all.bytes};
}

__device__ __forceinline__ Words longest_segment(const Words& all, u32 segments) {
    return Words{all.first, (all.count + segments - 1) / segments, all.bytes};
}

// The interface of a protocol for kernels in lines. A *cell* is the unit that a thread sends, receives and stores: here
// a word. LL128 (ll128.cuh) has the same functions.
struct Ll {
    typedef u64 Cell;
    static constexpr u32 MOST = LL_LINES;

    static __device__ __forceinline__ u32 cells(const Words& words) { return words.count; }

    static __device__ __forceinline__ u64 load(const u8* base, const Words& words, u32 cell) {
        return load_word(base, words.first + cell, words.bytes);
    }

    static __device__ __forceinline__ void store(u8* base, const Words& words, u32 cell, u64 word) {
        store_word(base, words.first + cell, words.bytes, word);
    }

    static __device__ __forceinline__ void push(const Team& team, const Channel& channel, u32 peer, u32 cell, u64 word) {
        push_line(line_at(team, channel, peer, team.rank, cell), word, channel.epoch);
    }

    static __device__ __forceinline__ u64 await(const Team& team, const Channel& channel, u32 peer, u32 cell) {
        return await_line(team, line_at(team, channel, team.rank, peer, cell), channel.epoch, peer);
    }

    // The line of a cell as it is now, and whether the cell has come with it.
    static __device__ __forceinline__ Pack look(const Team& team, const Channel& channel, u32 peer, u32 cell) {
        return look_at(line_at(team, channel, team.rank, peer, cell));
    }

    static __device__ __forceinline__ bool came(const Channel& channel, u32 cell, const Pack& line, u64& word) {
        return has_come(line, channel.epoch, word);
    }

    // The answer of all threads that share lines with this one.
    static __device__ __forceinline__ bool all_say(bool yes) { return yes; }
};

__device__ __forceinline__ u32 next_rank(u32 rank, u32 distance) {
    const u32 next = rank + distance;
    return next < RANKS ? next : next - RANKS;
}

// The same cell of all ranks at once: their loads are in flight together, because no load waits for an earlier store or
// load. `each` says whether there is a cell for a rank; LL128 needs the same answer for a whole warp.

template <typename Lines, typename Each, typename Load>
__device__ __forceinline__ void push_cells(const Team& team, const Channel& channel, u32 cell, Each each, Load load) {
    typename Lines::Cell out[RANKS];
#pragma unroll
    for (u32 distance = 1; distance < RANKS; distance++) {
        const u32 peer = next_rank(team.rank, distance);
        if (each(peer)) out[distance] = load(peer);
    }
#pragma unroll
    for (u32 distance = 1; distance < RANKS; distance++) {
        const u32 peer = next_rank(team.rank, distance);
        if (each(peer)) Lines::push(team, channel, peer, cell, out[distance]);
    }
}

// `all` keeps what it has for the others. A thread that has given up ends, and forwards nothing.
template <typename Lines, typename Each>
__device__ __forceinline__ void await_cells(const Team& team, const Channel& channel, u32 cell,
                                            typename Lines::Cell (&all)[RANKS], Each each) {
    u32 missing = 0;
#pragma unroll
    for (u32 s = 0; s < RANKS; s++) missing |= (u32)each(s) << s;
    Wait wait = {0, 0, 0};
    while (missing != 0) {
        const u32 before = missing;
        Pack lines[RANKS];
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if (missing >> s & 1) lines[s] = Lines::look(team, channel, s, cell);
        }
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if ((missing >> s & 1) && Lines::came(channel, cell, lines[s], all[s])) missing &= ~(1u << s);
        }
        if (missing == 0) break;
        if (missing != before) wait.turns = 0;
        const bool goes_on = keep_waiting(team, wait, WAITED_LINE, __ffs(missing) - 1, channel.epoch, 0);
        if (!Lines::all_say(goes_on)) end_thread();
    }
}

// Of all ranks; ours is `mine`.
template <typename Lines>
__device__ __forceinline__ void await_all(const Team& team, const Channel& channel, u32 cell, typename Lines::Cell mine,
                                          typename Lines::Cell (&all)[RANKS]) {
#pragma unroll
    for (int s = 0; s < RANKS; s++) all[s] = mine;
    await_cells<Lines>(team, channel, cell, all, [&](u32 s) { return s != team.rank; });
}

// The segments of `output` that other ranks have reduced, in the cells from `begin` on. `from` says which ranks.
template <typename Lines, typename From, typename Segment>
__device__ __forceinline__ void take_segments(const Team& team, const Channel& channel, u8* output, u32 begin, u32 most,
                                              From from, Segment segment) {
    for (u32 cell = threadIdx.x; cell < most; cell += THREADS) {
        typename Lines::Cell all[RANKS];
        const auto comes = [&](u32 peer) { return from(peer) && cell < Lines::cells(segment(peer)); };
        await_cells<Lines>(team, channel, begin + cell, all, comes);
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if (comes(s)) Lines::store(output, segment(s), cell, all[s]);
        }
    }
}

// Calls that this block has finished.
__device__ __forceinline__ volatile u32* epoch_of(const Team& team) {
    return (volatile u32*)(team.window[team.rank] + EPOCHS + 4 * blockIdx.x);
}

// Starts this block's part of a call: sends the description of the call to all other ranks.
__device__ __forceinline__ void greet(const Team& team, const Channel& channel) {
    const u32 peer = channel.thread;
    if (peer < RANKS && peer != team.rank) {
        push_line(call_line_at(team, channel, peer, team.rank, HELLO), team.call, channel.epoch);
    }
}

__device__ __forceinline__ Channel enter(const Team& team) {
    await_kernel_before();
    if (was_cut_off(team)) end_thread();
    const Channel channel = channel_after(*epoch_of(team), gridDim.x);
    greet(team, channel);
    count_started(team, team.number);
    return channel;
}

// False: the rank did not arrive, or it makes another call.
__device__ __forceinline__ bool means_the_same(const Team& team, const Channel& channel, u32 peer) {
    u64 theirs;
    if (!line_came(team, call_line_at(team, channel, team.rank, peer, HELLO), channel.epoch, peer, theirs)) return false;
    if (theirs == team.call) return true;
    give_up(team, MISMATCH, peer, 0, 0, theirs);
    return false;
}

__device__ __forceinline__ void close(const Team& team, const Channel& channel) {
    __syncthreads();
    if (threadIdx.x == 0) *epoch_of(team) = channel.epoch;
    count_finished(team, team.number);
}

// All ranks have started this call, too, and make the same. False, for the whole block: they do not.
__device__ __forceinline__ bool all_agree(const Team& team, const Channel& channel) {
    const u32 peer = channel.thread;
    const bool other = peer < RANKS && peer != team.rank;
    return __syncthreads_and(!other || means_the_same(team, channel, peer));
}

__device__ __forceinline__ void leave(const Team& team, const Channel& channel) {
    all_agree(team, channel);
    if (threadIdx.x == 0) *epoch_of(team) = channel.epoch;
    count_finished(team, team.number);
}

// A kernel that is one call in lines; `part` is a block's part of it.
template <void (*part)(const Args&, const Channel&, const Words&)>
__device__ __forceinline__ void one_call(const Args& args) {
    const Channel channel = enter(args.team);
    part(args, channel, words_of_block(args.bytes));
    leave(args.team, channel);
}
