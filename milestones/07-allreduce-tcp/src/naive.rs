//! All-reduce the naive way: every rank sends everything to rank 0, which adds it up and sends the sum back.

use tinynccl::{Comm, Result};

/// Writes the sum of all ranks' `input` to `output`. `scratch` has the same length; only rank 0 uses it.
// EXERCISE 1 (How it works): every other rank sends its input to rank 0 and receives the sum; rank 0 begins with its
// own input, receives each rank's into `scratch` and adds it, then sends the sum to each.
pub(crate) fn all_reduce(comm: &Comm, input: &[f32], output: &mut [f32], scratch: &mut [f32]) -> Result<()> {
    if comm.rank() != 0 {
        comm.send(input, 0)?;
        return comm.recv(output, 0);
    }
    output.copy_from_slice(input);
    for peer in 1..comm.size() {
        comm.recv(scratch, peer)?;
        for (sum, value) in output.iter_mut().zip(&*scratch) {
            *sum += value;
        }
    }
    for peer in 1..comm.size() {
        comm.send(output, peer)?;
    }
    Ok(())
}

/// Payload bytes that rank 0 sends; it receives as many.
pub(crate) fn root_bytes(ranks: usize, bytes: usize) -> u64 {
    (ranks as u64 - 1) * bytes as u64
}

#[cfg(test)]
mod tests {
    use course_kit::on_threads::{config, on_threads};
    use tinynccl::ReduceOp;

    use super::*;

    #[test]
    fn it_gives_what_the_library_gives() {
        for ranks in 1..=4 {
            on_threads(ranks, config(), |comm| {
                for count in [0, 1, 1001] {
                    let input: Vec<f32> = (0..count).map(|i| (i + comm.rank()) as f32).collect();
                    let (mut ours, mut theirs, mut scratch) = (vec![0.0; count], vec![0.0; count], vec![0.0; count]);
                    all_reduce(comm, &input, &mut ours, &mut scratch).unwrap();
                    comm.all_reduce(&input, &mut theirs, ReduceOp::Sum).unwrap();
                    assert_eq!(ours, theirs);
                }
            });
        }
    }
}
