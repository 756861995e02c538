//! Times over ranks that start together, by the device's clock or by the host's.

use anyhow::{Context as _, Result};
use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use program_kit::stats::median;
use tinynccl::ReduceOp;

use super::Bench;

impl Bench<'_> {
    /// Seconds of one `work`: the median over rounds of the slowest rank's mean.
    pub(super) fn time(&self, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let (begin, end) = (event()?, event()?);
        for _ in 0..5 {
            work()?;
        }
        self.stream.synchronize()?;
        let graph = if self.options.graph { Some(self.capture(&mut work)?) } else { None };
        self.slowest(self.options.rounds, || {
            begin.record(&self.stream)?;
            match &graph {
                Some(graph) => graph.launch()?,
                None => (0..self.options.iters).try_for_each(|_| work())?,
            }
            end.record(&self.stream)?;
            // Waits for the stream.
            Ok(f64::from(begin.elapsed_ms(&end)?) / 1e3 / f64::from(self.options.iters))
        })
    }

    /// The median over rounds of the slowest rank's `seconds`, each after a barrier.
    pub(super) fn slowest(&self, rounds: u32, mut seconds: impl FnMut() -> Result<f64>) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..=rounds {
            self.comm.barrier()?;
            let mut mean = [seconds()?];
            self.comm.all_reduce_in_place(&mut mean, ReduceOp::Max)?;
            times.push(mean[0]);
        }
        // The first one warms up.
        median(&times[1..]).context("no rounds")
    }

    /// The calls between two events as one CUDA graph. Their buffers live as long as the caller's task, longer than it.
    fn capture(&self, work: &mut impl FnMut() -> Result<()>) -> Result<CudaGraph> {
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let worked = (0..self.options.iters).try_for_each(|_| work());
        // Ends the capture whether or not it went well.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0))?;
        worked?;
        graph.context("nothing was captured")
    }
}
