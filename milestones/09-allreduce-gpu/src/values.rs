//! The inputs, and the sums that must come out.

/// Element `i` of rank `rank`'s input: a small whole number, so that f32 holds every sum exactly, whatever the order.
pub(crate) fn input(rank: usize, i: usize) -> f32 {
    ((i.wrapping_mul(2_654_435_761) >> 9).wrapping_add(rank * 37) & 0xffff) as f32
}

/// Element `i` of the sum over `ranks` ranks.
fn expected(ranks: usize, i: usize) -> f32 {
    (0..ranks).map(|rank| input(rank, i)).sum()
}

/// The number of wrong elements in `result`, and the first of them; `None` when all are right.
// EXERCISE 1 (How it works): compare every element with the sum over the ranks. Report how many are wrong, and the
// first: index, value, expected value. NaN is wrong too.
pub(crate) fn difference(ranks: usize, result: &[f32]) -> Option<String> {
    let mut wrong = result.iter().enumerate().filter(|&(i, x)| *x != expected(ranks, i));
    let (at, value) = wrong.next()?;
    let count = 1 + wrong.count();
    let expected = expected(ranks, at);
    Some(format!("{count} of {} elements are wrong; element {at} is {value}, expected {expected}", result.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_rank_a_shift_and_unwritten_memory_show() {
        let right: Vec<f32> = (0..1000).map(|i| expected(4, i)).collect();
        assert_eq!(difference(4, &right), None);
        assert!(difference(3, &right).is_some());
        let shifted: Vec<f32> = (1..1001).map(|i| expected(4, i)).collect();
        assert!(difference(4, &shifted).is_some());
        assert!(difference(4, &[0.0; 1000]).is_some());
        assert!(difference(4, &[f32::NAN; 1000]).is_some(), "NaN, which no comparison finds");
        let mut one = right.clone();
        one[17] += 1.0;
        assert!(difference(4, &one).unwrap().starts_with("1 of 1000 elements are wrong; element 17 is"));
    }
}
