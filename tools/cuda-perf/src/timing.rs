//! Times by the device's clock, over ranks that start together.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUevent_flags;
use tinynccl::{Comm, ReduceOp};

use crate::graph::Graph;

pub(crate) struct Timer<'a> {
    pub(crate) comm: &'a Comm,
    pub(crate) stream: &'a Arc<CudaStream>,
    pub(crate) iters: u32,
    pub(crate) rounds: u32,
    pub(crate) graph: bool,
}

impl Timer<'_> {
    /// Seconds of one `work`: the median over rounds of the slowest rank's mean.
    pub(crate) fn time(&self, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let (begin, end) = (event()?, event()?);
        for _ in 0..5 {
            work()?;
        }
        self.stream.synchronize()?;
        let graph = if self.graph { Some(Graph::capture(self.stream, self.iters, &mut work)?) } else { None };
        let mut times = Vec::new();
        for _ in 0..=self.rounds {
            self.stream.synchronize()?;
            self.comm.barrier()?;
            begin.record(self.stream)?;
            match &graph {
                Some(graph) => graph.launch(self.stream)?,
                None => {
                    for _ in 0..self.iters {
                        work()?;
                    }
                }
            }
            end.record(self.stream)?;
            let mut mean = [f64::from(begin.elapsed_ms(&end)?) / 1e3 / f64::from(self.iters)];
            self.comm.all_reduce_in_place(&mut mean, ReduceOp::Max)?;
            times.push(mean[0]);
        }
        // The first one warms up.
        times.remove(0);
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
