//! Training on a GPU: products by cuBLAS, everything else by kernels that NVRTC compiles when they are first needed.
//!
//! Reading order: [`device`] (a GPU and its memory), [`kernels`] and [`gemm`] (what runs there), [`network`] (what lies
//! in its memory), [`forward`], [`backward`] and [`attention`] (the passes of [`crate::cpu::model`], as launches),
//! [`averages`] (averaging gradients while the backward pass goes on), [`step`] (a whole step, also as one graph),
//! [`trace`]. The kernels are in `kernels/`, one idea per file.
//!
//! Nothing of CUDA is needed to build this: driver, NVRTC and cuBLAS are opened at run time, and [`device::count`] says
//! which one is missing.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub mod attention;
pub mod averages;
pub mod backward;
pub mod device;
pub mod forward;
pub mod fused_gelu;
pub mod gemm;
pub mod kernels;
pub mod network;
pub mod step;
pub mod trace;

/// Format in which matrix products read their inputs; sums are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// f32 without tensor cores.
    F32,
    /// f32 in memory, rounded to 10 bits of mantissa by the tensor cores.
    Tf32,
    /// bfloat16 activations and a bfloat16 copy of the weights; the residual stream, the gradients of weights and the
    /// optimizer stay f32.
    Bf16,
}

impl Precision {
    /// Bytes of an activation.
    pub fn bytes(self) -> usize {
        if self == Precision::Bf16 { 2 } else { 4 }
    }
}

/// Options of a run on GPUs, beside its [`Plan`](crate::train::Plan).
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// GPU: how matrix products read their inputs.
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: Precision,
    /// GPU: launch each step as one CUDA graph.
    #[arg(long)]
    pub graph: bool,
    /// GPU: blocks of a kernel that averages a large bucket; 0: as many as the communicator would take. Each block
    /// takes a multiprocessor from the backward pass.
    #[arg(long, default_value = "16")]
    pub comm_blocks: u32,
    /// GPU: write when the parts of the last step ran, for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}
