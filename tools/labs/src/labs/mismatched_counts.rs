//! Ten samples over three ranks, and a collective that wants equal counts.

use anyhow::{Result, ensure};
use tinynccl::comm::packed;
use tinynccl::{Comm, Error};

use crate::ranks::Job;

const RANKS: usize = 3;
const SAMPLES: usize = 10;

pub(crate) fn run(fixed: bool) -> Result<u8> {
    Job::new(RANKS, 5, |e| matches!(e, Error::Mismatch { .. } | Error::Aborted { .. }))
        .run(|comm| evaluate(&comm, fixed))
}

/// Each rank predicts its samples, then all want all predictions.
fn evaluate(comm: &Comm, fixed: bool) -> Result<()> {
    let mine: Vec<f32> = (comm.rank()..SAMPLES).step_by(RANKS).map(|sample| sample as f32).collect();
    println!("rank {}: {} predictions", comm.rank(), mine.len());
    let all = if fixed {
        let counts: Vec<usize> = (0..RANKS).map(|rank| (rank..SAMPLES).step_by(RANKS).count()).collect();
        let mut all = vec![0.0; SAMPLES];
        comm.all_gather_v(&mine, &mut all, &packed(&counts))?;
        all
    } else {
        // Wrong: it takes for granted that all have as many as we.
        let mut all = vec![0.0; mine.len() * RANKS];
        comm.all_gather(&mine, &mut all)?;
        all
    };
    let sum: f32 = all.iter().sum();
    ensure!(sum == 45.0, "rank {}: the predictions' sum is {sum}, expected 45", comm.rank());
    println!("rank {}: all {} predictions are here", comm.rank(), all.len());
    Ok(())
}
