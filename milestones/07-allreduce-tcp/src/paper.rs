//! A schedule on paper: simulates the programs that the library executes in rounds, with lists of ranks in place of
//! numbers.
//!
//! The table has one line per hop. A cell shows the message that a rank sends in that hop: the part, and the ranks
//! whose contributions it already sums, in the order of addition. [`tinynccl::schedule::rounds`] verifies the programs
//! first and then simulates them.

use std::collections::HashMap;
use std::fmt::Write as _;

use anyhow::Result;
use tinynccl::algorithm::Shape;
use tinynccl::schedule::Program;
use tinynccl::schedule::rounds::{Message, play};

/// The number of hops of all ranks' programs, and the table: one line per hop, one column per rank.
///
/// # Errors
/// The programs do not implement `shape`, or they deadlock.
pub(crate) fn table(programs: &[Program], shape: &Shape) -> Result<(usize, String)> {
    let mut hops: Vec<Vec<String>> = Vec::new();
    let mut arrived = HashMap::new();
    // The last round only receives.
    for round in play(programs, shape)?.iter().filter(|round| !round.sent.is_empty()) {
        let mut cells = vec!["-".to_owned(); shape.ranks];
        let mut under_way = HashMap::new();
        for message in &round.sent {
            let sum = sum(message, arrived.remove(&(message.from, message.parts.start)).unwrap_or_default());
            let names: Vec<String> = sum.iter().map(usize::to_string).collect();
            let names = if sum.len() == shape.ranks { "all".to_owned() } else { names.join("+") };
            cells[message.from] = format!("p{}={names}", message.parts.start);
            under_way.insert((message.to, message.parts.start), sum);
        }
        arrived.extend(under_way);
        hops.push(cells);
    }
    let width = hops.iter().flatten().map(String::len).max().unwrap_or(0).max(7) + 2;
    let heading = (0..shape.ranks).map(|rank| format!("rank {rank}")).collect();
    let lines = std::iter::once(("hop".to_owned(), &heading)).chain((1..).map(|n: usize| n.to_string()).zip(&hops));
    let mut text = String::new();
    for (name, cells) in lines {
        let mut line = format!("  {name:<6}");
        for cell in cells {
            let _ = write!(line, "{cell:<width$}");
        }
        text += line.trim_end();
        text.push('\n');
    }
    Ok((hops.len(), text))
}

/// The ranks that contributed to a message: first those that had `arrived` in the sender's part, then the sender's own.
fn sum(message: &Message, mut arrived: Vec<usize>) -> Vec<usize> {
    let held = message.pieces.iter().flatten().flat_map(|piece| &piece.ranks);
    let own: Vec<usize> = held.filter(|rank| !arrived.contains(rank)).copied().collect();
    arrived.extend(own);
    arrived
}

#[cfg(test)]
mod tests {
    use tinynccl::algorithm::program;
    use tinynccl::wire::{Algorithm, Collective};

    use super::*;

    fn ring(ranks: usize) -> (Shape, Vec<Program>) {
        let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
        (shape, (0..ranks).map(|r| program(Algorithm::Ring, &shape, r).unwrap()).collect())
    }

    #[test]
    fn the_ring_completes_in_2n_minus_2_hops() {
        for ranks in 2..=9 {
            let (shape, programs) = ring(ranks);
            assert_eq!(table(&programs, &shape).unwrap().0, 2 * (ranks - 1), "{ranks} ranks");
        }
    }

    #[test]
    fn the_tables_of_two_and_three_ranks() {
        let drawn = |ranks| {
            let (shape, programs) = ring(ranks);
            table(&programs, &shape).unwrap().1
        };
        assert_eq!(drawn(2), "  hop   rank 0   rank 1\n  1     p0=0     p1=1\n  2     p1=all   p0=all\n");
        let two_hops =
            "  hop   rank 0   rank 1   rank 2\n  1     p0=0     p1=1     p2=2\n  2     p2=2+0   p0=0+1   p1=1+2\n";
        assert!(drawn(3).starts_with(two_hops), "{}", drawn(3));
    }

    #[test]
    fn a_schedule_that_waits_for_ever_is_refused() {
        let (shape, mut programs) = ring(3);
        programs[1].lanes[0].steps.remove(0);
        assert!(table(&programs, &shape).is_err());
    }
}
