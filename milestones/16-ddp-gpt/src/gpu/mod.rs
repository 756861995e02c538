//! The same training on a GPU: products by cuBLAS, everything else by kernels that NVRTC compiles when the program starts.
//!
//! Reading order: [`network`] (what lies in device memory), [`forward`], [`backward`], [`attention`] and [`gelu`] (the passes of
//! [`crate::model`], as launches), [`buckets`] and [`reducer`] (averaging gradients while the backward pass goes on),
//! [`step`] (a whole step, also as one graph), [`train`] (the loop). The kernels are in `kernels/`, one idea per file.
//!
//! Nothing of CUDA is needed to build this: driver, NVRTC and cuBLAS are opened at run time, and [`error::Unavailable`] says which
//! one is missing.

pub mod attention;
pub mod backward;
pub mod buckets;
pub mod device;
pub mod error;
pub mod forward;
pub mod fused_gelu;
pub mod gelu;
pub mod gemm;
pub mod kernels;
pub mod memory;
pub mod network;
pub mod reducer;
pub mod step;
pub mod trace;
pub mod train;

/// How matrix products read their inputs; sums are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Precision {
    /// f32 without tensor cores.
    F32,
    /// f32 in memory, rounded to 10 bits of mantissa by the tensor cores.
    Tf32,
    /// bfloat16 activations and a bfloat16 copy of the weights; the residual stream, the gradients of weights and the optimizer
    /// stay f32.
    #[default]
    Bf16,
}

impl Precision {
    /// Bytes of an activation.
    pub fn bytes(self) -> usize {
        if self == Precision::Bf16 { 2 } else { 4 }
    }
}
