//! The sizes of a run, from the smallest to the largest.

/// The step from one size to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Increment {
    /// A factor of at least 2.
    Factor(usize),
    /// Bytes to add, at least 1.
    Step(usize),
}

/// The sizes from `min` up to and including `max`. With a factor, 1 follows 0.
pub(crate) fn sweep(min: usize, max: usize, increment: Increment) -> Vec<usize> {
    let next = move |&n: &usize| match increment {
        Increment::Factor(f) => n.max(1).checked_mul(f.max(2)).map(|next| if n == 0 { 1 } else { next }),
        Increment::Step(s) => n.checked_add(s.max(1)),
    };
    std::iter::successors(Some(min), next).take_while(|&n| n <= max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweeps() {
        assert_eq!(sweep(8, 128, Increment::Factor(4)), [8, 32, 128]);
        assert_eq!(sweep(8, 127, Increment::Factor(4)), [8, 32]);
        assert_eq!(sweep(8, 8, Increment::Factor(2)), [8]);
        assert_eq!(sweep(0, 4, Increment::Factor(2)), [0, 1, 2, 4]);
        assert_eq!(sweep(10, 40, Increment::Step(15)), [10, 25, 40]);
        assert_eq!(sweep(usize::MAX, usize::MAX, Increment::Factor(2)), [usize::MAX]);
    }
}
