// The reduction of this rank's piece with what lies in the others' slots.

// `store` gets each reduced pack. Two packs at a time: the loads of all ranks are under way together.
template <typename Store>
__device__ __forceinline__ void reduce_slots(const Team& team, const u8* own, const Piece& piece, u64 bytes,
                                             const u8* const (&from)[RANKS], Store store) {
    either(is_whole(own, piece.first + piece.packs, bytes), [&](auto whole) {
        constexpr int BATCH = RANKS <= 4 ? 4 : 2;
        u32 i = threadIdx.x;
        for (; i < piece.packs; i += BATCH * THREADS) {
            Pack in[BATCH][RANKS];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const u32 at = i + k * THREADS;
                if (at >= piece.packs) break;
#pragma unroll
                for (int s = 0; s < RANKS; s++) {
                    in[k][s] = s == (int)team.rank ? load_pack(whole, own, piece.first + at, bytes) : load_slot(from[s], at);
                }
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const u32 at = i + k * THREADS;
                if (at >= piece.packs) break;
                u64 a[RANKS], b[RANKS];
#pragma unroll
                for (int s = 0; s < RANKS; s++) {
                    a[s] = in[k][s].a;
                    b[s] = in[k][s].b;
                }
                store(at, Pack{reduce_words(a), reduce_words(b)});
            }
        }
    });
}
