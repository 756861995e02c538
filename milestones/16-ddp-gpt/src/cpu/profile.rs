//! Profile of a step: nanoseconds and floating-point operations per class of work, of the whole process.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Classes of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Matrix products with weights.
    Linear,
    /// Matrix products inside attention.
    Attention,
    /// Softmax of attention, both passes.
    Softmax,
    /// LayerNorm, both passes.
    LayerNorm,
    /// GELU, both passes.
    Gelu,
    /// Residual additions and dropout.
    Residual,
    /// Embedding lookup and its gradient.
    Embedding,
    /// Cross entropy.
    Loss,
    /// Gradient norm and AdamW.
    Optimizer,
}

/// Names of the classes, in their order.
pub const NAMES: [&str; 9] = [
    "matmul, weights",
    "matmul, attention",
    "softmax",
    "layernorm",
    "gelu",
    "residual, dropout",
    "embedding",
    "cross entropy",
    "clip, adamw",
];

static NANOS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];
static FLOPS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

/// Does `work` and books its time. Where the rank's threads do such work side by side, `threads` is their number: each
/// books its part of the wall time.
#[inline]
pub fn time<T>(class: Class, threads: usize, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    NANOS[class as usize].fetch_add(start.elapsed().as_nanos() as u64 / threads as u64, Relaxed);
    result
}

/// [`time`] of matrix products, whose floating-point operations `work` returns.
#[inline]
pub fn products(class: Class, threads: usize, work: impl FnOnce() -> u64) {
    let flops = time(class, threads, work);
    FLOPS[class as usize].fetch_add(flops, Relaxed);
}

/// Seconds and floating-point operations of the classes, in the order of [`NAMES`]; from here on they count from 0.
pub fn take() -> [(f64, u64); NAMES.len()] {
    std::array::from_fn(|i| (NANOS[i].swap(0, Relaxed) as f64 * 1e-9, FLOPS[i].swap(0, Relaxed)))
}
