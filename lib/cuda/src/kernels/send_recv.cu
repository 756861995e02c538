// Point to point: the first blocks send, the next receive, the others copy this rank's own segment. There may be none
// of a kind. A block is the channel of its number among its kind. Only the two ranks of a message take part: no hello.
//
// A short message travels in lines, so no fence stands before its arrival. Its blocks take turns in pieces of a word
// for each thread, and each counts it as one slot. Whether it is short depends on the length alone, so that both ends
// know. The length of every message is in a line of each of its channels, too; the receiver compares it with its own.
//
// A message may go straight into the receiver's buffer. The receiver then sends the buffer's name, or that it is not
// registered, in a separate line after the flag that it writes in the sender's window, and the length after the other
// flag. The number of the message's first slot marks the lines, and the message counts as one slot.

struct Message {
    u8* at;
    u64 bytes;
    u64 remote;   // the receiver's buffer, as in `Remote`
    u32 peer;
    u32 channels;
    u32 direct;   // whether the receiver names its buffer: of the length alone, so that both ends know
    u32 unused;
};

// A copy within the device.
struct Own {
    const u8* from;
    u8* to;
    u64 bytes;
    u32 blocks;
    u32 unused;
};

struct Messages {
    Message to;
    Message from;
    Own own;
};

// Half of the channels carry messages, so each slot is two: the cost of a slot (a barrier, a fence, a flag) is paid
// half as often.
#define PAIR_SLOT_BYTES (2ull * SLOT_BYTES)
#define PAIR_PIECE (PAIR_SLOT_BYTES / 16)

// Of a message that has several: sender and receiver then work at the same time.
#define LEAST_PAIR_PIECE 4096

__device__ __forceinline__ u8* pair_slot_at(const Team& team, u32 to, u32 channel, u32 from, u32 number) {
    const u64 index = ((u64)channel * SENDERS + sender_of(to, from)) * SLOT_COUNT + number % SLOT_COUNT;
    return team.extension[to] + SLOTS + LONG_SLOT_BYTES * SLOT_COUNT * CHANNELS + PAIR_SLOT_BYTES * index;
}

// Line `line` of message `number` of a channel from a rank; the last are those of the length, by channel.
//
// A set of lines is that of every SLOT_COUNT-th number. The sender's block writes into it when the receiver's block has
// freed the message before in the same set, which it does after all its threads have read their lines: nothing unread
// is overwritten. A line that is left from an earlier message has that one's number. A word's channel is the same in
// all messages: they have one for each piece, or all that there are.
__device__ __forceinline__ u8* message_line_at(const Team& team, u32 to, u32 from, u32 number, u32 line) {
    const u64 set = (u64)sender_of(to, from) * SLOT_COUNT + number % SLOT_COUNT;
    return team.window[to] + MESSAGES + 16 * (set * MESSAGE_LINES + line);
}

__device__ __forceinline__ void push_length(const Team& team, const Message& message, u32 channel, u32 number) {
    push_line(message_line_at(team, message.peer, team.rank, number, MESSAGE_WORDS + channel), message.bytes, number + 1);
}

#define COUNT_MASK 0xffffffffffull

// Whether both ends mean the same message.
__device__ __forceinline__ bool agree(const Team& team, const Message& message, u64 theirs) {
    if (theirs == message.bytes) return true;
    const u64 kind = team.call & ~COUNT_MASK;
    give_up(team, MISMATCH, message.peer, 0, 0, kind | (message.bytes & COUNT_MASK), kind | (theirs & COUNT_MASK));
    return false;
}

__device__ __forceinline__ bool length_came(const Team& team, const Message& message, u32 channel, u32 number) {
    u64 bytes;
    const u8* line = message_line_at(team, team.rank, message.peer, number, MESSAGE_WORDS + channel);
    return line_came(team, line, number + 1, message.peer, bytes) && agree(team, message, bytes);
}

static_assert(MESSAGE_WORDS % THREADS == 0, "the pieces of a short message are whole");

// False, for the whole block: given up, and nothing is sent.
__device__ __forceinline__ bool send_short(const Team& team, const Message& message, u32 channel, const u32* head, u32 number) {
    u32 at = channel * THREADS + threadIdx.x;
    // On its way while the first thread waits.
    u64 word = load_word(message.at, at, message.bytes);
    const bool may = threadIdx.x != 0 || count_came(team, head, number + 1 - SLOT_COUNT, WAITED_CREDIT, message.peer);
    if (!__syncthreads_and(may)) return false;
    while (8ull * at < message.bytes) {
        push_line(message_line_at(team, message.peer, team.rank, number, at), word, number + 1);
        at += message.channels * THREADS;
        word = load_word(message.at, at, message.bytes);
    }
    if (threadIdx.x == 0) push_length(team, message, channel, number);
    return true;
}

// False, for the whole block: given up, and nothing is written of the piece that did not arrive.
__device__ __forceinline__ bool receive_short(const Team& team, const Message& message, u32 channel, u32 number) {
    // The last thread often has no word.
    bool came = threadIdx.x != THREADS - 1 || length_came(team, message, channel, number);
    for (u32 first = channel * THREADS; 8ull * first < message.bytes; first += message.channels * THREADS) {
        const u32 at = first + threadIdx.x;
        u64 word = 0;
        if (came && 8ull * at < message.bytes) {
            came = line_came(team, message_line_at(team, team.rank, message.peer, number, at), number + 1, message.peer, word);
        }
        if (!__syncthreads_and(came)) return false;
        store_word(message.at, at, message.bytes, word);
    }
    return true;
}

// The line beside a flag.
__device__ __forceinline__ u8* beside(u32* flag) {
    return (u8*)flag + 16;
}

// By one of its blocks. It waits for nobody.
__device__ __forceinline__ void copy_own(const Own& own, u32 block) {
    const u64 whole = own.bytes / 16;
    either(is_whole(own.from, whole, own.bytes) && is_whole(own.to, whole, own.bytes), [&](auto aligned) {
        for_workers<batch_of<decltype(aligned)>(1)>(
            block, own.blocks, 0, whole, [&](u64 i) { return load_pack(aligned, own.from, i, own.bytes); },
            [&](u64 i, Pack pack) { store_pack(aligned, own.to, i, own.bytes, pack); });
    });
    if (own.bytes % 16 != 0 && block == 0 && threadIdx.x == 0) {
        store_odd_pack(own.to, whole, own.bytes, load_odd_pack(own.from, whole, own.bytes));
    }
}

// Counts the call when it begins, and at each of the kernel's ends.
struct Counted {
    const Team& team;
    __device__ __forceinline__ explicit Counted(const Team& of) : team(of) { count_started(team, team.number); }
    __device__ __forceinline__ ~Counted() { count_finished(team, team.number); }
};

#ifdef KERNEL_send_recv
extern "C" __global__ void __launch_bounds__(THREADS, 1)
send_recv(const __grid_constant__ Args args, const __grid_constant__ Messages messages) {
    const Team& team = args.team;
    __shared__ u8* target; // the receiver's buffer as we reach it, or null
    __shared__ bool well;
    await_kernel_before();
    const Counted counted(team);
    const u32 carrying = messages.to.channels + messages.from.channels;
    if (blockIdx.x >= carrying) return copy_own(messages.own, blockIdx.x - carrying);
    const bool sends = blockIdx.x < messages.to.channels;
    const u32 channel = sends ? blockIdx.x : blockIdx.x - messages.to.channels;
    const Message message = sends ? messages.to : messages.from;
    const u32 peer = message.peer, channels = message.channels;
    if (message.bytes == 0) return;
    u8* window = team.window[team.rank];
    u32* counter = counter_at(window, sends ? TAIL : HEAD, PAIR, channel, peer);
    u32* awaited = flag_at(window, sends ? HEAD : TAIL, PAIR, channel, peer);
    u32* posted = flag_at(team.window[peer], sends ? TAIL : HEAD, PAIR, channel, team.rank);
    u32 count = *(volatile u32*)counter;
    if (message.bytes <= 8 * MESSAGE_WORDS) {
        const bool done = sends ? send_short(team, message, channel, awaited, count) : receive_short(team, message, channel, count);
        if (done && threadIdx.x == 0) {
            // Nobody waits for this tail, but a flag 2^31 counts behind would seem to be ahead.
            store_relaxed(posted, count + 1);
            *(volatile u32*)counter = count + 1;
        }
        return;
    }
    const u64 packs = (message.bytes + 15) / 16;
    const u64 first = border(packs, channel, channels), last = border(packs, channel + 1, channels);
    if (first == last) return;
    if (threadIdx.x == 0) {
        target = nullptr;
        well = true;
        if (message.direct && !sends) {
            push_line(beside(posted), message.remote, count + 1);
            push_line(beside(flag_at(team.window[peer], TAIL, PAIR, channel, team.rank)), message.bytes, count + 1);
            // A multiple of 16: the sender computes the same.
            if (message.remote % 16 == 0 && message.remote != 0) target = message.at;
        } else if (message.direct) {
            u64 remote = 0, bytes = 0;
            well = line_came(team, beside(awaited), count + 1, peer, remote) &&
                   line_came(team, beside(flag_at(window, TAIL, PAIR, channel, peer)), count + 1, peer, bytes);
            __threadfence_system();
            well = well && agree(team, message, bytes);
            if (well && remote % 16 == 0) target = resolve(team, peer, remote);
        }
    }
    __syncthreads();
    if (!well) return;
    if (target != nullptr) {
        if (sends) {
            u8* at = target;
            const u64 whole = message.bytes / 16;
            either(is_whole(message.at, whole, message.bytes), [&](auto aligned) {
                for_workers<8>(
                    channel, channels, 0, whole, [&](u64 i) { return load_pack(aligned, message.at, i, message.bytes); },
                    [&](u64 i, Pack pack) { ((Pack*)at)[i] = pack; });
            });
            if (message.bytes % 16 != 0 && channel == 0 && threadIdx.x == 0) {
                store_odd_pack(at, whole, message.bytes, load_odd_pack(message.at, whole, message.bytes));
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            if (channel == 0) count_direct(team);
            if (!sends) await_count(team, awaited, count + 1, WAITED_END, peer);
            store_release(posted, count + 1);
        }
        count++;
    } else {
        // Both ends compute the same.
        const u64 quarter = whole_lines((whole_lines((packs + channels - 1) / channels) + 3) / 4);
        const u64 least = quarter > LEAST_PAIR_PIECE ? quarter : LEAST_PAIR_PIECE;
        const u64 most = least < PAIR_PIECE ? least : PAIR_PIECE;
        for (u64 at = first; at < last; at += most, count++) {
            const u32 here = (u32)(last - at < most ? last - at : most);
            // In a direct message the receiver has told the sender its own.
            const bool with_length = at == first && !message.direct;
            bool came = true;
            if (threadIdx.x == 0) {
                const u32 awaits = sends ? count + 1 - SLOT_COUNT : count + 1;
                came = count_came(team, awaited, awaits, sends ? WAITED_CREDIT : WAITED_SLOT, peer);
                if (came && sends && with_length) push_length(team, message, channel, count);
            } else if (threadIdx.x == THREADS - 1 && !sends && with_length) {
                came = length_came(team, message, channel, count);
            }
            if (!__syncthreads_and(came)) return;
            const Piece piece = {at, here};
            if (sends) {
                // The slot before. The other warps go on while this one waits for the fence.
                if (threadIdx.x == 32 && at != first) store_release(posted, count);
                fill_from(whole_block(), pair_slot_at(team, peer, channel, team.rank, count), message.at, piece, message.bytes);
            } else {
                store_from(whole_block(), message.at, piece, message.bytes, pair_slot_at(team, team.rank, channel, peer, count));
                __syncthreads();
                // As free_slot.
                if (threadIdx.x == 0) store_relaxed(posted, count + 1);
            }
        }
        __syncthreads();
        if (sends && threadIdx.x == 0) store_release(posted, count);
    }
    if (threadIdx.x == 0) *(volatile u32*)counter = count;
}
#endif
