//! The ring by hand with each part cut into chunks: a chunk is in the next hop while the chunks behind it are still in
//! the last one. [`crate::by_hand`] waits at each hop for a whole part, as Baidu's `RingAllreduce` does.
//!
//! Each chunk travels in a vector of its own. A rank adds its numbers to what came and sends the same vector on.

use std::collections::VecDeque;
use std::ops::Range;

use anyhow::Result;
use course_kit::measure;
use tinynccl::{Comm, ReduceOp};

use crate::by_hand::{self, part, sent};

/// Rounds of a measurement, whose best counts.
const ROUNDS: usize = 5;

/// Writes the sum of all ranks' `input` to `output`. Each part is cut into `chunks` chunks, at least one.
pub(crate) fn all_reduce(comm: &Comm, input: &[f32], output: &mut [f32], chunks: usize) -> tinynccl::Result<()> {
    output.copy_from_slice(input);
    let (rank, ranks, count) = (comm.rank(), comm.size(), output.len());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    // A step sends one chunk and receives one. The steps of all hops of both rounds are numbered through.
    let place = |rank: usize, step: usize| -> Range<usize> {
        let whole = part(sent(rank, step / chunks, ranks), ranks, count);
        let chunk = part(step % chunks, chunks, whole.len());
        whole.start + chunk.start..whole.start + chunk.end
    };
    // Chunks that came and go on, in order, and memory of chunks that were sent.
    let (mut ready, mut spare) = (VecDeque::<Vec<f32>>::new(), Vec::<Vec<f32>>::new());
    for step in 0..2 * (ranks - 1) * chunks {
        let coming = place(previous, step);
        let mut came = spare.pop().unwrap_or_default();
        came.resize(coming.len(), 0.0);
        if step < chunks {
            comm.send_recv(&output[place(rank, step)], next, &mut came, previous)?;
        } else {
            let chunk = ready.pop_front().unwrap_or_default();
            comm.send_recv(&chunk, next, &mut came, previous)?;
            spare.push(chunk);
        }
        let (hop, ours) = (step / chunks, &mut output[coming]);
        if hop < ranks - 1 {
            came.iter_mut().zip(&*ours).for_each(|(sum, value)| *sum += value);
        }
        // The last hop of the first round finishes a part; the second round brings finished ones.
        if hop >= ranks - 2 {
            ours.copy_from_slice(&came);
        }
        ready.push_back(came);
    }
    Ok(())
}

/// Prints the time of a call for each size and number of chunks, beside the ring hop by hop and the library's.
pub(crate) fn table(comm: &Comm, counts: &[usize], chunks: &[usize], iters: usize) -> Result<()> {
    let columns: Vec<Vec<f64>> =
        counts.iter().map(|&count| column(comm, count, chunks, iters)).collect::<Result<_>>()?;
    if comm.rank() != 0 {
        return Ok(());
    }
    println!("Ring by hand, {} ranks, over TCP: ms per call by the number of chunks of each part.\n", comm.size());
    let names = chunks.iter().map(|&chunks| format!("{chunks} chunk{}", if chunks == 1 { "" } else { "s" }));
    let names = ["hop by hop".to_owned()].into_iter().chain(names).chain(["the library's".to_owned()]);
    let bytes: Vec<String> = counts.iter().map(|count| format!("{:>12}", count * size_of::<f32>())).collect();
    println!("{:>14} | {}", "bytes", bytes.join(" "));
    for (row, name) in names.enumerate() {
        let cells: Vec<String> = columns.iter().map(|column| format!("{:>12.3}", 1e3 * column[row])).collect();
        println!("{name:>14} | {}", cells.join(" "));
    }
    println!("\nThe best of {ROUNDS} rounds. Every element was checked on every rank: OK.");
    Ok(())
}

/// Seconds per call: hop by hop, for each number of chunks, and the library's.
fn column(comm: &Comm, count: usize, chunks: &[usize], iters: usize) -> Result<Vec<f64>> {
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    let mut scratch = measure::buffer(count.div_ceil(comm.size()), |_| 0.0)?;
    let mut best = vec![f64::INFINITY; chunks.len() + 2];
    for _ in 0..ROUNDS {
        let hop_by_hop = measure::time(comm, iters, "ring hop by hop", &mut output, None, |output| {
            by_hand::all_reduce(comm, &input, output, &mut scratch)
        });
        let in_chunks = |&chunks: &usize| {
            let run = |output: &mut [f32]| all_reduce(comm, &input, output, chunks);
            measure::time(comm, iters, "ring in chunks", &mut output, None, run)
        };
        let mut times = vec![hop_by_hop?];
        times.extend(chunks.iter().map(in_chunks).collect::<Result<Vec<_>>>()?);
        times.push(measure::time(comm, iters, "the library's ring", &mut output, None, |output| {
            comm.all_reduce(&input, output, ReduceOp::Sum)
        })?);
        best.iter_mut().zip(times).for_each(|(best, time)| *best = best.min(time.seconds));
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use course_kit::on_threads::{config, on_threads};
    use tinynccl::wire::Algorithm;

    use super::*;

    #[test]
    fn any_number_of_chunks_gives_the_bits_of_the_librarys_ring() {
        for ranks in 1..=5 {
            let mut config = config();
            config.algorithm = Some(Algorithm::Ring);
            on_threads(ranks, config, |comm| {
                for (count, chunks) in [0, 1, 7, 1001].into_iter().flat_map(|n| [1, 2, 3, 64].map(|c| (n, c))) {
                    // Sums of these values need rounding, so another order of additions changes the bits.
                    let value = |i: usize| 1.0 / (1 + i + 7 * comm.rank()) as f32;
                    let input: Vec<f32> = (0..count).map(value).collect();
                    let (mut ours, mut theirs) = (vec![f32::NAN; count], vec![0.0; count]);
                    all_reduce(comm, &input, &mut ours, chunks).unwrap();
                    comm.all_reduce(&input, &mut theirs, ReduceOp::Sum).unwrap();
                    assert!(ours == theirs, "{ranks} ranks, {count} elements, {chunks} chunks");
                }
            });
        }
    }
}
