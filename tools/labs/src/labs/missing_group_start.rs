//! Two GPUs send to each other before they receive.

use anyhow::{Result, ensure};
use tinynccl::process_group::{Buffer, BufferMut};

use crate::gpu::job;

#[derive(Debug, Clone, clap::Args)]
#[group(id = "missing-group-start")]
pub(crate) struct Options {
    #[command(flatten)]
    gpu: crate::gpu::Options,
    /// Bytes that each rank sends.
    #[arg(long, default_value_t = 64 << 20)]
    bytes: usize,
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    options.gpu.run_job(&job(), |group, context| {
        let (rank, other, bytes) = (group.rank(), 1 - group.rank(), options.bytes);
        let stream = context.new_stream()?;
        let mine = stream.clone_htod(&vec![rank as u8; bytes])?;
        let mut theirs = stream.clone_htod(&vec![9u8; bytes])?;
        // The first messages open what the pair needs: that is not this lab's subject.
        let mut opening = stream.alloc_zeros::<u8>(2)?;
        let (first, mut second) = opening.split_at_mut(1);
        let mut batch = group.batch();
        batch.send(Buffer::device(&stream, &first), other)?;
        batch.recv(BufferMut::device(&stream, &mut second), other)?;
        batch.run()?;

        println!("rank {rank}: {bytes} bytes to rank {other}, and as many from there");
        if options.gpu.fixed {
            // Between ncclGroupStart and ncclGroupEnd.
            let mut batch = group.batch();
            batch.send(Buffer::device(&stream, &mine), other)?;
            batch.recv(BufferMut::device(&stream, &mut theirs), other)?;
            batch.run()?;
        } else {
            group.send(Buffer::device(&stream, &mine), other)?;
            group.recv(BufferMut::device(&stream, &mut theirs), other)?;
        }
        let theirs = stream.clone_dtoh(&theirs)?;
        stream.synchronize()?;
        ensure!(theirs.iter().all(|&byte| byte == other as u8), "rank {rank}: other bytes than rank {other} sent");
        println!("rank {rank}: done");
        Ok(())
    })
}
