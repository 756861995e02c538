// Exact sums of all ranks' values, rounded once (TINYNCCL_SUM=exact): bit for bit those of the CPU (reduce/exact.rs).
// They are added in a wider type, where their sum is exact unless their exponents lie far apart.

#if defined(DTYPE) && EXACT

// Bits of the significand, bits of the NaN that stands for all, and the exponent of infinity.
#if DTYPE == 0
#define PRECISION 24
#define ONE_NAN __uint_as_float(0x7fc00000u)
#define SPECIAL 255u
#elif DTYPE == 2
#define PRECISION 11
#define ONE_NAN (Stored)0x7e00
#define SPECIAL 31u
#else
#define PRECISION 8
#define ONE_NAN (Stored)0x7fc0
#define SPECIAL 255u
#endif

__device__ __forceinline__ u32 magnitude(Stored x) {
#if DTYPE == 0
    return __float_as_uint(x) & 0x7fffffffu;
#else
    return x & 0x7fffu;
#endif
}

// `high`, or the odd number beside it if there is a rest: from that any shorter rounding is right.
__device__ __forceinline__ double to_odd(double high, double rest) {
    const long long bits = __double_as_longlong(high);
    if (rest == 0 || (bits & 1)) return high;
    return __longlong_as_double(bits + ((rest > 0) == (high > 0) ? 1 : -1));
}

// The value nearest to a sum that is exact or rounded to odd.
__device__ __forceinline__ Stored nearest(double x) {
    if (x != x) return ONE_NAN;
#if DTYPE == 0
    return __double2float_rn(x);
#elif DTYPE == 2
    unsigned short half;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(half) : "d"(x));
    return half;
#else
    // To odd again, at the length of an f32.
    const float cut = __double2float_rz(x);
    const u32 bits = __float_as_uint(cut) | ((double)cut != x ? 1u : 0u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// The sum behind it divided by the number of ranks, for an average.
template <int N> __device__ __forceinline__ double quotient(double x) {
#if OP == 4
    if ((N & (N - 1)) == 0) return x * (1.0 / N);
    const double q = __ddiv_rn(x, (double)N);
    if (!(fabs(q) < __longlong_as_double(0x7ff0000000000000ll))) return q;
    return to_odd(q, __fma_rn(-q, (double)N, x));
#else
    return x;
#endif
}

// Finite values that lie far apart: their sum as an expansion of N numbers, each a part that those above it have no
// room for (J. Shewchuk, "Adaptive precision floating-point arithmetic", 1997), and that rounded to odd.
template <int N> __device__ __noinline__ double far_sum(const float* x) {
    double parts[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        double sum = x[k];
#pragma unroll
        for (int i = 0; i < k; i++) {
            const double a = sum, b = parts[i];
            sum = __dadd_rn(a, b);
            const double c = __dsub_rn(sum, a);
            parts[i] = __dadd_rn(__dsub_rn(a, __dsub_rn(sum, c)), __dsub_rn(b, c));
        }
        parts[k] = sum;
    }
    double sum = parts[N - 1], rest = 0;
#pragma unroll
    for (int i = N - 2; i >= 0; i--) {
        if (rest != 0) continue;
        const double before = sum;
        sum = __dadd_rn(before, parts[i]);
        rest = __dsub_rn(parts[i], __dsub_rn(sum, before));
    }
    return sum == 0 ? 0.0 : to_odd(sum, rest);
}

__device__ __forceinline__ Stored narrow_or_nan(float x) {
    return x != x ? ONE_NAN : narrow(x);
}

template <int N> __device__ __forceinline__ Stored exact(const Stored (&x)[N]) {
    if (N == 2 && OP == 0) {
        // One rounding to begin with: an f32 has more than twice the bits of an f16 or bf16.
        return narrow_or_nan(__fadd_rn(widen(x[0]), widen(x[1])));
    }
#if DTYPE != 0
    // So has an average, of halves: those are exact, and their sum cannot overflow.
    if (N == 2) return narrow_or_nan(__fadd_rn(__fmul_rn(widen(x[0]), 0.5f), __fmul_rn(widen(x[1]), 0.5f)));
#endif
    // A sum is a multiple of its smallest operand's last place.
    constexpr u32 doublings = N <= 2 ? 1 : N <= 4 ? 2 : 3;
    constexpr u32 apart = 53 - PRECISION - doublings;
    u32 most = 0, least = ~0u;
#pragma unroll
    for (int s = 0; s < N; s++) {
        const u32 m = magnitude(x[s]);
        most = max(most, m);
        least = min(least, m - 1); // not zeros
    }
    most >>= PRECISION - 1;
    least = (least + 1) >> (PRECISION - 1);
#if DTYPE != 0
    // Most sums of 16 bits are exact in f32, and so is a quotient by a power of two. Those of bf16 may overflow there.
    constexpr u32 overflows = DTYPE == 3 ? SPECIAL - 1 - doublings : SPECIAL;
    if ((OP == 0 || (N & (N - 1)) == 0) && most <= least + (24 - PRECISION - doublings) && most < overflows) {
        float sum = widen(x[0]);
#pragma unroll
        for (int s = 1; s < N; s++) sum = __fadd_rn(sum, widen(x[s]));
        return narrow_or_nan(OP == 4 ? __fmul_rn(sum, 1.0f / N) : sum);
    }
#endif
    double sum = widen(x[0]);
#pragma unroll
    for (int s = 1; s < N; s++) sum = __dadd_rn(sum, (double)widen(x[s]));
    if (apart < SPECIAL && most > least + apart && most < SPECIAL) {
        float wide[N];
#pragma unroll
        for (int s = 0; s < N; s++) wide[s] = widen(x[s]);
        sum = far_sum<N>(wide);
    }
    return nearest(quotient<N>(sum));
}

__device__ __forceinline__ u64 reduce_words(const u64 (&in)[RANKS]) {
    Elements words[RANKS], out;
#pragma unroll
    for (int s = 0; s < RANKS; s++) words[s].word = in[s];
#pragma unroll
    for (int e = 0; e < (int)PER_WORD; e++) {
        Stored x[RANKS];
#pragma unroll
        for (int s = 0; s < RANKS; s++) x[s] = words[s].of[e];
        out.of[e] = exact(x);
    }
    return out.word;
}

#endif
