// The reduction of packs of all ranks' registered buffers, read in place.

// Packs `begin` to `end` of the buffers of `bytes` that lie `offset` into `from`; with `last` also what is behind the
// last whole pack, which goes to `store_tail`.
template <typename Store, typename StoreTail>
__device__ __forceinline__ void reduce_buffers(u8* const (&from)[RANKS], u64 offset, u64 begin, u64 end, u64 bytes,
                                               bool last, Store store, StoreTail store_tail) {
    const u8* at[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++) at[s] = from[s] + offset;
    reduce_packs<(RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1)>(
        begin + (u64)blockIdx.x * THREADS + threadIdx.x, end, (u64)gridDim.x * THREADS,
        [&](int s, u64 i) { return load_slot(at[s], i); }, store);
    if (!last || !has_tail(bytes)) return;
    u64 a[RANKS], b[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
        const Pack pack = load_odd_pack(at[s], bytes / 16, bytes);
        a[s] = pack.a;
        b[s] = pack.b;
    }
    store_tail(bytes / 16, Pack{reduce_words(a), reduce_words(b)});
}
