// Loads and stores of words (8 bytes) and packs (16 bytes) of buffers that may start at any address and end anywhere.

struct __align__(16) Pack {
    u64 a, b;
};

__device__ __forceinline__ u64 bytes_of(const u8* from, u32 count) {
    u64 word = 0;
    for (u32 i = 0; i < count; i++) word |= (u64)from[i] << (8 * i);
    return word;
}

__device__ __forceinline__ void bytes_to(u8* to, u64 word, u32 count) {
    for (u32 i = 0; i < count; i++) to[i] = (u8)(word >> (8 * i));
}

// Word `index` of a buffer of `bytes`; what lies behind its end reads as zero.
__device__ __forceinline__ u64 load_word(const u8* base, u64 index, u64 bytes) {
    const u64 at = 8 * index;
    const u8* from = base + at;
    if (at + 8 <= bytes) {
        if (((u64)base & 7) == 0) return *(const u64*)from;
        if (((u64)base & 3) == 0) return (u64)((const u32*)from)[0] | (u64)((const u32*)from)[1] << 32;
        return bytes_of(from, 8);
    }
    return at < bytes ? bytes_of(from, (u32)(bytes - at)) : 0;
}

__device__ __forceinline__ void store_word(u8* base, u64 index, u64 bytes, u64 word) {
    const u64 at = 8 * index;
    u8* to = base + at;
    if (at + 8 <= bytes) {
        if (((u64)base & 7) == 0) {
            *(u64*)to = word;
        } else if (((u64)base & 3) == 0) {
            ((u32*)to)[0] = (u32)word;
            ((u32*)to)[1] = (u32)(word >> 32);
        } else {
            bytes_to(to, word, 8);
        }
    } else if (at < bytes) {
        bytes_to(to, word, (u32)(bytes - at));
    }
}

__device__ __forceinline__ Pack load_pack(const u8* base, u64 index, u64 bytes) {
    if ((((u64)base & 15) == 0) && 16 * index + 16 <= bytes) return *(const Pack*)(base + 16 * index);
    Pack pack;
    pack.a = load_word(base, 2 * index, bytes);
    pack.b = load_word(base, 2 * index + 1, bytes);
    return pack;
}

__device__ __forceinline__ void store_pack(u8* base, u64 index, u64 bytes, Pack pack) {
    if ((((u64)base & 15) == 0) && 16 * index + 16 <= bytes) {
        *(Pack*)(base + 16 * index) = pack;
    } else {
        store_word(base, 2 * index, bytes, pack.a);
        store_word(base, 2 * index + 1, bytes, pack.b);
    }
}
