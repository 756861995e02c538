//! Faults on GPUs: each ends in one clear error, and nothing hangs. Without a GPU every test says that it is skipped.

mod errors;
mod kernels;
mod processes;

use std::io::Write;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use tinynccl::cuda;

/// The first `wanted` GPUs, if there are as many.
fn gpus(wanted: usize) -> Option<Vec<Arc<CudaContext>>> {
    let count = match cuda::device_count() {
        Ok(count) => count,
        Err(error) => {
            skipped(&format!("no GPU: {error}"));
            return None;
        }
    };
    if count < wanted {
        skipped(&format!("needs {wanted} GPUs, this machine has {count}"));
        return None;
    }
    Some((0..wanted).map(|i| CudaContext::new(i).unwrap()).collect())
}

/// Two contexts, of two GPUs where there are as many.
fn two_contexts() -> Option<[Arc<CudaContext>; 2]> {
    let first = gpus(1)?.remove(0);
    let second = match cuda::device_count() {
        Ok(2..) => CudaContext::new(1).unwrap(),
        _ => first.clone(),
    };
    Some([first, second])
}

/// Not by a macro: the test harness would keep it to itself.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: a test of faults on GPUs: {why}");
}
