// Tensor cores by hand: products of 16x16 (bf16) by 16x8 tiles with f32 sums, and the loads that feed them (PTX ISA: mma.m16n8k16,
// ldmatrix). In a warp, lane 4g + t holds of an accumulator: rows g (values 0, 1) and g + 8 (values 2, 3), columns 2t, 2t + 1.

#define TILE_STRIDE (HEAD_DIM + 8) // of a row in shared memory: eight rows fall into different banks
#define ROW_BLOCKS (CONTEXT / 16)
#define WARPS 4

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Right operands of two products from `tile` (rows of HEAD_DIM): columns n0.. and n0 + 8.. of its transpose, k0..k0 + 15.
__device__ __forceinline__ void load_transposed(u32 (&b)[4], const u16* tile, u32 n0, u32 k0) {
    const u32 lane = threadIdx.x % 32;
    const u16* at = tile + (n0 + lane / 16 * 8 + lane % 8) * TILE_STRIDE + k0 + lane / 8 % 2 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(shared_address(at))
                 : "memory");
}

// Right operands of two products from `tile` as it lies: rows k0..k0 + 15, columns n0.. and n0 + 8..
__device__ __forceinline__ void load_straight(u32 (&b)[4], const u16* tile, u32 k0, u32 n0) {
    const u32 lane = threadIdx.x % 32;
    const u16* at = tile + (k0 + lane / 8 % 2 * 8 + lane % 8) * TILE_STRIDE + n0 + lane / 16 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(shared_address(at))
                 : "memory");
}

// Left operands: 16 rows of HEAD_DIM values, `stride` apart in device memory.
__device__ __forceinline__ void load_rows(u32 (&a)[HEAD_DIM / 16][4], const u16* rows, u32 stride) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        const u16* at = rows + 16 * k + 2 * t;
        a[k][0] = *(const u32*)(at + (u64)g * stride);
        a[k][1] = *(const u32*)(at + (u64)(g + 8) * stride);
        a[k][2] = *(const u32*)(at + (u64)g * stride + 8);
        a[k][3] = *(const u32*)(at + (u64)(g + 8) * stride + 8);
    }
}

// Stores an accumulator of 16 rows of HEAD_DIM values, row g times `upper`, row g + 8 times `lower`.
__device__ __forceinline__ void store_rows(u16* rows, u32 stride, const float (&c)[HEAD_DIM / 8][4], float upper, float lower) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
        u16* at = rows + 8 * n + 2 * t;
        *(u32*)(at + (u64)g * stride) = pack_bf16(c[n][0] * upper, c[n][1] * upper);
        *(u32*)(at + (u64)(g + 8) * stride) = pack_bf16(c[n][2] * lower, c[n][3] * lower);
    }
}

// A 16x16 accumulator, rounded, as a left operand.
__device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_bf16(left[0], left[1]);
    a[1] = pack_bf16(left[2], left[3]);
    a[2] = pack_bf16(right[0], right[1]);
    a[3] = pack_bf16(right[2], right[3]);
}

// CONTEXT rows of HEAD_DIM values from device to shared memory, by all threads of the block.
__device__ __forceinline__ void load_tile(u16* tile, const u16* rows, u32 stride) {
    const u32 pieces = HEAD_DIM / 8;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < CONTEXT * pieces; i += 32 * WARPS) {
        const u32 row = i / pieces, piece = i % pieces;
        *(uint4*)(tile + row * TILE_STRIDE + 8 * piece) = *(const uint4*)(rows + (u64)row * stride + 8 * piece);
    }
}

// The blocks of rows of a warp, the i-th of them: early rows see few keys and late ones many, so each warp gets both.
__device__ __forceinline__ u32 row_block(u32 i) {
    const u32 warp = threadIdx.x / 32;
    return i * WARPS + (i % 2 ? WARPS - 1 - warp : warp);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
