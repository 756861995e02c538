// The counter-based random numbers of rng.rs, and dropout's masks: the same bits as on the CPU.

__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
__device__ __forceinline__ u64 absorb(u64 state, u64 word) { return mix64((state + 0x9e3779b97f4a7c15ull) ^ mix64(word)); }

// The masks of one place in the network. `keys` has one key per sample; threshold 0: nothing is dropped.
struct Mask {
    const u64* keys;
    u32 threshold;
    float scale;
};

// Whether an activation is kept: a hash of its number within its sample.
__device__ __forceinline__ bool kept(u64 key, u32 index, u32 threshold) {
    u32 x = (index * 0x9e3779b9u) ^ (u32)key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + (u32)(key >> 32)) * 0x846ca68bu;
    x ^= x >> 16;
    return (x >> 8) >= threshold;
}

// 0 for a dropped activation, 1 / (1 - p) for a kept one.
__device__ __forceinline__ float factor(const Mask& mask, u64 key, u32 index) {
    return kept(key, index, mask.threshold) ? mask.scale : 0.0f;
}
