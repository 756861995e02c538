//! The ring by hand: the table of hops as two loops over send and recv. Here one hop ends before the next begins; the
//! library's schedule overlaps them.

use std::ops::Range;

use tinynccl::{Comm, Result};

/// Writes the sum of all ranks' `input` to `output`. `scratch` has room for the largest part.
pub(crate) fn all_reduce(comm: &Comm, input: &[f32], output: &mut [f32], scratch: &mut [f32]) -> Result<()> {
    output.copy_from_slice(input);
    reduce_scatter(comm, output, scratch)?;
    all_gather(comm, output, scratch)
}

/// Part `index` of `count` elements in `ranks` parts: as equal as possible, the longer ones first.
fn part(index: usize, ranks: usize, count: usize) -> Range<usize> {
    let start = |i: usize| i * (count / ranks) + i.min(count % ranks);
    start(index)..start(index + 1)
}

/// The part that `rank` sends in `hop` (from 0) of the first round: its own, then the one before it, …
fn sent(rank: usize, hop: usize, ranks: usize) -> usize {
    (rank + ranks - hop % ranks) % ranks
}

/// The first round: afterwards this rank's `data` holds the finished sum of the part numbered like its right neighbour.
// EXERCISE 2 (How it works): ranks - 1 hops. In each, send the part that `sent` names to the next rank while you
// receive the previous rank's into `scratch` (`Comm::send_recv`), and add the received values to your own of that part.
fn reduce_scatter(comm: &Comm, data: &mut [f32], scratch: &mut [f32]) -> Result<()> {
    let (rank, ranks, count) = (comm.rank(), comm.size(), data.len());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for hop in 0..ranks - 1 {
        let incoming = part(sent(previous, hop, ranks), ranks, count);
        let came = &mut scratch[..incoming.len()];
        comm.send_recv(&data[part(sent(rank, hop, ranks), ranks, count)], next, came, previous)?;
        for (sum, value) in data[incoming].iter_mut().zip(&*came) {
            *sum += value;
        }
    }
    Ok(())
}

/// The second round: each finished part goes once round the ring.
// EXERCISE 3 (How it works): ranks - 1 hops again, without adding. First send the part that the first round finished on
// this rank, the one after your own. In each later hop, send the part that you received in the hop before.
fn all_gather(comm: &Comm, data: &mut [f32], scratch: &mut [f32]) -> Result<()> {
    let (rank, ranks, count) = (comm.rank(), comm.size(), data.len());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for hop in 0..ranks - 1 {
        let incoming = part(sent(rank, hop, ranks), ranks, count);
        let came = &mut scratch[..incoming.len()];
        comm.send_recv(&data[part(sent(next, hop, ranks), ranks, count)], next, came, previous)?;
        data[incoming].copy_from_slice(came);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tinynccl::wire::Algorithm;
    use tinynccl::{Config, ReduceOp};

    use super::*;

    #[test]
    fn it_gives_the_bits_of_the_librarys_ring() {
        for ranks in 1..=5 {
            let mut config = Config::default();
            config.algorithm = Some(Algorithm::Ring);
            let comms = Comm::threads(ranks, config).unwrap();
            std::thread::scope(|scope| {
                for comm in &comms {
                    scope.spawn(move || {
                        for count in [0, 1, 3, 1001] {
                            // Sums of these values need rounding, so another order of additions changes the bits.
                            let value = |i: usize| 1.0 / (1 + i + 7 * comm.rank()) as f32;
                            let input: Vec<f32> = (0..count).map(value).collect();
                            let (mut ours, mut theirs, mut scratch) =
                                (vec![f32::NAN; count], vec![0.0; count], vec![0.0; count]);
                            all_reduce(comm, &input, &mut ours, &mut scratch).unwrap();
                            comm.all_reduce(&input, &mut theirs, ReduceOp::Sum).unwrap();
                            assert!(ours == theirs, "{ranks} ranks, {count} elements");
                        }
                    });
                }
            });
        }
    }
}
