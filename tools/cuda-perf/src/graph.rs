//! Calls as one CUDA graph.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaStream, sys};

/// Some calls, captured; launched as one.
#[derive(Debug)]
pub(crate) struct Graph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl Graph {
    pub(crate) fn capture(stream: &Arc<CudaStream>, calls: u32, work: &mut impl FnMut() -> Result<()>) -> Result<Graph> {
        use cudarc::driver::result::stream as streams;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; what `work` enqueues is captured instead of run.
        unsafe { streams::begin_capture(stream.cu_stream(), mode) }?;
        let worked = (0..calls).try_for_each(|_| work());
        // SAFETY: as above; ends the capture whether or not it went well.
        let graph = unsafe { streams::end_capture(stream.cu_stream()) }?;
        worked?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph is the one captured; writes the handle.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) }.result()?;
        Ok(Graph { graph, executable })
    }

    pub(crate) fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        // SAFETY: the buffers of the captured calls live as long as the caller's task, longer than this.
        Ok(unsafe { sys::cuGraphLaunch(self.executable, stream.cu_stream()) }.result()?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`; the timer waits for the stream before it drops this.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.executable);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
