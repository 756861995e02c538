//! Training on a GPU: products by cuBLAS, everything else by kernels that NVRTC compiles when they are first needed.
//!
//! Reading order: [`device`] (a GPU and its memory), [`kernels`] and [`gemm`] (what runs there), [`network`] (what lies
//! in its memory), [`forward`], [`backward`] and [`attention`] (the passes of [`crate::cpu::model`], as launches),
//! [`averages`] (averaging gradients while the backward pass goes on), [`step`] (a whole step, also as one graph),
//! [`trace`]. The kernels are in `kernels/`, one idea per file.
//!
//! By the cargo feature `cuda`. Nothing of CUDA is needed to build it: driver, NVRTC and cuBLAS are opened at run time,
//! and [`count`] says which one is missing.

#![cfg_attr(not(feature = "cuda"), allow(rustdoc::broken_intra_doc_links))]

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use tinynccl::Comm;

use crate::data::Corpus;
use crate::train::{Engine, Plan, State};

#[cfg(feature = "cuda")]
pub mod attention;
#[cfg(feature = "cuda")]
pub mod averages;
#[cfg(feature = "cuda")]
pub mod backward;
#[cfg(feature = "cuda")]
pub mod device;
#[cfg(feature = "cuda")]
pub mod forward;
#[cfg(feature = "cuda")]
pub mod fused_gelu;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod kernels;
#[cfg(feature = "cuda")]
pub mod network;
#[cfg(feature = "cuda")]
pub mod step;
#[cfg(feature = "cuda")]
pub mod trace;

/// Begins the error of a run that cannot use a GPU.
const NOT_HERE: &str = "--device cuda: no training on a GPU here (--device cpu needs none)";

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

/// Options of a run on GPUs, beside its [`Plan`].
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
    /// GPU: write a timeline of the last step's parts, for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// Returns the number of GPUs, or what is missing ([`Error::Unsupported`](tinynccl::Error::Unsupported)). Makes no
/// context.
pub fn count() -> Result<usize> {
    #[cfg(feature = "cuda")]
    return device::count();
    #[cfg(not(feature = "cuda"))]
    Err(not_built())
}

/// Training on the GPU of this rank.
///
/// # Errors
/// As [`count`].
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn engine<'a>(
    plan: &'a Plan,
    options: &'a Options,
    state: &State,
    corpus: &Corpus,
    comm: &'a Comm,
) -> Result<Box<dyn Engine + 'a>> {
    #[cfg(feature = "cuda")]
    return Ok(Box::new(step::Training::new(plan, options, state, corpus, comm)?));
    #[cfg(not(feature = "cuda"))]
    Err(not_built())
}

#[cfg(not(feature = "cuda"))]
fn not_built() -> anyhow::Error {
    let detail = "this program was built without it: cargo run --release -p ddp-gpt --features cuda -- …";
    let error = tinynccl::Error::Unsupported { what: "CUDA".to_owned(), detail: detail.to_owned() };
    anyhow::Error::from(error).context(NOT_HERE)
}
