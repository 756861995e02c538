//! Exact sums: all operands of an element at once, and one rounding (`TINYNCCL_SUM=exact`).
//!
//! An `f64` has 29 bits more than an `f32`, and an `f32` 13 or 16 more than an f16 or bf16. A sum of values whose
//! exponents lie within those bits, less one for each doubling of their number, is exact in the wider type in any
//! order: every partial sum is a multiple of the smallest operand's last place, and fits. So the loops add in the
//! wider type and keep the largest and the smallest magnitude of each element beside the sum. 16-bit floats that lie
//! further apart are added in `f64`, and what lies too far apart for that in [`Fixed`], an integer that holds every
//! `f32` and so every sum of them (Kulisch's long accumulator). Its value reaches the last conversion *rounded to odd*:
//! 53 bits of which the last says whether more follow, from which any shorter rounding is right (S. Boldo and
//! G. Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
//!
//! An average is the exact sum divided by the number of ranks and rounded once. NaN is one NaN: positive, quiet,
//! without payload. A sum of zero is +0 unless every operand is -0.

use std::ops::Range;

use super::bf16::Bf16Pair;
use super::bits::Bits16;
use super::f16::{self, F16};
use super::ops::{Op, Unit};
use super::{Kernels, Level, ReduceDualFn, ReduceFn, simd};
#[cfg(target_arch = "x86_64")]
use super::{exact_16, exact_512};
use tinynccl_plan::dtype::{DType, ReduceOp};

/// One bf16.
type Bf16 = Bits16<0x7f80>;

/// `out[i] = sources[0][i] + sources[1][i] + ...` for `n` elements, divided by `divisor`, rounded once. `out` may be
/// exactly one of the sources; no other overlap.
///
/// # Safety
/// The sources are readable and `out` is writable for `n` elements, and all are aligned to the element.
pub type ExactFn = unsafe fn(sources: &[*const u8], out: *mut u8, n: usize, divisor: f64);

/// The exact sum, or average, of one value of each rank.
#[derive(Debug, Clone, Copy)]
pub struct Exact {
    sum: ExactFn,
    divisor: f64,
}

impl Exact {
    /// For `op` of `dtype` over this many operands; `None` for other operators and types ([`covers`]).
    pub fn new(dtype: DType, op: Option<ReduceOp>, operands: usize) -> Option<Exact> {
        Exact::at(Level::detect(), dtype, op, operands)
    }

    /// As [`Exact::new`] for an instruction set that this machine has.
    pub(super) fn at(level: Level, dtype: DType, op: Option<ReduceOp>, operands: usize) -> Option<Exact> {
        let divisor = match op {
            Some(ReduceOp::Avg) => operands as f64,
            Some(ReduceOp::Sum) => 1.0,
            _ => return None,
        };
        #[cfg(target_arch = "x86_64")]
        let halves = |wide: ExactFn, narrow: ExactFn| {
            (level >= Level::Avx2 && divisor.to_bits() << 12 == 0)
                .then(|| if level == Level::Avx512 { wide } else { narrow })
        };
        let sum = match dtype {
            DType::F16 => simd::exact_at::<F16>(level),
            DType::Bf16 => simd::exact_at::<Bf16>(level),
            #[cfg(target_arch = "x86_64")]
            DType::F32 if level >= Level::Avx512 => exact_512::sum,
            DType::F32 => simd::exact_at::<f32>(level),
            _ => return None,
        };
        #[cfg(target_arch = "x86_64")]
        let sum = match dtype {
            // Quotients by a power of two are exact, and so are their reciprocals.
            DType::Bf16 => halves(exact_16::avx512::bf16, exact_16::avx2::bf16).unwrap_or(sum),
            DType::F16 => halves(exact_16::avx512::f16, exact_16::avx2::f16).unwrap_or(sum),
            _ => sum,
        };
        Some(Exact { sum, divisor })
    }

    /// Adds `sources`, at least one, into `out`.
    ///
    /// # Safety
    /// As [`ExactFn`].
    #[inline]
    pub unsafe fn sum(&self, sources: &[*const u8], out: *mut u8, n: usize) {
        // SAFETY: forwarded from the caller; the function is that of the type.
        unsafe { (self.sum)(sources, out, n, self.divisor) }
    }
}

/// True for the sums and averages that can be exact: those of f16, bf16 and f32.
pub fn covers(dtype: DType, op: Option<ReduceOp>) -> bool {
    matches!(op, Some(ReduceOp::Sum | ReduceOp::Avg)) && matches!(dtype, DType::F16 | DType::Bf16 | DType::F32)
}

/// The pairwise functions of two ranks, whose one addition is the whole sum: one rounding to begin with.
pub(super) fn of_two(level: Level, dtype: DType, op: ReduceOp, kernels: Kernels) -> Kernels {
    let (reduce, reduce_dual): (ReduceFn, ReduceDualFn) = match (op, dtype) {
        (ReduceOp::Avg, DType::F16) => (mean_of_two::<F16>, mean_of_two_dual::<F16>),
        (ReduceOp::Avg, DType::Bf16) => (mean_of_two::<Bf16>, mean_of_two_dual::<Bf16>),
        (ReduceOp::Avg, _) => (mean_of_two::<f32>, mean_of_two_dual::<f32>),
        #[cfg(target_arch = "x86_64")]
        (_, DType::F16) if level >= Level::Avx2 => super::f16c::exact_sum(level),
        (_, DType::F16) => simd::baseline::pair::<F16, SumOfTwo>(),
        (_, DType::Bf16) => simd::reduce_at::<Bf16Pair, SumOfTwo>(level),
        _ => simd::reduce_at::<f32, SumOfTwo>(level),
    };
    Kernels { reduce, reduce_dual, ..kernels }
}

/// A sum of two operands, with one NaN. In `f32` a sum of two f16 or bf16 is rounded once more, which changes nothing:
/// 24 bits are two more than twice theirs (S. Figueroa, "When is double rounding innocuous?", 1995).
pub(super) struct SumOfTwo;

impl Op<f32> for SumOfTwo {
    #[inline(always)]
    fn apply(a: f32, b: f32) -> f32 {
        one_nan(a + b)
    }
}

/// `x`, or the NaN that stands for all.
#[inline(always)]
pub(super) fn one_nan(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(0x7fc0_0000) } else { x }
}

/// # Safety
/// As [`ReduceFn`].
unsafe fn mean_of_two<E: Element>(a: *const u8, b: *const u8, out: *mut u8, n: usize) {
    if let Some(exact) = Exact::new(E::DTYPE, Some(ReduceOp::Avg), 2) {
        // SAFETY: forwarded from the caller.
        unsafe { exact.sum(&[a, b], out, n) }
    }
}

/// # Safety
/// As [`ReduceDualFn`].
unsafe fn mean_of_two_dual<E: Element>(a: *const u8, b: *const u8, out: *mut u8, copy: *mut u8, n: usize) {
    // SAFETY: forwarded from the caller.
    unsafe {
        mean_of_two::<E>(a, b, out, n);
        if out != copy {
            out.copy_to_nonoverlapping(copy, n * size_of::<E>());
        }
    }
}

/// A float whose sums are exact here. Its exponents are those of `f32`, or fewer.
pub(super) trait Element: Unit {
    /// Its type.
    const DTYPE: DType;
    /// Bits of the significand, the leading one included.
    const PRECISION: u32;
    /// Largest exponent field, that of infinity.
    const EXPONENTS: u32;
    /// Magnitude, as bits: a larger number is a larger magnitude.
    fn magnitude(self) -> u32;
    /// Its value.
    fn widen(self) -> f32;
    /// The nearest value, ties to even, of a number that is exact or rounded to odd. One NaN.
    fn narrow(x: f64) -> Self;
    /// A quotient rounded to odd, made ready for [`Element::narrow`].
    #[inline(always)]
    fn settle(x: f64) -> f64 {
        x
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    const PRECISION: u32 = 24;
    const EXPONENTS: u32 = 255;
    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_bits() & 0x7fff_ffff
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f64) -> f32 {
        one_nan(x as f32)
    }
}

impl Element for Bf16 {
    const DTYPE: DType = DType::Bf16;
    const PRECISION: u32 = 8;
    const EXPONENTS: u32 = 255;
    #[inline(always)]
    fn magnitude(self) -> u32 {
        (self.0 & 0x7fff).into()
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn narrow(x: f64) -> Bf16 {
        let bits = one_nan(to_odd(x)).to_bits();
        Bits16((bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
    /// Quotients below the smallest normal number are rounded here: an `f32` has no bits to spare for them.
    #[inline(always)]
    fn settle(x: f64) -> f64 {
        /// Numbers near it are multiples of 2^-133, the smallest bf16.
        const COARSE: f64 = f64::from_bits((1023 + 52 - 133) << 52 | 1 << 51);
        let rounded = ((x.abs() + COARSE) - COARSE).copysign(x);
        if x.abs() < f64::from(f32::MIN_POSITIVE) { rounded } else { x }
    }
}

impl Element for F16 {
    const DTYPE: DType = DType::F16;
    const PRECISION: u32 = 11;
    const EXPONENTS: u32 = 31;
    #[inline(always)]
    fn magnitude(self) -> u32 {
        (self.0 & 0x7fff).into()
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        f16::widen(self)
    }
    #[inline(always)]
    fn narrow(x: f64) -> F16 {
        f16::narrow(one_nan(to_odd(x)))
    }
}

/// `x` rounded to odd: cut to the 24 bits of an `f32`, the last of which is set if one was cut off. For numbers in the
/// range of normal `f32`, and those below that need no rounding.
#[inline(always)]
fn to_odd(x: f64) -> f32 {
    const CUT: u64 = (1 << 29) - 1;
    let bits = x.to_bits();
    f64::from_bits((bits | ((bits & CUT) + CUT)) & !CUT) as f32
}

/// `x / divisor` rounded to odd. Its first 31 bits times the divisor (of at most 22) need no rounding, so their
/// difference from `x` shows whether the quotient lies behind them, before them, or is what they say.
#[inline(always)]
fn divided(x: f64, divisor: f64) -> f64 {
    let short = f64::from_bits((x / divisor).to_bits() & !0x3f_ffff);
    let rest = (x - short * divisor).to_bits() as i64;
    // Magnitudes of one sign are ordered as their bits are: one more or less is a number next to it.
    let step = if rest & i64::MAX == 0 { 0 } else { 1 - 2 * ((rest ^ x.to_bits() as i64) >> 63 & 1) };
    let beside = f64::from_bits(short.to_bits().wrapping_add(step as u64));
    // Infinities and NaN have no rest.
    if x.abs() < f64::INFINITY { beside } else { x }
}

/// Elements that the loops work on together: their sums and magnitudes fill the vector registers.
pub(super) const LANES: usize = 16;

/// Facts of a call that all its elements share.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    divisor: f64,
    /// Exponents that operands may lie apart for an exact sum in a float of 24 bits, and in one of 53.
    apart: [u32; 2],
    /// The first exponent with which sums may overflow in `f32`.
    most: u32,
}

impl Terms {
    pub(super) fn new<E: Element>(operands: usize, divisor: f64) -> Terms {
        let doublings = operands.next_power_of_two().trailing_zeros();
        let apart = [24, 53].map(|bits: u32| bits.saturating_sub(E::PRECISION + doublings));
        Terms { divisor, apart, most: E::EXPONENTS - if E::EXPONENTS == 255 { 1 + doublings } else { 0 } }
    }

    pub(super) fn divisor(&self) -> f64 {
        self.divisor
    }

    /// Exponents that operands may lie apart in `f32`.
    pub(super) fn apart_narrow(&self) -> u32 {
        self.apart[0]
    }

    /// Exponents that operands may lie apart in `f64`.
    pub(super) fn apart(&self) -> u32 {
        self.apart[1]
    }

    /// The first exponent with which sums may overflow in `f32`.
    pub(super) fn most(&self) -> u32 {
        self.most
    }
}

/// [`ExactFn`] for one type.
#[inline(always)]
pub(super) unsafe fn sum<E: Element>(sources: &[*const u8], out: *mut u8, n: usize, divisor: f64) {
    let terms = Terms::new::<E>(sources.len(), divisor);
    let whole = n / LANES * LANES;
    // SAFETY: forwarded from the caller; `out` has room for a block, and every source was read up to its end.
    unsafe {
        for at in (0..whole).step_by(LANES) {
            let block: [E; LANES] = wide_block(sources, at, &terms);
            out.cast::<E>().add(at).cast::<[E; LANES]>().write_unaligned(block);
        }
        rest::<E>(sources, out, whole..n, divisor);
    }
}

/// Elements at the end, one by one.
///
/// # Safety
/// As [`ExactFn`], for this range.
pub(super) unsafe fn rest<E: Element>(sources: &[*const u8], out: *mut u8, range: Range<usize>, divisor: f64) {
    for at in range {
        // SAFETY: by the caller.
        unsafe { out.cast::<E>().add(at).write(one::<E>(sources, at, divisor)) };
    }
}

/// The quotients of exact sums.
#[inline(always)]
fn means<E: Element>(sums: &[f64; LANES], terms: &Terms) -> [E; LANES] {
    let reciprocal = 1.0 / terms.divisor;
    match terms.divisor.to_bits() << 12 == 0 {
        true => sums.map(|sum| E::narrow(E::settle(sum * reciprocal))),
        false => sums.map(|sum| E::narrow(E::settle(divided(sum, terms.divisor)))),
    }
}

/// A block in `f64`.
///
/// # Safety
/// As [`ExactFn`], for the block from `at` on.
#[inline(always)]
unsafe fn wide_block<E: Element>(sources: &[*const u8], at: usize, terms: &Terms) -> [E; LANES] {
    let mut sums = [-0.0f64; LANES];
    let (mut most, mut least) = ([0u32; LANES], [u32::MAX; LANES]);
    for source in sources {
        // SAFETY: by the caller the source holds the block; any bits are valid.
        let values = unsafe { source.cast::<E>().add(at).cast::<[E; LANES]>().read_unaligned() };
        for lane in 0..LANES {
            sums[lane] += f64::from(values[lane].widen());
            let magnitude = values[lane].magnitude();
            most[lane] = most[lane].max(magnitude);
            // Zeros have every exponent.
            least[lane] = least[lane].min(magnitude.wrapping_sub(1));
        }
    }
    let mut block = if terms.divisor == 1.0 { sums.map(E::narrow) } else { means(&sums, terms) };
    let (fraction, apart) = (E::PRECISION - 1, terms.apart());
    let is_far = |lane: usize| most[lane] >> fraction > (least[lane].wrapping_add(1) >> fraction) + apart;
    if (0..LANES).fold(false, |far, lane| far | is_far(lane)) {
        for lane in (0..LANES).filter(|&lane| is_far(lane)) {
            // SAFETY: by the caller.
            block[lane] = unsafe { one(sources, at + lane, terms.divisor) };
        }
    }
    block
}

/// The result of one element, whatever its operands are.
///
/// # Safety
/// As [`ExactFn`]; `at` is below `n`.
#[inline(never)]
pub(super) unsafe fn one<E: Element>(sources: &[*const u8], at: usize, divisor: f64) -> E {
    // SAFETY: by the caller.
    let operand = |source: &*const u8| unsafe { source.cast::<E>().add(at).read() };
    let (mut sum, mut most, mut least) = (-0.0f64, 0, u32::MAX);
    for x in sources.iter().map(operand) {
        sum += f64::from(x.widen());
        most = most.max(x.magnitude());
        least = least.min(x.magnitude().wrapping_sub(1));
    }
    let (fraction, apart) = (E::PRECISION - 1, Terms::new::<E>(sources.len(), divisor).apart());
    let high = most >> fraction;
    if high > (least.wrapping_add(1) >> fraction) + apart && high < E::EXPONENTS {
        sum = total(sources.iter().map(|source| operand(source).widen().into()));
    }
    E::narrow(E::settle(divided(sum, divisor)))
}

/// The exact sum of finite values of `f32`, some not zero, rounded to odd.
fn total(operands: impl Iterator<Item = f64>) -> f64 {
    let mut fixed = Fixed::default();
    operands.for_each(|x| fixed.add(x));
    fixed.rounded_to_odd()
}

/// Exponent of the last bit of [`Fixed`], which is that of the smallest `f32`.
const LAST: i32 = -149;

/// A sum of finite `f32` values: a two's complement integer of 320 bits in units of 2^-149, least word first. The
/// greatest `f32` has 277 of them, so 2^42 values fit.
#[derive(Debug, Default)]
struct Fixed([u64; 5]);

impl Fixed {
    /// Adds a finite value of `f32`.
    fn add(&mut self, x: f64) {
        // All of them are normal as `f64`, and the last 29 bits of the significand are zeros.
        let bits = x.to_bits();
        let exponent = (bits >> 52 & 0x7ff) as i32;
        if exponent == 0 {
            return;
        }
        // In units of 2^(exponent - 1023 - 52); a subnormal `f32` ends before the unit that a normal one has.
        let significand = u128::from(bits & ((1 << 52) - 1) | 1 << 52);
        let place = exponent - 1023 - 52 - LAST;
        let (word, part) = match place {
            0.. => (place as usize / 64, significand << (place % 64)),
            _ => (0, significand >> -place),
        };
        let (low, high) = (part as u64, (part >> 64) as u64);
        let mut carry = 0;
        let mut next = [low, high].into_iter();
        for at in &mut self.0[word..] {
            let term = u128::from(next.next().unwrap_or(0)) + carry;
            let value = if x < 0.0 { u128::from(*at).wrapping_sub(term) } else { u128::from(*at) + term };
            *at = value as u64;
            // A borrow is a negative number's upper half.
            carry = if x < 0.0 { u128::from(value >> 64 != 0) } else { value >> 64 };
        }
    }

    /// Its value rounded to odd.
    fn rounded_to_odd(&self) -> f64 {
        let negative = self.0[4] >> 63 == 1;
        let mut words = self.0;
        if negative {
            let mut carry = true;
            for word in &mut words {
                (*word, carry) = (!*word).overflowing_add(carry.into());
            }
        }
        let Some(top) = (0..5).rev().find(|&i| words[i] != 0) else { return 0.0 };
        let below = |i: usize| top.checked_sub(i).map_or(0, |i| words[i]);
        // The first 64 bits from the first one on.
        let zeros = words[top].leading_zeros();
        let pair = u128::from(words[top]) << 64 | u128::from(below(1));
        let first = (pair << zeros >> 64) as u64;
        let more = pair << zeros << 64 != 0 || words[..top.saturating_sub(1)].iter().any(|&word| word != 0);
        let kept = first >> 11 | u64::from(first << 53 != 0 || more);
        let exponent = (top as i32 * 64 + 63 - zeros as i32) - 52 + LAST;
        // In the range of normal numbers: 2^-149 to 2^171.
        let value = kept as f64 * f64::from_bits(((exponent + 1023) as u64) << 52);
        if negative { -value } else { value }
    }
}
