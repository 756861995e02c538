// Protocol LL128: 120 bytes of data and their flag in a line of 128 bytes. A warp writes and reads whole lines with one
// instruction each, 16 bytes a thread. NVLink keeps such a line together, so a thread that sees the flag has the data.
// (Other links may tear it; cuda/window/reach.rs checks.) Flags are 1/16 of the sent bytes; in LL they are half. (NCCL:
// prims_ll128.h)
//
// Sets of lines take turns as in LL.

#define EVERY_LANE 0xffffffffu

struct Ll128 {
    typedef Pack Cell;
    static constexpr u32 MOST = 8 * LL128_LINES;

    // Lines by four: all threads of a warp take part.
    static __device__ __forceinline__ u32 cells(const Words& words) { return (words.count + 59) / 60 * 32; }

    static __device__ __forceinline__ u32 first_word(u32 cell) { return cell / 8 * 15 + cell % 8 * 2; }

    static __device__ __forceinline__ bool has_flag(u32 cell) { return cell % 8 == 7; }

    static __device__ __forceinline__ Pack load(const u8* base, const Words& words, u32 cell) {
        const u32 word = first_word(cell);
        Pack pack = {0, 0};
        if (word < words.count) pack.a = load_word(base, words.first + word, words.bytes);
        if (!has_flag(cell) && word + 1 < words.count) pack.b = load_word(base, words.first + word + 1, words.bytes);
        return pack;
    }

    static __device__ __forceinline__ void store(u8* base, const Words& words, u32 cell, Pack pack) {
        const u32 word = first_word(cell);
        if (word < words.count) store_word(base, words.first + word, words.bytes, pack.a);
        if (!has_flag(cell) && word + 1 < words.count) store_word(base, words.first + word + 1, words.bytes, pack.b);
    }

    static __device__ __forceinline__ u8* cell_at(const Team& team, const Channel& channel, u32 to, u32 from, u32 cell) {
        return team.extension[to] + LINES128 + 16 * (((u64)channel.row_128 * SENDERS + sender_of(to, from)) * MOST + cell);
    }

    static __device__ __forceinline__ u64 flag_of(const Channel& channel) {
        return (u64)channel.epoch << 32 | channel.epoch;
    }

    static __device__ __forceinline__ void push_at(u8* to, u32 cell, u64 flag, Pack pack) {
        const u64 high = has_flag(cell) ? flag : pack.b;
        __syncwarp();
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" : : "l"(to), "l"(pack.a), "l"(high) : "memory");
    }

    static __device__ __forceinline__ void push(const Team& team, const Channel& channel, u32 peer, u32 cell, Pack pack) {
        push_at(cell_at(team, channel, peer, team.rank, cell), cell, flag_of(channel), pack);
    }

    static __device__ __forceinline__ Pack look_at(const u8* from) {
        __syncwarp();
        return ::look_at(from);
    }

    static __device__ __forceinline__ Pack look(const Team& team, const Channel& channel, u32 peer, u32 cell) {
        return look_at(cell_at(team, channel, team.rank, peer, cell));
    }

    // The same answer for all threads of a warp, which share lines.
    static __device__ __forceinline__ bool all_say(bool yes) { return __all_sync(EVERY_LANE, yes); }

    // Whether the lines of this warp have come as they were seen.
    static __device__ __forceinline__ bool came_with(u64 flag, u32 cell, const Pack& line, Pack& pack) {
        pack = line;
        return all_say(!has_flag(cell) || line.b == flag);
    }

    static __device__ __forceinline__ bool came(const Channel& channel, u32 cell, const Pack& line, Pack& pack) {
        return came_with(flag_of(channel), cell, line, pack);
    }

    static __device__ __forceinline__ bool peek_at(const u8* from, u32 cell, u64 flag, Pack& pack) {
        return came_with(flag, cell, look_at(from), pack);
    }

    // A warp that has given up forwards nothing.
    static __device__ __forceinline__ Pack await(const Team& team, const Channel& channel, u32 peer, u32 cell) {
        Wait wait = {0, 0, 0};
        Pack pack;
        while (!came(channel, cell, look(team, channel, peer, cell), pack)) {
            const bool goes_on = keep_waiting(team, wait, WAITED_LINE, peer, channel.epoch, 0);
            if (!all_say(goes_on)) end_thread();
        }
        return pack;
    }
};
