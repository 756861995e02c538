//! Two ranks on two GPUs, over this library or NVIDIA's NCCL.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaFunction};
use tinynccl::process_group::{BackendType, Device, ProcessGroup, nccl_library};
use tinynccl::{Config, Error, cuda, launch};

use crate::ranks::{CannotRunHere, Job};

/// The kernels that the labs compute with.
const SOURCE: &str = include_str!("kernels.cu");

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Run the mended version.
    #[arg(long)]
    pub(crate) fixed: bool,
    /// Library whose communicator the ranks use.
    #[arg(long, value_enum, default_value = "tinynccl")]
    backend: Library,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Library {
    /// Ours.
    Tinynccl,
    /// NVIDIA's.
    Nccl,
}

/// The two ranks: a call fails after 5 s without progress.
pub(crate) fn job() -> Job {
    // On GPUs a call that differs is an invalid one.
    Job::new(2, 5, |e| match e {
        Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. } => true,
        other => other.to_string().contains(" disagree: "),
    })
}

impl Options {
    pub(crate) fn is_nccl(&self) -> bool {
        self.backend == Library::Nccl
    }

    /// Starts the two ranks, or is one of them. Each has its own GPU, and compiles kernels.
    pub(crate) fn run(&self, rank: impl FnOnce(&ProcessGroup, &Arc<CudaContext>) -> Result<()>) -> Result<u8> {
        self.start(&job(), true, rank)
    }

    /// As [`Options::run`], without kernels of the lab's own.
    pub(crate) fn run_job(
        &self,
        job: &Job,
        rank: impl FnOnce(&ProcessGroup, &Arc<CudaContext>) -> Result<()>,
    ) -> Result<u8> {
        self.start(job, false, rank)
    }

    fn start(
        &self,
        job: &Job,
        kernels: bool,
        rank: impl FnOnce(&ProcessGroup, &Arc<CudaContext>) -> Result<()>,
    ) -> Result<u8> {
        if !launch::is_rank() {
            // A wrong setting is the user's, not this machine's.
            let config = Config::from_env()?;
            self.check(&config, kernels).map_err(|why| CannotRunHere(why.to_string()))?;
        }
        let backend = if self.is_nccl() { BackendType::Nccl } else { BackendType::Tinynccl };
        job.run(|comm| {
            let group = ProcessGroup::new(comm, backend, Device::LocalRank)?;
            let context = group.device().context("the group has no GPU")?;
            // cudarc would order the streams for us; a program over NCCL's C interface orders its own.
            // SAFETY: each lab orders what it does with its memory, or shows what happens when it does not.
            unsafe { context.disable_event_tracking() };
            rank(&group, context)?;
            Ok(group.close()?)
        })
    }

    fn check(&self, config: &Config, kernels: bool) -> Result<()> {
        let gpus = cuda::device_count()?;
        anyhow::ensure!(gpus >= 2, "it needs two GPUs, and the driver sees {gpus}");
        if kernels {
            cuda::nvrtc()?;
        }
        if self.is_nccl() {
            nccl_library(config)?;
        }
        Ok(())
    }
}

/// One of the kernels, loaded.
pub(crate) fn kernel(context: &Arc<CudaContext>, name: &str) -> Result<CudaFunction> {
    let ptx = cuda::compile("kernels.cu", SOURCE, &[], context.compute_capability()?)?;
    Ok(context.load_module(ptx)?.load_function(name)?)
}

/// Multiprocessors of the GPU.
pub(crate) fn multiprocessors(context: &CudaContext) -> Result<u32> {
    Ok(context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.try_into()?)
}
