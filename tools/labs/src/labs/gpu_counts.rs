//! An all_reduce on GPUs, for which the ranks have buffers of different lengths.

use anyhow::{Result, ensure};
use tinynccl::ReduceOp;
use tinynccl::process_group::BufferMut;

use crate::gpu::Options;
use crate::ranks::Announced;

const ELEMENTS: usize = 1 << 20;

pub(crate) fn run(options: &Options) -> Result<u8> {
    options.run(|group, context| {
        let rank = group.rank();
        // Wrong: the last batch of rank 1 is longer, and so is its buffer.
        let elements = if rank == 1 && !options.fixed { 2 * ELEMENTS } else { ELEMENTS };
        let stream = context.new_stream()?;
        let mut losses = stream.clone_htod(&vec![1.0f32; elements])?;
        println!("rank {rank}: all_reduce of {elements} elements over {}", group.backend());
        group.all_reduce_in_place(BufferMut::device(&stream, &mut losses), ReduceOp::Sum)?;
        let sums = stream.clone_dtoh(&losses)?;
        stream.synchronize()?;
        let wrong = sums.iter().filter(|&&sum| sum != 2.0).count();
        ensure!(
            wrong == 0,
            Announced(format!("rank {rank}: {wrong} of {elements} sums are not 2, and no call has failed"))
        );
        println!("rank {rank}: every sum is 2");
        Ok(())
    })
}
