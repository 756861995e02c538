// Elements times a factor, rounded as the collectives round; `from` and `to` may be the same. The factor lies at `at`;
// if that is null, it is the first bytes of `value`.

union Immediate {
    u64 word;
    Stored factor;
};

#define PER_PACK (16 / sizeof(Stored))

struct __align__(16) Pack {
    Stored of[PER_PACK];
};

extern "C" __global__ void scale(const Stored* from, Stored* to, u64 count, const Stored* at, u64 value) {
    Immediate immediate;
    immediate.word = value;
    const Acc factor = widen(at == nullptr ? immediate.factor : *at);
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, stride = (u64)gridDim.x * blockDim.x;
    const u64 packs = (((u64)from | (u64)to) & 15) == 0 ? count / PER_PACK : 0;
    for (u64 i = first; i < packs; i += stride) {
        Pack pack = ((const Pack*)from)[i];
#pragma unroll
        for (int e = 0; e < (int)PER_PACK; e++) pack.of[e] = times(pack.of[e], factor);
        ((Pack*)to)[i] = pack;
    }
    for (u64 i = packs * PER_PACK + first; i < count; i += stride) to[i] = times(from[i], factor);
}
