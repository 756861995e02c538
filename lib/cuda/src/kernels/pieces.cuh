// A round's pieces of all other ranks, between the user's buffers and slots.

// By distance - 1: where a piece lies in a buffer of `bytes`, and its slot. No packs: nothing for that rank.
struct Pieces {
    u8* at[OTHERS];
    u64 first[OTHERS];
    u32 packs[OTHERS];
    u8* slot[OTHERS];
};

// The values of `at`, `piece` and `slot` for each rank.
template <typename At, typename Of, typename Slot>
__device__ __forceinline__ Pieces pieces_of(const Team& team, At at, Of piece, Slot slot) {
    Pieces pieces;
#pragma unroll
    for (int d = 0; d < OTHERS; d++) {
        const u32 peer = next_rank(team.rank, d + 1);
        const Piece one = piece(peer);
        pieces.at[d] = (u8*)at(peer);
        pieces.first[d] = one.first;
        pieces.packs[d] = one.packs;
        pieces.slot[d] = (u8*)slot(peer);
    }
    return pieces;
}

// Whether all pieces in the buffers are aligned and whole.
__device__ __forceinline__ bool are_whole(const Pieces& pieces, u64 bytes) {
    bool whole = true;
#pragma unroll
    for (int d = 0; d < OTHERS; d++) {
        whole = whole && (pieces.packs[d] == 0 || is_whole(pieces.at[d], pieces.first[d] + pieces.packs[d], bytes));
    }
    return whole;
}

// From the buffers into the slots, and, if `copy` is there, to the same place in it.
__device__ __forceinline__ void fill_all(const Subgroup& group, const Pieces& pieces, u64 bytes, u8* copy = nullptr) {
    either(are_whole(pieces, bytes) && (copy == nullptr || ((u64)copy & 15) == 0), [&](auto whole) {
        for_others<batch_of<decltype(whole)>(OTHERS)>(
            group, pieces.packs,
            [&](int d, u32 i) { return load_pack(whole, pieces.at[d], pieces.first[d] + i, bytes); },
            [&](int d, u32 i, Pack pack) {
                fill_slot(pieces.slot[d], i, pack);
                if (copy != nullptr) store_pack(whole, copy, pieces.first[d] + i, bytes, pack);
            });
    });
}

// From the slots into the buffers.
__device__ __forceinline__ void store_all(const Subgroup& group, const Pieces& pieces, u64 bytes) {
    either(are_whole(pieces, bytes), [&](auto whole) {
        for_others<batch_of<decltype(whole)>(OTHERS)>(
            group, pieces.packs, [&](int d, u32 i) { return load_slot(pieces.slot[d], i); },
            [&](int d, u32 i, Pack pack) { store_pack(whole, pieces.at[d], pieces.first[d] + i, bytes, pack); });
    });
}
