//! Ranks with a GPU each, as threads and as processes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};
use tinynccl::launch::{self, Launcher};
use tinynccl::wire::Collective;
use tinynccl::{Comm, Config, cuda};

/// The collectives that have their own kernels.
pub(crate) const COLLECTIVES: [Collective; 6] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
];

/// A context of each GPU, eight at most; without two GPUs it says that the test is skipped.
pub(crate) fn contexts() -> Option<Vec<Arc<CudaContext>>> {
    let count = match cuda::device_count() {
        Ok(count) => count,
        Err(error) => {
            eprintln!("SKIPPED: no GPU: {error}");
            return None;
        }
    };
    if count < 2 {
        eprintln!("SKIPPED: needs two GPUs, this machine has {count}");
        return None;
    }
    Some((0..count.min(8)).map(|i| CudaContext::new(i).unwrap()).collect())
}

/// `body` for each rank in a separate thread.
pub(crate) fn in_threads<T: Send>(
    contexts: &[Arc<CudaContext>],
    config: Config,
    body: impl Fn(Comm, &Arc<CudaContext>) -> T + Sync,
) -> Vec<T> {
    let (comms, body) = (Comm::threads(contexts.len(), config).unwrap(), &body);
    std::thread::scope(|scope| {
        let start = |(comm, context)| scope.spawn(move || body(comm, context));
        let threads: Vec<_> = comms.into_iter().zip(contexts).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// `body` for each rank in a separate process: the test of this name starts itself again, once with each of these
/// environments.
pub(crate) fn in_processes(test: &str, environments: &[&[(&str, &str)]], body: impl FnOnce(&Comm, &Arc<CudaContext>)) {
    if launch::is_rank() {
        let comm = Comm::from_env().unwrap();
        let context = CudaContext::new(comm.local_rank()).unwrap();
        return body(&comm, &context);
    }
    let Some(contexts) = contexts() else { return };
    for environment in environments {
        let mut launcher = Launcher::new(contexts.len()).program(std::env::current_exe().unwrap()).args([
            "--exact",
            test,
            "--nocapture",
        ]);
        for (name, value) in *environment {
            launcher = launcher.env(name, value);
        }
        assert_eq!(launcher.run().unwrap(), 0);
    }
}

/// Graph of what `work` enqueues.
pub(crate) fn capture(stream: &Arc<CudaStream>, work: impl FnOnce()) -> sys::CUgraphExec {
    use cudarc::driver::result::stream as streams;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let mut executable = std::ptr::null_mut();
    // SAFETY: the stream is alive; the graph is the one captured, and stays until the process ends.
    unsafe {
        streams::begin_capture(stream.cu_stream(), mode).unwrap();
        work();
        let graph = streams::end_capture(stream.cu_stream()).unwrap();
        sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result().unwrap();
    }
    executable
}
