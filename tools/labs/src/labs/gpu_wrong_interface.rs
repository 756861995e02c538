//! A variable names a network interface that this host does not have.

use anyhow::{Result, ensure};
use tinynccl::process_group::BufferMut;
use tinynccl::{Error, ReduceOp};

use crate::gpu::Options;
use crate::ranks::Job;

pub(crate) fn run(options: &Options) -> Result<u8> {
    // NCCL warns only where it is asked to.
    let settings: &[_] = match (options.is_nccl(), options.fixed) {
        (true, false) => &[("NCCL_SOCKET_IFNAME", "nowhere0"), ("NCCL_DEBUG", "WARN")],
        (true, true) => &[("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_DEBUG", "WARN")],
        (false, false) => &[("TINYNCCL_IFNAME", "nowhere0")],
        (false, true) => &[("TINYNCCL_IFNAME", "lo")],
    };
    let ends = |e: &Error| match e {
        Error::Cuda { op, .. } => op == "init by backend nccl",
        Error::PeerLost { .. } | Error::Aborted { .. } => true,
        other => other.to_string().contains("TINYNCCL_IFNAME="),
    };
    options.run_job(&Job::new(2, 5, ends).with(settings), |group, context| {
        let stream = context.new_stream()?;
        let mut sum = stream.clone_htod(&[1.0f32])?;
        group.all_reduce_in_place(BufferMut::device(&stream, &mut sum), ReduceOp::Sum)?;
        let sum = stream.clone_dtoh(&sum)?;
        stream.synchronize()?;
        ensure!(sum == [2.0], "rank {}: the sum is {sum:?}, expected 2", group.rank());
        println!("rank {}: all_reduce works", group.rank());
        Ok(())
    })
}
