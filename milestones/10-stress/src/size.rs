//! Message sizes: how they are written, and the sweep from the smallest to the largest.

/// Bytes: a number, `K`, `M` or `G` (powers of 1024) may follow.
pub(crate) fn parse(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits
        .parse::<usize>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .filter(|&n| n <= 1 << 40)
        .ok_or_else(|| "expected bytes up to 1024G, K, M or G may follow, like 8 or 128M".to_owned())
}

/// How the next size follows from the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Increment {
    /// Times this; at least 2.
    Factor(usize),
    /// Plus this many bytes; at least 1.
    Step(usize),
}

/// The sizes from `min` up to `max`, both included when they are hit. Multiplying from 0 goes on at 1.
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
    fn sizes_as_nccl_tests_writes_them() {
        for (text, bytes) in [("8", 8), ("0", 0), ("4k", 4096), ("128M", 128 << 20), ("1G", 1 << 30)] {
            assert_eq!(parse(text), Ok(bytes));
        }
        for bad in ["", "M", "-8", "1.5M", "8B", "2048G", "99999999999999999999", "17179869184G", "é"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

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
