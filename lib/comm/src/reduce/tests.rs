//! Every level of this machine against a plain reference that shares no code with the kernels.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use tinynccl_plan::{F8E4M3, F8E5M2};

/// Meaning of the operators, one element at a time.
trait Reference: bytemuck::Pod + std::fmt::Debug {
    const DTYPE: DType;
    fn combine(op: ReduceOp, a: Self, b: Self) -> Self;
    /// Factor or division of an average: a float times 1/n, an integer over n.
    fn part(self, n: usize) -> Self;
    /// Rounded; floats only.
    fn times(self, factor: f64) -> Self;
    /// Same bits, or both NaN.
    fn same(self, other: Self) -> bool;
    /// An element from random bits, special values often.
    fn sample(bits: u64) -> Self;
}

macro_rules! integer {
    ($($t:ident $d:ident),*) => {$(
        impl Reference for $t {
            const DTYPE: DType = DType::$d;
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
                    ReduceOp::Prod => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::BitAnd => a & b,
                    ReduceOp::BitOr => a | b,
                    ReduceOp::BitXor => a ^ b,
                }
            }
            fn part(self, n: usize) -> Self {
                (i128::from(self) / n as i128) as $t
            }
            fn times(self, _: f64) -> Self {
                unreachable!("integers are not scaled")
            }
            fn same(self, other: Self) -> bool {
                self == other
            }
            fn sample(bits: u64) -> Self {
                let special = [0, 1, 2, $t::MAX, $t::MIN, $t::MAX - 1, $t::MIN + 1, (0 as $t).wrapping_sub(1)];
                if bits % 4 == 0 { special[(bits >> 8) as usize % special.len()] } else { (bits >> 32 ^ bits << 20) as $t }
            }
        }
    )*};
}
integer!(i8 I8, u8 U8, i32 I32, u32 U32, i64 I64, u64 U64, i16 I16, u16 U16);

/// The 16-bit floats convert in software (`_const`), not with the instructions that the kernels use. `$bits` and
/// `$infinity`: the integer type and the bits of infinity; `$wide`: the type that the arithmetic is done in.
macro_rules! float {
    ($($t:ident $d:ident $bits:ident $infinity:literal $wide:ident $up:expr, $down:expr;)*) => {$(
        impl Reference for $t {
            const DTYPE: DType = DType::$d;
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                let (up, down): (fn($t) -> $wide, fn($wide) -> $t) = ($up, $down);
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => down(up(a) + up(b)),
                    ReduceOp::Prod => down(up(a) * up(b)),
                    // No call asks for them, but the kernels are there.
                    ReduceOp::BitAnd => $t::from_bits(a.to_bits() & b.to_bits()),
                    ReduceOp::BitOr => $t::from_bits(a.to_bits() | b.to_bits()),
                    ReduceOp::BitXor => $t::from_bits(a.to_bits() ^ b.to_bits()),
                    _ if a.is_nan() || b.is_nan() => down($wide::NAN),
                    ReduceOp::Min => if up(a).total_cmp(&up(b)).is_lt() { a } else { b },
                    ReduceOp::Max => if up(a).total_cmp(&up(b)).is_gt() { a } else { b },
                }
            }
            fn part(self, n: usize) -> Self {
                let (up, down): (fn($t) -> $wide, fn($wide) -> $t) = ($up, $down);
                self.times(up(down((1.0 / n as f64) as $wide)).into())
            }
            fn times(self, factor: f64) -> Self {
                let (up, down): (fn($t) -> $wide, fn($wide) -> $t) = ($up, $down);
                down(up(self) * factor as $wide)
            }
            fn same(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || self.is_nan() && other.is_nan()
            }
            fn sample(bits: u64) -> Self {
                // Bits of zero, the least subnormal, the least normal, the greatest finite, infinity, and two NaNs.
                let lowest_exponent: $bits = $infinity & ($infinity as $bits).wrapping_neg();
                let special = [0, 1, lowest_exponent - 1, lowest_exponent, $infinity - 1, $infinity, ($infinity as $bits).saturating_add(1), $bits::MAX >> 1];
                let magnitude = match bits % 4 {
                    0 => special[(bits >> 8) as usize % special.len()],
                    // Near one, so that sums round.
                    1 => $t::from_f32(1.0 + (bits >> 40) as f32 / 1e6).to_bits() ^ (bits >> 12 & 7) as $bits,
                    _ => (bits >> 16 ^ bits << 20) as $bits,
                };
                $t::from_bits(magnitude ^ ((bits >> 5 & 1) as $bits) << ($bits::BITS - 1))
            }
        }
    )*};
}
float! {
    f32 F32 u32 0x7f80_0000 f32 |x| x, |x| x;
    f64 F64 u64 0x7ff0_0000_0000_0000 f64 |x| x, |x| x;
    f16 F16 u16 0x7c00 f32 f16::to_f32_const, f16::from_f32_const;
    bf16 Bf16 u16 0x7f80 f32 bf16::to_f32_const, bf16::from_f32_const;
    // "Infinity" stands for the first magnitude that is none of the finite ones. `float8` has a separate reference.
    F8E4M3 F8E4M3 u8 0x7f f32 F8E4M3::to_f32, F8E4M3::from_f32;
    F8E5M2 F8E5M2 u8 0x7c f32 F8E5M2::to_f32, F8E5M2::from_f32;
}

/// `from_f32` for the primitive floats, which `half`'s types have.
trait FromF32 {
    fn from_f32(x: f32) -> Self;
}
impl FromF32 for f32 {
    fn from_f32(x: f32) -> f32 {
        x
    }
}
impl FromF32 for f64 {
    fn from_f32(x: f32) -> f64 {
        x.into()
    }
}

fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|&level| level <= Level::detect())
}

/// `$f::<T>($args)` for every element type.
macro_rules! for_every_dtype {
    ($f:ident) => {
        $f::<f32>();
        $f::<f64>();
        $f::<f16>();
        $f::<bf16>();
        $f::<i8>();
        $f::<u8>();
        $f::<i32>();
        $f::<u32>();
        $f::<i64>();
        $f::<u64>();
        $f::<i16>();
        $f::<u16>();
        $f::<F8E4M3>();
        $f::<F8E5M2>();
    };
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn elements<T: Reference>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::sample(self.next())).collect()
    }
}

fn expect<T: Reference>(got: &[T], want: &[T], what: std::fmt::Arguments<'_>) {
    assert_eq!(got.len(), want.len());
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!(g.same(w), "{} {what}, element {i}: got {g:?}, expected {w:?}", T::DTYPE);
    }
}

/// Destinations of the results, relative to the operands. The second is `None` for the single-result kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Apart,
    A,
    B,
    First,
}

const PLACES: [(Place, Option<Place>); 12] = {
    use Place::*;
    [
        (Apart, None),
        (A, None),
        (B, None),
        (Apart, Some(Apart)),
        (A, Some(Apart)),
        (B, Some(Apart)),
        (Apart, Some(A)),
        (Apart, Some(B)),
        (A, Some(B)),
        (B, Some(A)),
        (Apart, Some(First)),
        (A, Some(First)),
    ]
};

/// One call with guards around each buffer, each starting `offset` elements into its allocation.
fn check_call<T: Reference>(
    level: Level,
    op: ReduceOp,
    a: &[T],
    b: &[T],
    offset: usize,
    place: (Place, Option<Place>),
) {
    const GUARD: usize = 9;
    let n = a.len();
    let kernels = kernels_at(level, T::DTYPE, op).expect("level of this machine");
    let fill: T = bytemuck::pod_read_unaligned(&vec![0xa5u8; size_of::<T>()]);
    let buffer = |content: &[T]| {
        let mut all = vec![fill; offset + GUARD];
        all.extend_from_slice(content);
        all.resize(all.len() + GUARD, fill);
        all
    };
    // Four buffers: the operands, a first and a second result.
    let mut buffers = [buffer(a), buffer(b), buffer(&vec![fill; n]), buffer(&vec![fill; n])];
    let pointers = buffers.each_mut().map(|all| all[offset + GUARD..].as_mut_ptr().cast::<u8>());
    let index = |place, own| match place {
        Place::Apart => own,
        Place::A => 0,
        Place::B => 1,
        Place::First => 2,
    };
    let first = index(place.0, 2);
    let mut results = vec![first];
    // SAFETY: each buffer holds `n` elements past its pointer; the places are those that the contract allows.
    unsafe {
        match place.1 {
            None => (kernels.reduce)(pointers[0], pointers[1], pointers[first], n),
            Some(Place::First) => {
                (kernels.reduce_dual)(pointers[0], pointers[1], pointers[first], pointers[first], n);
            }
            Some(second) => {
                let second = index(second, 3);
                results.push(second);
                (kernels.reduce_dual)(pointers[0], pointers[1], pointers[first], pointers[second], n);
            }
        }
    }
    let want: Vec<T> = a.iter().zip(b).map(|(&a, &b)| T::combine(op, a, b)).collect();
    for (i, all) in buffers.iter().enumerate() {
        let start = offset + GUARD;
        let content = &all[start..start + n];
        let what = format_args!("{op} at {level}, n {n}, offset {offset}, {place:?}, buffer {i}").to_string();
        let original = [a, b].get(i).copied();
        match original {
            _ if results.contains(&i) => expect(content, &want, format_args!("{what}")),
            Some(operand) => assert_eq!(bytes(content), bytes(operand), "{what}: operand changed"),
            None => assert!(bytes(content).iter().all(|&x| x == 0xa5), "{what}: written without need"),
        }
        let guards = [bytes(&all[..start]), bytes(&all[start + n..])].concat();
        assert!(guards.iter().all(|&x| x == 0xa5), "{} {what}: wrote outside", T::DTYPE);
    }
}

fn bytes<T: Reference>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

#[test]
fn every_length_offset_and_place() {
    fn check<T: Reference>() {
        let mut random = Random(T::DTYPE as u64);
        for level in levels() {
            for op in ReduceOp::ALL {
                for n in (0..=67).chain([127, 128, 129, 1000]) {
                    let (a, b) = (random.elements::<T>(n), random.elements::<T>(n));
                    for place in PLACES {
                        check_call(level, op, &a, &b, n % 5 + random.next() as usize % 8, place);
                    }
                }
            }
        }
    }
    for_every_dtype!(check);
}

#[test]
fn a_buffer_combined_with_itself() {
    fn check<T: Reference>() {
        let x = Random(7).elements::<T>(67);
        for level in levels() {
            for op in ReduceOp::ALL {
                let kernels = kernels_at(level, T::DTYPE, op).expect("level of this machine");
                let want: Vec<T> = x.iter().map(|&x| T::combine(op, x, x)).collect();
                for dual in [false, true] {
                    let mut all = x.clone();
                    let mut copy = x.clone();
                    let at = all.as_mut_ptr().cast::<u8>();
                    // SAFETY: both buffers hold 67 elements.
                    unsafe {
                        if dual {
                            (kernels.reduce_dual)(at, at, at, copy.as_mut_ptr().cast(), 67);
                            expect(&copy, &want, format_args!("{op} of itself, copy"));
                        } else {
                            (kernels.reduce)(at, at, at, 67);
                        }
                    }
                    expect(&all, &want, format_args!("{op} of itself"));
                }
            }
        }
    }
    for_every_dtype!(check);
}

#[test]
fn no_elements_need_no_memory() {
    for level in levels() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                let kernels = kernels_at(level, dtype, op).expect("level of this machine");
                let (from, to) = (std::ptr::null(), std::ptr::null_mut());
                // SAFETY: zero elements: the pointers are not looked at.
                unsafe {
                    (kernels.reduce)(from, from, to, 0);
                    (kernels.reduce_dual)(from, from, to, to, 0);
                    kernels.divide.into_iter().for_each(|divide| divide(to, 0, 3));
                    kernels.scale.into_iter().for_each(|scale| scale(from, to, 0, 0.5));
                }
            }
        }
    }
}

/// Results of `op` at every level, for operands of any length.
fn all_levels<T: Reference>(op: ReduceOp, a: &[T], b: &[T]) {
    let want: Vec<T> = a.iter().zip(b).map(|(&a, &b)| T::combine(op, a, b)).collect();
    for level in levels() {
        let kernels = kernels_at(level, T::DTYPE, op).expect("level of this machine");
        let mut got = vec![T::zeroed(); a.len()];
        // SAFETY: three buffers of the same length.
        unsafe { (kernels.reduce)(a.as_ptr().cast(), b.as_ptr().cast(), got.as_mut_ptr().cast(), a.len()) };
        for (i, (&g, &w)) in got.iter().zip(&want).enumerate() {
            let (a, b) = (a[i], b[i]);
            assert!(g.same(w), "{} {op} of {a:?} and {b:?} at {level}: got {g:?}, expected {w:?}", T::DTYPE);
        }
    }
}

/// Every 16-bit pattern with each of a few hundred partners, both ways round.
#[test]
fn sixteen_bit_floats_of_every_value() {
    fn check<T: Reference>() {
        let every: Vec<T> = (0..=u16::MAX).map(|bits| bytemuck::pod_read_unaligned(&bits.to_ne_bytes())).collect();
        let mut random = Random(16);
        for _ in 0..96 {
            let partner = vec![T::sample(random.next()); every.len()];
            for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
                all_levels(op, &every, &partner);
                all_levels(op, &partner, &every);
            }
        }
        for divisor in (1..=17).chain([100, 255, 256, 257, 4096, 65_535, 65_536]) {
            all_levels_of_averages(&every, divisor);
        }
    }
    check::<f16>();
    check::<bf16>();
}

/// Every pair of 8-bit patterns.
#[test]
fn eight_bit_floats_of_every_pair_of_values() {
    fn check<T: Reference>() {
        let every: Vec<T> = (0..=u8::MAX).map(|bits| bytemuck::pod_read_unaligned(&[bits])).collect();
        for &one in &every {
            let partner = vec![one; every.len()];
            for op in ReduceOp::ALL {
                all_levels(op, &every, &partner);
            }
        }
        for divisor in (1..=300).chain([4096, 65_535, 65_536, 1 << 20]) {
            all_levels_of_averages(&every, divisor);
        }
    }
    check::<F8E4M3>();
    check::<F8E5M2>();
}

#[test]
fn portable_f16_conversions_are_exact() {
    for bits in 0..=u16::MAX {
        let (ours, want) = (super::f16::widen(bits::Bits16(bits)), half::f16::from_bits(bits).to_f32_const());
        assert!(ours.to_bits() == want.to_bits() || ours.is_nan() && want.is_nan(), "{bits:#06x}");
        if !want.is_nan() {
            assert_eq!(super::f16::narrow(ours).0, bits);
        }
    }
    // Every exponent, and mantissas on, just below and just above each tie.
    for high in 0..=u16::MAX >> 3 {
        for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000, 0x3001] {
            for sign in [0, 1 << 31] {
                let value = f32::from_bits((u32::from(high) << 18 | low) ^ sign);
                let (ours, want) = (super::f16::narrow(value).0, half::f16::from_f32_const(value));
                assert!(ours == want.to_bits() || want.is_nan() && half::f16::from_bits(ours).is_nan(), "{value:e}");
            }
        }
    }
}

/// One end of an average over `n` ranks at every level: apart, and in place.
fn all_levels_of_averages<T: Reference>(x: &[T], n: usize) {
    let want: Vec<T> = x.iter().map(|&x| x.part(n)).collect();
    for level in levels() {
        let (mut apart, mut in_place) = (vec![T::zeroed(); x.len()], x.to_vec());
        let at = in_place.as_mut_ptr().cast::<u8>();
        // SAFETY: buffers of that length.
        unsafe {
            match Scale::at(level, T::DTYPE, 1.0 / n as f64) {
                Some(scale) => {
                    scale.apply(x.as_ptr().cast(), apart.as_mut_ptr().cast(), x.len());
                    scale.apply(at, at, x.len());
                }
                None => {
                    let kernels = kernels_at(level, T::DTYPE, ReduceOp::Avg).expect("level of this machine");
                    (kernels.divide.expect("integers are divided"))(at, x.len(), n);
                    apart.copy_from_slice(&in_place);
                }
            }
        }
        for (i, &w) in want.iter().enumerate() {
            let (x, apart, in_place) = (x[i], apart[i], in_place[i]);
            let what = format_args!("{} {x:?} over {n} ranks at {level}", T::DTYPE);
            assert!(apart.same(w) && in_place.same(w), "{what}: got {apart:?} and {in_place:?}, expected {w:?}");
        }
    }
}

#[test]
fn averages_over_every_small_and_some_large_number_of_ranks() {
    fn check<T: Reference>() {
        let mut random = Random(3);
        let powers = (1..=16).flat_map(|p| [(1 << p) - 1, 1 << p, (1 << p) + 1]);
        let large = [100_003, u32::MAX as usize, 1 << 32, (1 << 32) + 1, usize::MAX >> 1];
        for divisor in (1..=300).chain(powers).chain(large) {
            // Multiples of the divisor and their neighbours are where a wrong reciprocal shows.
            let mut x = random.elements::<T>(67);
            x.extend((0..64).map(|_| {
                let near = (random.next() >> 33).wrapping_mul(divisor as u64).wrapping_sub(random.next() % 2);
                bytemuck::pod_read_unaligned::<T>(&near.to_le_bytes()[..size_of::<T>()])
            }));
            all_levels_of_averages(&x, divisor);
        }
    }
    for_every_dtype!(check);
}

#[test]
fn bytes_of_every_value_divided() {
    let unsigned: Vec<u8> = (0..=u8::MAX).collect();
    let signed: Vec<i8> = (i8::MIN..=i8::MAX).collect();
    for divisor in 1..=600 {
        all_levels_of_averages(&unsigned, divisor);
        all_levels_of_averages(&signed, divisor);
    }
}

#[test]
fn division_by_zero_or_one_changes_nothing() {
    fn check<T: Reference>() {
        let x = Random(1).elements::<T>(67);
        for divisor in [0, 1] {
            let mut got = x.clone();
            let Some(divide) = kernels(T::DTYPE, ReduceOp::Avg).divide else { continue };
            // SAFETY: one buffer of that length.
            unsafe { divide(got.as_mut_ptr().cast(), 67, divisor) };
            assert_eq!(bytes(&got), bytes(&x));
        }
    }
    for_every_dtype!(check);
}

/// Odd lengths and places of products, and what is around them.
#[test]
fn scaled_elements_alone_are_written() {
    fn check<T: Reference>() {
        let mut random = Random(11);
        for (level, n) in levels().flat_map(|level| (0..=67).map(move |n| (level, n))) {
            let Some(scale) = Scale::at(level, T::DTYPE, 0.3) else { return };
            let x = random.elements::<T>(n + 3);
            let fill: T = bytemuck::pod_read_unaligned(&vec![0xa5u8; size_of::<T>()]);
            let mut got = vec![fill; n + 5];
            // SAFETY: both hold `n` elements from there on.
            unsafe { scale.apply(x[3..].as_ptr().cast(), got[2..].as_mut_ptr().cast(), n) };
            let want: Vec<T> = x[3..].iter().map(|&x| x.times(scale.factor())).collect();
            expect(&got[2..2 + n], &want, format_args!("{n} products at {level}"));
            assert!(bytes(&got[..2]).iter().chain(bytes(&got[2 + n..])).all(|&byte| byte == 0xa5));
        }
    }
    for_every_dtype!(check);
}

/// Odd lengths of sums of products, apart and over either operand.
#[test]
fn sums_of_products_round_each_product() {
    fn check<T: Reference>() {
        let mut random = Random(12);
        let lengths = (0..=67).chain([3000]);
        for (level, n) in levels().flat_map(|level| lengths.clone().map(move |n| (level, n))) {
            let Some(scale) = Scale::at(level, T::DTYPE, 0.3) else { return };
            let (x, y) = (random.elements::<T>(n), random.elements::<T>(n));
            for (first, second) in [(true, true), (true, false), (false, true), (false, false)] {
                let part = |input, x: T| if input { x.times(scale.factor()) } else { x };
                let sum = |(&x, &y)| T::combine(ReduceOp::Sum, part(first, x), part(second, y));
                let want: Vec<T> = x.iter().zip(&y).map(sum).collect();
                for over in 0..3 {
                    let (mut a, mut b, mut apart) = (x.clone(), y.clone(), vec![T::zeroed(); n]);
                    let out = [&mut apart, &mut a, &mut b][over].as_mut_ptr().cast::<u8>();
                    let a = Operand { at: if over == 1 { out } else { a.as_mut_ptr().cast() }, input: first };
                    let b = Operand { at: if over == 2 { out } else { b.as_mut_ptr().cast() }, input: second };
                    // SAFETY: three buffers of that length, or two.
                    let got = unsafe {
                        scale.sum(a, b, out, n, size_of::<T>());
                        std::slice::from_raw_parts(out.cast::<T>(), n)
                    };
                    let what = format_args!("{n} sums of {} at {level}, {first} {second}, over {over}", T::DTYPE);
                    expect(got, &want, what);
                }
            }
        }
    }
    for_every_dtype!(check);
}

/// As NCCL rounds it: to the type of the elements.
#[test]
fn factors_are_rounded_to_the_type() {
    let factor = |dtype| Scale::new(dtype, 1.0 / 3.0).map(|scale| scale.factor());
    assert_eq!(factor(DType::F64), Some(1.0 / 3.0));
    assert_eq!(factor(DType::F32), Some((1.0f32 / 3.0).into()));
    assert_eq!(factor(DType::F16), Some(0.333_251_953_125));
    assert_eq!(factor(DType::Bf16), Some(0.333_984_375));
    assert_eq!(factor(DType::F8E4M3), Some(0.34375));
    assert_eq!(factor(DType::F8E5M2), Some(0.3125));
    assert!(DType::ALL.into_iter().all(|dtype| factor(dtype).is_some() == dtype.is_float()));
    let other = |dtype, op, ranks| {
        let Average { scale, division } = Average::new(dtype, op, ranks);
        (scale.is_some(), division.is_some())
    };
    assert_eq!(other(DType::F32, Some(ReduceOp::Avg), 2), (true, false));
    assert_eq!(other(DType::I32, Some(ReduceOp::Avg), 2), (false, true));
    for (op, ranks) in [(None, 2), (Some(ReduceOp::Sum), 2), (Some(ReduceOp::Avg), 1)] {
        assert_eq!(other(DType::F32, op, ranks), (false, false));
    }
}

#[test]
fn zeros_and_nans_are_ordered_the_same_both_ways_round() {
    let a = [0.0f32, -0.0, f32::NAN, 1.0, -f32::NAN, f32::INFINITY];
    let b = [-0.0f32, 0.0, 1.0, f32::NAN, f32::NEG_INFINITY, f32::NAN];
    for op in [ReduceOp::Min, ReduceOp::Max] {
        all_levels(op, &a, &b);
    }
    assert_eq!(f32::combine(ReduceOp::Min, 0.0, -0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(f32::combine(ReduceOp::Max, -0.0, 0.0).to_bits(), 0);
}

#[test]
fn a_level_beyond_the_machine_is_refused() {
    for level in Level::ALL {
        assert_eq!(kernels_at(level, DType::F32, ReduceOp::Sum).is_some(), level <= Level::detect());
    }
}

/// Any bits at all, at every level.
fn any_bits<T: Reference>(a: &[u64], b: &[u64], op: ReduceOp, divisor: usize) {
    let (a, b): (&[T], &[T]) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
    all_levels(op, a, b);
    all_levels_of_averages(a, divisor);
}

proptest! {
    #[test]
    fn any_operands_of_any_type(
        pairs in prop::collection::vec(any::<(u64, u64)>(), 1..40),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        divisor in 1usize..=1 << 16,
    ) {
        let (a, b): (Vec<u64>, Vec<u64>) = pairs.into_iter().unzip();
        for f in [any_bits::<f32>, any_bits::<f64>, any_bits::<f16>, any_bits::<bf16>, any_bits::<i8>,
                  any_bits::<u8>, any_bits::<i32>, any_bits::<u32>, any_bits::<i64>, any_bits::<u64>,
                  any_bits::<i16>, any_bits::<u16>, any_bits::<F8E4M3>, any_bits::<F8E5M2>] {
            f(&a, &b, op, divisor);
        }
    }
}
