//! Where the time of a step goes: nanoseconds and floating-point operations per class of work.

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

impl Class {
    /// All classes, in the order in which they are printed.
    pub const ALL: [Class; 9] = [
        Class::Linear,
        Class::Attention,
        Class::Softmax,
        Class::LayerNorm,
        Class::Gelu,
        Class::Residual,
        Class::Embedding,
        Class::Loss,
        Class::Optimizer,
    ];

    /// Name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Class::Linear => "matmul, weights",
            Class::Attention => "matmul, attention",
            Class::Softmax => "softmax",
            Class::LayerNorm => "layernorm",
            Class::Gelu => "gelu",
            Class::Residual => "residual, dropout",
            Class::Embedding => "embedding",
            Class::Loss => "cross entropy",
            Class::Optimizer => "clip, adamw",
        }
    }
}

/// Counters, shared by the threads of a rank.
#[derive(Debug, Default)]
pub struct Profile {
    nanos: [AtomicU64; Class::ALL.len()],
    flops: [AtomicU64; Class::ALL.len()],
}

impl Profile {
    /// Runs `work`, which returns its floating-point operations (0 where nobody asks), and books its time. When the
    /// rank's threads run such work side by side, `share` is their number: each books its part of the wall time.
    #[inline]
    pub fn time(&self, class: Class, share: usize, work: impl FnOnce() -> u64) {
        let start = Instant::now();
        let flops = work();
        let nanos = start.elapsed().as_nanos() as u64 / share.max(1) as u64;
        self.nanos[class as usize].fetch_add(nanos, Relaxed);
        self.flops[class as usize].fetch_add(flops, Relaxed);
    }

    /// Seconds and floating-point operations booked for a class.
    pub fn get(&self, class: Class) -> (f64, u64) {
        let i = class as usize;
        (self.nanos[i].load(Relaxed) as f64 * 1e-9, self.flops[i].load(Relaxed))
    }

    /// Back to zero.
    pub fn reset(&self) {
        for counter in self.nanos.iter().chain(&self.flops) {
            counter.store(0, Relaxed);
        }
    }
}
