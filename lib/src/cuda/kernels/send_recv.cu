// Point to point: the first blocks send, the others receive; there may be none of either. A block is the channel of its number
// among its kind. Only the two ranks of a message take part: no hello.

struct Message {
    u8* at;
    u64 bytes;
    u32 peer;
    u32 channels;
};

#define PAIR_PIECE (SLOT_BYTES / 16)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
send_recv(const __grid_constant__ Team team, const __grid_constant__ Message to, const __grid_constant__ Message from) {
    const bool sends = blockIdx.x < to.channels;
    const u32 channel = sends ? blockIdx.x : blockIdx.x - to.channels;
    const Message message = sends ? to : from;
    const u32 peer = message.peer, channels = message.channels;
    u8* window = team.window[team.rank];
    const u64 packs = (message.bytes + 15) / 16;
    const u64 first = packs * channel / channels, last = packs * (channel + 1) / channels;
    u32* counter = counter_at(window, sends ? TAIL : HEAD, PAIR, channel, peer);
    const u32* awaited = flag_at(window, sends ? HEAD : TAIL, PAIR, channel, peer);
    u32* told = flag_at(team.window[peer], sends ? TAIL : HEAD, PAIR, channel, team.rank);
    u32 count = *(volatile u32*)counter;
    for (u64 at = first; at < last; at += PAIR_PIECE, count++) {
        const u32 here = (u32)(last - at < PAIR_PIECE ? last - at : PAIR_PIECE);
        if (threadIdx.x == 0) {
            if (sends) await_count(team, awaited, count + 1 - SLOT_COUNT, WAITED_CREDIT, peer);
            else await_count(team, awaited, count + 1, WAITED_SLOT, peer);
        }
        __syncthreads();
        const Piece piece = {at, here};
        if (sends) fill_from(slot_at(team.window[peer], PAIR, channel, team.rank, count), message.at, piece, message.bytes);
        else store_from(message.at, piece, message.bytes, slot_at(window, PAIR, channel, peer, count));
        __syncthreads();
        if (threadIdx.x == 0) store_release(told, count + 1);
    }
    if (threadIdx.x == 0) *(volatile u32*)counter = count;
}
