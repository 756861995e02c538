//! Times by the device's clock, over ranks that start together.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};
use program_kit::stats::median;
use tinynccl::{Comm, ReduceOp};

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
        let graph = if self.graph { Some(self.capture(&mut work)?) } else { None };
        let mut times = Vec::new();
        for _ in 0..=self.rounds {
            self.stream.synchronize()?;
            self.comm.barrier()?;
            begin.record(self.stream)?;
            match &graph {
                Some(graph) => graph.launch()?,
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
        median(&times[1..]).context("no rounds")
    }

    /// The calls between two events as one CUDA graph. Their buffers live as long as the caller's task, longer than it.
    fn capture(&self, work: &mut impl FnMut() -> Result<()>) -> Result<CudaGraph> {
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let worked = (0..self.iters).try_for_each(|_| work());
        // Ends the capture whether or not it went well.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0))?;
        worked?;
        graph.context("nothing was captured")
    }
}
