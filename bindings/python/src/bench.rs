//! Calls without Python, for bench/latency.py.

use std::time::Instant;

use pyo3::prelude::*;
use tinynccl::{ReduceOp, Result};

use crate::comm::Comm;
use crate::errors::{Names, waiting};

/// Seconds per call of `calls` in-place all_reduces of `elements` f32, called from Rust.
#[pyfunction]
pub(crate) fn _seconds_of_all_reduce(py: Python<'_>, comm: &Comm, elements: usize, calls: usize) -> PyResult<f64> {
    let live = comm.live(py, "all_reduce")?;
    let mut buffer = vec![0f32; elements];
    let run = || -> Result<f64> {
        let start = Instant::now();
        for _ in 0..calls {
            live.comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        }
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    };
    waiting(py, "all_reduce", &Names::default(), run)
}
