// Elements and reduction operators. DTYPE and OP are the codes of `DType` and `ReduceOp`; no header of CUDA is needed,
// so that a machine with nothing but a driver and NVRTC can compile this.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef DTYPE

#if DTYPE == 0
typedef float Stored;
typedef float Acc;
#define IS_FLOAT 1
#elif DTYPE == 1
typedef double Stored;
typedef double Acc;
#define IS_FLOAT 1
#elif DTYPE == 2 || DTYPE == 3
typedef unsigned short Stored;
typedef float Acc; // all ranks' values are added in f32 and rounded once
#define IS_FLOAT 1
#elif DTYPE == 4
typedef signed char Stored;
typedef int Acc;
#elif DTYPE == 5
typedef unsigned char Stored;
typedef u32 Acc;
#elif DTYPE == 6
typedef int Stored;
typedef int Acc;
#elif DTYPE == 7
typedef u32 Stored;
typedef u32 Acc;
#elif DTYPE == 8
typedef long long Stored;
typedef long long Acc;
#elif DTYPE == 9
typedef u64 Stored;
typedef u64 Acc;
#elif DTYPE == 10
typedef short Stored;
typedef int Acc;
#elif DTYPE == 11
typedef unsigned short Stored;
typedef u32 Acc;
#elif DTYPE == 12 || DTYPE == 13
typedef unsigned char Stored;
typedef float Acc;
#define IS_FLOAT 1
// For an 8-bit float: bits of the mantissa, bias, and the magnitude that follows the greatest finite one.
#if DTYPE == 12
#define MANTISSA 3
#define BIAS 7
#define BEHIND 0x7fu // NaN; there is no infinity
#else
#define MANTISSA 2
#define BIAS 15
#define BEHIND 0x7cu // infinity
#endif
#else
#error "DTYPE has no such code"
#endif

__device__ __forceinline__ Acc widen(Stored x) {
#if DTYPE == 2
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#elif DTYPE == 3
    return __uint_as_float((u32)x << 16);
#elif DTYPE == 12 || DTYPE == 13
    // As lib/plan/src/float8.rs: the difference of the biases as a factor, which makes subnormals right too.
    const u32 magnitude = x & 0x7fu;
    const u32 finite = __float_as_uint(__uint_as_float(magnitude << (23 - MANTISSA)) * __uint_as_float((254u - BIAS) << 23));
    const u32 special = magnitude < BEHIND ? 0 : magnitude == BEHIND && DTYPE == 13 ? 0x7f800000u : 0x7fc00000u;
    return __uint_as_float(finite | special | (u32)(x & 0x80u) << 24);
#else
    return (Acc)x;
#endif
}

__device__ __forceinline__ Stored narrow(Acc x) {
#if DTYPE == 2
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#elif DTYPE == 3
    // To nearest, ties to even; a NaN stays one (its upper bits might all be zero).
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x40u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#elif DTYPE == 12 || DTYPE == 13
    // To nearest, ties to even. Overflow shows: the hardware's conversion would saturate at the greatest finite value.
    const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, dropped = 23 - MANTISSA;
    const u32 sign = (bits >> 24) & 0x80u;
    if (magnitude > 0x7f800000u) return (Stored)(sign | 0x7fu);
    // If rounding could only go past the greatest finite value.
    const u32 most = ((BEHIND >> MANTISSA) + 127 - BIAS) << 23 | (BEHIND & ((1u << MANTISSA) - 1)) << dropped;
    if (magnitude >= most) return (Stored)(sign | BEHIND);
    // A subnormal is rounded by adding a float whose last place is that of the subnormals.
    const u32 magic = (127u + 24 - BIAS - MANTISSA) << 23;
    if (magnitude < (128u - BIAS) << 23) {
        return (Stored)(sign | (__float_as_uint(__uint_as_float(magnitude) + __uint_as_float(magic)) - magic));
    }
    const u32 odd = (magnitude >> dropped) & 1u;
    return (Stored)(sign | (magnitude - ((127u - BIAS) << 23) + ((1u << (dropped - 1)) - 1) + odd) >> dropped);
#else
    return (Stored)x;
#endif
}

// Signed overflow has no meaning in C; the sum wraps as it does on the CPU.
#if DTYPE == 4 || DTYPE == 6 || DTYPE == 10
typedef u32 Wrapping;
#elif DTYPE == 8
typedef u64 Wrapping;
#else
typedef Acc Wrapping;
#endif

// A product rounded to the type at once: these intrinsics are not merged with a sum that follows.
__device__ __forceinline__ Stored times(Stored x, Acc factor) {
#if DTYPE == 1
    return __dmul_rn(x, factor);
#elif defined(IS_FLOAT)
    return narrow(__fmul_rn(widen(x), factor));
#else
    return narrow((Acc)((Wrapping)widen(x) * (Wrapping)factor));
#endif
}

// Sums and averages that are rounded once: `exact.cuh` has them.
#if defined(EXACT_SUMS) && (OP == 0 || OP == 4) && (DTYPE == 0 || DTYPE == 2 || DTYPE == 3)
#define EXACT 1
#else
#define EXACT 0
#endif

// `avg` of floats multiplies every rank's input by 1/n before the sum, so that large values do not overflow; integers
// are divided behind it, in `finish`. (reduce/average.rs)
#if OP == 4 && defined(IS_FLOAT) && !EXACT
#define SCALES 1
#else
#define SCALES 0
#endif

// A rank's input as it goes into the reduction.
__device__ __forceinline__ Stored operand(Stored x) {
#if SCALES
    return times(x, widen(narrow((Acc)1 / (Acc)RANKS)));
#else
    return x;
#endif
}

__device__ __forceinline__ Acc combine(Acc a, Acc b) {
#if OP == 0 || OP == 4
    return (Acc)((Wrapping)a + (Wrapping)b);
#elif OP == 1
    return (Acc)((Wrapping)a * (Wrapping)b);
#elif OP == 5
    return a & b;
#elif OP == 6
    return a | b;
#elif OP == 7
    return a ^ b;
#else
#ifdef IS_FLOAT
    if (a != a || b != b) return a + b; // NaN if one is
#endif
#if OP == 2
    return b < a ? b : a;
#elif OP == 3
    return b > a ? b : a;
#else
#error "OP has no such code"
#endif
#endif
}

// Behind the last value.
__device__ __forceinline__ Stored finish(Acc x) {
#if OP == 4 && !SCALES
    // The sum is that of the stored type: it wrapped there.
    return (Stored)((Acc)(Stored)x / (Acc)RANKS);
#else
    return narrow(x);
#endif
}

#define PER_WORD (8 / sizeof(Stored))

union Elements {
    u64 word;
    Stored of[PER_WORD];
};

#if !EXACT
// The reduction of one word of every rank's input, always in the order of the ranks: the same bits on each of them.
__device__ __forceinline__ u64 reduce_words(const u64 (&in)[RANKS]) {
    Elements out;
#pragma unroll
    for (int e = 0; e < (int)PER_WORD; e++) {
        Elements x;
        x.word = in[0];
        Acc acc = widen(operand(x.of[e]));
#pragma unroll
        for (int s = 1; s < RANKS; s++) {
            x.word = in[s];
            acc = combine(acc, widen(operand(x.of[e])));
        }
        out.of[e] = finish(acc);
    }
    return out.word;
}
#endif

#endif // DTYPE
