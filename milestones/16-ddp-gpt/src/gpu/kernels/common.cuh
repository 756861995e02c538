// Types, conversions and reductions. No header of CUDA is needed, so that a machine with nothing but a driver and NVRTC can
// compile this. CHANNELS, CONTEXT, HEADS, HEAD_DIM, VOCAB and VOCAB_STRIDE are the model's; ACT_BF16 picks the type of
// activations.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if ACT_BF16
typedef u16 act; // the bits of a bfloat16
#else
typedef float act;
#endif

// Two floats to two bfloat16, rounded to nearest even; `low` in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ float low_bf16(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

__device__ __forceinline__ void load4(float (&v)[4], const float* from) {
    const float4 x = *(const float4*)from;
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}
__device__ __forceinline__ void store4(float* to, const float (&v)[4]) {
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ float widen(float x) { return x; }

#if ACT_BF16
__device__ __forceinline__ void load4(float (&v)[4], const u16* from) {
    const uint2 x = *(const uint2*)from;
    v[0] = low_bf16(x.x), v[1] = high_bf16(x.x), v[2] = low_bf16(x.y), v[3] = high_bf16(x.y);
}
__device__ __forceinline__ void store4(u16* to, const float (&v)[4]) {
    *(uint2*)to = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}
__device__ __forceinline__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ act narrow(float x) { return (u16)pack_bf16(x, 0.0f); }
#else
__device__ __forceinline__ act narrow(float x) { return x; }
#endif

// 16 bytes of bfloat16 at once where activations are that.
__device__ __forceinline__ void load8(float (&v)[8], const act* from) {
#if ACT_BF16
    const uint4 x = *(const uint4*)from;
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = low_bf16(words[i]), v[2 * i + 1] = high_bf16(words[i]);
#else
    float a[4], b[4];
    load4(a, from), load4(b, from + 4);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = a[i], v[4 + i] = b[i];
#endif
}
__device__ __forceinline__ void store8(act* to, const float (&v)[8]) {
#if ACT_BF16
    *(uint4*)to = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
#else
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
#endif
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// The same in every thread, always added in the same order. `scratch` holds 32 values.
template <typename Number> __device__ __forceinline__ Number block_sum(Number x, Number* scratch) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    Number sum = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) sum += scratch[i];
    __syncthreads();
    return sum;
}
