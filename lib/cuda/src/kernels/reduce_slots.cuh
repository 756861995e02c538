// The reduction of this rank's piece with those in the others' slots or buffers.

#ifdef DTYPE

// A cell of every rank, of LL or of LL128.
__device__ __forceinline__ u64 reduce_cells(const u64 (&in)[RANKS]) {
    return reduce_words(in);
}

__device__ __forceinline__ Pack reduce_cells(const Pack (&in)[RANKS]) {
    u64 a[RANKS], b[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
        a[s] = in[s].a;
        b[s] = in[s].b;
    }
    return Pack{reduce_words(a), reduce_words(b)};
}

// Packs `first`, `first + stride`, ... below `end`, a batch at a time: the loads of all ranks are under way together.
// `load(s, i)` is pack i of rank s; `store` gets each reduced pack.
template <int BATCH, typename Load, typename Store>
__device__ __forceinline__ void reduce_packs(u64 first, u64 end, u64 stride, Load load, Store store) {
    for (u64 i = first; i < end; i += BATCH * stride) {
        Pack in[BATCH][RANKS];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * stride >= end) break;
#pragma unroll
            for (int s = 0; s < RANKS; s++) in[k][s] = load(s, i + k * stride);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * stride >= end) break;
            store(i + k * stride, reduce_cells(in[k]));
        }
    }
}

// This rank's piece: reduced into `output` at the same place, if that is not null, and given to `also(i, pack)`.
template <typename Also>
__device__ __forceinline__ void reduce_slots(const Subgroup& group, const Team& team, const u8* own, u8* output, const Piece& piece,
                                             u64 bytes, const u8* const (&from)[RANKS], Also also) {
    either(is_whole(own, piece.first + piece.packs, bytes) && ((u64)output & 15) == 0, [&](auto whole) {
        reduce_packs<batch_of<decltype(whole)>(RANKS)>(
            group.thread, piece.packs, group.threads,
            [&](int s, u64 i) {
                return s == (int)team.rank ? load_pack(whole, own, piece.first + i, bytes) : load_slot(from[s], i);
            },
            [&](u64 i, Pack reduced) {
                also(i, reduced);
                if (output != nullptr) store_pack(whole, output, piece.first + i, bytes, reduced);
            });
    });
}

#endif
