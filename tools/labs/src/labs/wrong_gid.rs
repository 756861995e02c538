//! An entry of the GID table that is not there, or that the peer cannot answer to.

use anyhow::{Result, ensure};
use tinynccl::config::TransportChoice;
use tinynccl::transport::rdma_ports;
use tinynccl::{Comm, Config, Error, ReduceOp, launch};

use crate::ranks::{CannotRunHere, Job};

pub(crate) fn run(fixed: bool) -> Result<u8> {
    if !launch::is_rank() {
        let mut config = Config::default();
        config.transport = TransportChoice::Verbs;
        rdma_ports(&config).map_err(|e| CannotRunHere(e.to_string()))?;
    }
    // The number that was right on another cluster.
    const WRONG: &[(&str, &str)] = &[("TINYNCCL_TRANSPORT", "verbs"), ("TINYNCCL_VERBS_GID_INDEX", "13")];
    const RIGHT: &[(&str, &str)] = &[("TINYNCCL_TRANSPORT", "verbs")];
    let settings = if fixed { RIGHT } else { WRONG };
    Job::new(2, 10, |e| !matches!(e, Error::Mismatch { .. })).with(settings).run(|comm| reduce(&comm))
}

fn reduce(comm: &Comm) -> Result<()> {
    let mut sum = [1.0f32];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    ensure!(sum[0] == 2.0, "rank {}: the sum is {}", comm.rank(), sum[0]);
    println!("rank {}: all_reduce works", comm.rank());
    Ok(())
}
