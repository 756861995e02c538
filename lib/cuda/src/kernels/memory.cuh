// Loads and stores of words (8 bytes) and packs (16 bytes) of buffers that may start at any address and end anywhere.

struct __align__(16) Pack {
    u64 a, b;
};

// The paths for odd addresses and ends are kept out of line: inlined at every load of a pack they would be most of the
// code.

// `count` bytes, of an address that may be odd; the rest of the word is zero.
__device__ __noinline__ u64 load_odd(const u8* from, u32 count) {
    if (count == 8 && ((u64)from & 3) == 0) return (u64)((const u32*)from)[0] | (u64)((const u32*)from)[1] << 32;
    u64 word = 0;
    for (u32 i = 0; i < count; i++) word |= (u64)from[i] << (8 * i);
    return word;
}

__device__ __noinline__ void store_odd(u8* to, u64 word, u32 count) {
    if (count == 8 && ((u64)to & 3) == 0) {
        ((u32*)to)[0] = (u32)word;
        ((u32*)to)[1] = (u32)(word >> 32);
        return;
    }
    for (u32 i = 0; i < count; i++) to[i] = (u8)(word >> (8 * i));
}

__device__ __forceinline__ u32 up_to(u64 left, u32 most) {
    return left < most ? (u32)left : most;
}

// Word `index` of a buffer of `bytes`; bytes after its end read as zero.
__device__ __forceinline__ u64 load_word(const u8* base, u64 index, u64 bytes) {
    const u64 at = 8 * index;
    if ((((u64)base & 7) == 0) && at + 8 <= bytes) return *(const u64*)(base + at);
    return at < bytes ? load_odd(base + at, up_to(bytes - at, 8)) : 0;
}

__device__ __forceinline__ void store_word(u8* base, u64 index, u64 bytes, u64 word) {
    const u64 at = 8 * index;
    if ((((u64)base & 7) == 0) && at + 8 <= bytes) *(u64*)(base + at) = word;
    else if (at < bytes) store_odd(base + at, word, up_to(bytes - at, 8));
}

__device__ __noinline__ Pack load_odd_pack(const u8* base, u64 index, u64 bytes) {
    Pack pack;
    pack.a = load_word(base, 2 * index, bytes);
    pack.b = load_word(base, 2 * index + 1, bytes);
    return pack;
}

__device__ __noinline__ void store_odd_pack(u8* base, u64 index, u64 bytes, Pack pack) {
    store_word(base, 2 * index, bytes, pack.a);
    store_word(base, 2 * index + 1, bytes, pack.b);
}

template <bool V> struct Is {
    static constexpr bool yes = V;
};

// Runs `body` compiled for aligned whole packs, or for anything.
template <typename F> __device__ __forceinline__ void either(bool whole, F body) {
    if (whole) body(Is<true>{});
    else body(Is<false>{});
}

__device__ __forceinline__ bool is_whole(const u8* base, u64 end, u64 bytes) {
    return (((u64)base & 15) == 0) && 16 * end <= bytes;
}

template <typename Whole> __device__ __forceinline__ Pack load_pack(Whole, const u8* base, u64 index, u64 bytes) {
    if (Whole::yes) return *(const Pack*)(base + 16 * index);
    return load_odd_pack(base, index, bytes);
}

template <typename Whole>
__device__ __forceinline__ void store_pack(Whole, u8* base, u64 index, u64 bytes, Pack pack) {
    if (Whole::yes) *(Pack*)(base + 16 * index) = pack;
    else store_odd_pack(base, index, bytes, pack);
}

// Packs of an output from `first` on. It checks once whether all of them are aligned and whole.
struct Output {
    u8* base;
    u64 first;
    u64 bytes;
    bool whole;
};

__device__ __forceinline__ Output output_of(u8* base, u64 first, u64 end, u64 bytes) {
    return Output{base, first, bytes, is_whole(base, end, bytes)};
}

__device__ __forceinline__ void put(const Output& output, u64 index, Pack pack) {
    if (output.whole) store_pack(Is<true>{}, output.base, output.first + index, output.bytes, pack);
    else store_pack(Is<false>{}, output.base, output.first + index, output.bytes, pack);
}

#define LINE_PACKS (LINE_BYTES / 16)

__device__ __forceinline__ u64 whole_lines(u64 packs) {
    return (packs + LINE_PACKS - 1) / LINE_PACKS * LINE_PACKS;
}

// Where share `index` of `shares` of so many packs begins: each share but the last has whole lines, none more than the
// largest would have if it were rounded up to whole lines.
__device__ __forceinline__ u64 border(u64 packs, u64 index, u64 shares) {
    const u64 at = whole_lines(packs * index / shares);
    return at < packs ? at : packs;
}

// The threads of all blocks (or of `workers` blocks, of which this is number `worker`) go through packs `begin` to
// `end`, each block's 8 KiB next to those of its neighbours.
template <int BATCH, typename Load, typename Store>
__device__ __forceinline__ void for_workers(u32 worker, u32 workers, u64 begin, u64 end, Load load, Store store) {
    const u64 stride = (u64)workers * THREADS;
    for (u64 i = begin + (u64)worker * THREADS + threadIdx.x; i < end; i += BATCH * stride) {
        decltype(load(i)) pack[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * stride < end) pack[k] = load(i + k * stride);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * stride < end) store(i + k * stride, pack[k]);
        }
    }
}

template <int BATCH, typename Load, typename Store>
__device__ __forceinline__ void for_grid(u64 begin, u64 end, Load load, Store store) {
    for_workers<BATCH>(blockIdx.x, gridDim.x, begin, end, load, store);
}
