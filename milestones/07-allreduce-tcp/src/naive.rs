//! All-reduce the naive way: everybody sends everything to rank 0, which adds it up and sends the sum back.

use tinynccl::{Comm, Result};

/// `output` becomes the sum of all ranks' `input`. `scratch` is as long as both and is used on rank 0 only.
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

/// Payload bytes that rank 0 sends, and as many that it receives.
pub(crate) fn root_bytes(ranks: usize, bytes: usize) -> u64 {
    (ranks as u64 - 1) * bytes as u64
}
