//! The ring by hand: the table of hops as two loops over send and recv. Here one hop ends before the next begins;
//! [`crate::in_chunks`] and the library's schedule overlap them.

use std::ops::Range;

use tinynccl::{Comm, Result};

/// Writes the sum of all ranks' `input` to `output`. `scratch` has room for the largest part.
pub(crate) fn all_reduce(comm: &Comm, input: &[f32], output: &mut [f32], scratch: &mut [f32]) -> Result<()> {
    output.copy_from_slice(input);
    reduce_scatter(comm, output, scratch)?;
    all_gather(comm, output, scratch)
}

/// Part `index` of `count` elements in `ranks` parts: as equal as possible, the longer ones first.
pub(crate) fn part(index: usize, ranks: usize, count: usize) -> Range<usize> {
    let start = |i: usize| i * (count / ranks) + i.min(count % ranks);
    start(index)..start(index + 1)
}

/// The part that `rank` sends in `hop` (from 0) of the first round: its own, then the one before it, …
pub(crate) fn sent(rank: usize, hop: usize, ranks: usize) -> usize {
    (rank + ranks - hop % ranks) % ranks
}

/// The first round: afterwards this rank's `data` holds the finished sum of the part numbered like its right neighbour.
// EXERCISE 2 (How it works): loop over ranks - 1 hops. In each hop, one `comm.send_recv(data, to, into, from)` sends
// part `sent(rank, hop, ranks)` of `data` to the next rank and receives the previous rank's part into the beginning of
// `scratch`. Add the received part to the same part of `data`. `part` gives a part's range.
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
// EXERCISE 3 (How it works): ranks - 1 hops again, without adding. First send the part of `data` that the first round
// finished on this rank, number (rank + 1) % ranks. In each later hop, send the part that came in the hop before. What
// comes goes into the beginning of `scratch`, then to its place in `data`.
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
    use course_kit::on_threads::{config, on_threads};
    use tinynccl::ReduceOp;
    use tinynccl::wire::Algorithm;

    use super::*;

    /// Runs `call` on each rank's `data`, a thread per rank, and gives what is in it afterwards.
    fn on_ranks(ranks: usize, data: impl Fn(usize) -> Vec<f32> + Sync, call: Round) -> Vec<Vec<f32>> {
        on_threads(ranks, config(), |comm| {
            let mut data = data(comm.rank());
            let mut scratch = vec![f32::NAN; data.len()];
            call(comm, &mut data, &mut scratch).unwrap();
            data
        })
    }

    type Round = fn(&Comm, &mut [f32], &mut [f32]) -> Result<()>;
    const COUNTS: [usize; 3] = [1, 3, 1001];

    /// Whole numbers, so that the order of additions does not count.
    fn value(rank: usize, index: usize) -> f32 {
        (index % 100 + 1000 * rank) as f32
    }

    #[test]
    fn reduce_scatter_finishes_the_part_of_the_next_rank() {
        for (ranks, count) in (1..=5).flat_map(|ranks| COUNTS.map(|count| (ranks, count))) {
            let after = on_ranks(ranks, |rank| (0..count).map(|i| value(rank, i)).collect(), reduce_scatter);
            for (rank, data) in after.iter().enumerate() {
                for index in part((rank + 1) % ranks, ranks, count) {
                    let sum: f32 = (0..ranks).map(|rank| value(rank, index)).sum();
                    assert_eq!(data[index], sum, "element {index} of {count} on rank {rank} of {ranks}");
                }
            }
        }
    }

    #[test]
    fn all_gather_spreads_the_part_that_each_rank_finished() {
        for (ranks, count) in (1..=5).flat_map(|ranks| COUNTS.map(|count| (ranks, count))) {
            let finished = |rank: usize| {
                let mut data = vec![f32::NAN; count];
                part((rank + 1) % ranks, ranks, count).for_each(|i| data[i] = value(0, i));
                data
            };
            let all: Vec<f32> = (0..count).map(|i| value(0, i)).collect();
            for (rank, data) in on_ranks(ranks, finished, all_gather).iter().enumerate() {
                assert_eq!(data, &all, "rank {rank} of {ranks}");
            }
        }
    }

    #[test]
    fn it_gives_the_bits_of_the_librarys_ring() {
        for ranks in 1..=5 {
            let mut config = config();
            config.algorithm = Some(Algorithm::Ring);
            on_threads(ranks, config, |comm| {
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
    }
}
