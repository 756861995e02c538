//! The inputs, and the expected result.

/// Integers of up to 23 bits. f32 holds them and their sums exactly, so the check can test for equality.
pub(crate) fn input_a(i: usize) -> f32 {
    (i.wrapping_mul(2_654_435_761) >> 7 & 0x3f_ffff) as f32
}

/// Depends on the index in another way than [`input_a`], so that the check finds shifted vectors.
pub(crate) fn input_b(i: usize) -> f32 {
    -((i.wrapping_mul(40_503) >> 3 & 0x1f_ffff) as f32)
}

/// The correct value of element `i` of the sum.
pub(crate) fn expected(i: usize) -> f32 {
    input_a(i) + input_b(i)
}

/// Describes a wrong `result`: the number of wrong elements, and the first of them.
// EXERCISE 2 (How it works): compare every element with the expected value. Report the number of wrong ones, and the
// first one's index, value, and expected value. NaN is wrong too.
pub(crate) fn difference(result: &[f32]) -> Option<String> {
    let mut wrong = result.iter().enumerate().filter(|&(i, c)| *c != expected(i));
    let (at, value) = wrong.next()?;
    let count = 1 + wrong.count();
    Some(format!("{count} of {} elements are wrong; c[{at}] is {value}, expected {}", result.len(), expected(at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact() {
        for i in (0..1 << 20).step_by(7) {
            let exact = f64::from(input_a(i)) + f64::from(input_b(i));
            assert_eq!(f64::from(expected(i)), exact);
        }
    }

    #[test]
    fn wrong_missing_and_shifted_elements_show() {
        let right: Vec<f32> = (0..1000).map(expected).collect();
        assert_eq!(difference(&right), None);
        let mut one = right.clone();
        one[617] += 1.0;
        let text = difference(&one).unwrap();
        assert!(text.starts_with("1 of 1000 elements are wrong; c[617] is"), "{text}");
        let shifted: Vec<f32> = (1..1001).map(expected).collect();
        assert!(difference(&shifted).is_some());
        // Unwritten memory may hold zeroes or NaN; neither passes.
        assert!(difference(&[0.0; 1000]).is_some());
        assert!(difference(&[f32::NAN; 3]).is_some());
    }
}
