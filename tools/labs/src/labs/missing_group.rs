//! Everybody sends, then everybody receives: it works until the messages grow.

use anyhow::{Result, ensure};
use tinynccl::{Comm, Error};

use crate::ranks::Job;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Run the mended version.
    #[arg(long)]
    fixed: bool,
    /// Bytes that each rank sends.
    #[arg(long, default_value_t = 8 << 20)]
    bytes: usize,
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    Job::new(2, 2, |e| matches!(e, Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. }))
        .run(|comm| exchange(&comm, options))
}

fn exchange(comm: &Comm, options: &Options) -> Result<()> {
    let (rank, other) = (comm.rank(), 1 - comm.rank());
    let (mine, mut theirs) = (vec![rank as u8; options.bytes], vec![9u8; options.bytes]);
    println!("rank {rank}: {} bytes to rank {other}, and as many from there", options.bytes);
    if options.fixed {
        comm.group(|group| {
            group.send(&mine, other)?;
            group.recv(&mut theirs, other)
        })?;
    } else {
        comm.send(&mine, other)?;
        comm.recv(&mut theirs, other)?;
    }
    ensure!(theirs.iter().all(|&byte| byte == other as u8), "rank {rank}: other bytes than rank {other} sent");
    println!("rank {rank}: done");
    Ok(())
}
