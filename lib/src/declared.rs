//! Comparison of the lists that all ranks must declare alike.

use tinynccl_comm::{Comm, packed};
use tinynccl_plan::error::{Error, Result};

/// Fails on all ranks unless all have the same list. The error is one sentence, the same everywhere: it names the first
/// `what` (a word for what a line of the list stands for) in which a rank differs from rank 0, and has both lines.
pub(crate) fn compare(comm: &Comm, op: &str, what: &str, lines: impl Iterator<Item = String>) -> Result<()> {
    let ours: String = lines.map(|line| line + END).collect();
    let mut lengths = vec![0; comm.size()];
    comm.all_gather(&[ours.len() as u64], &mut lengths)?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let (ranges, mut all) = (packed(&lengths), vec![0; lengths.iter().sum()]);
    comm.all_gather_v(ours.as_bytes(), &mut all, &ranges)?;
    let texts = ranges.into_iter().map(|range| String::from_utf8_lossy(&all[range]).into_owned());
    match difference(what, &texts.collect::<Vec<_>>()) {
        Some(detail) => Err(Error::invalid(op, detail)),
        None => Ok(()),
    }
}

const END: &str = "\0";

/// The first difference from the first of the texts.
fn difference(what: &str, texts: &[String]) -> Option<String> {
    let first = texts.first()?;
    let (rank, other) = texts.iter().enumerate().find(|(_, text)| *text != first)?;
    let (mut ours, mut theirs) = (first.split_terminator(END), other.split_terminator(END));
    let (place, ours, theirs) =
        (0..).map(|place| (place, ours.next(), theirs.next())).find(|(_, ours, theirs)| ours != theirs)?;
    let show = |line: Option<&str>| line.map_or_else(|| format!("no such {what}"), str::to_owned);
    Some(format!("{what} {place} differs: rank 0 has {}, rank {rank} has {}", show(ours), show(theirs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_with_both_lines() {
        let found = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            difference("buffer", &texts)
        };
        assert_eq!(found(&[]), None);
        assert_eq!(found(&["a\0b\0"; 3]), None);
        let expected = "buffer 1 differs: rank 0 has b, rank 2 has c";
        assert_eq!(found(&["a\0b\0", "a\0b\0", "a\0c\0"]).as_deref(), Some(expected));
        let expected = "buffer 1 differs: rank 0 has b, rank 1 has no such buffer";
        assert_eq!(found(&["a\0b\0", "a\0"]).as_deref(), Some(expected));
        assert_eq!(found(&["", "a\0"]).as_deref(), Some("buffer 0 differs: rank 0 has no such buffer, rank 1 has a"));
    }
}
