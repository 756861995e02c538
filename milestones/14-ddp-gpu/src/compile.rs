//! Compiles CUDA C to functions of a device: NVRTC makes PTX, and the driver makes machine code from it.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use cudarc::driver::{CudaContext, CudaModule};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

/// The kernels in CUDA C, in the order in which they are compiled as one text.
pub const SOURCE: &str = concat!(
    include_str!("kernels/matmul.cuh"),
    include_str!("kernels/layer.cu"),
    include_str!("kernels/loss.cu"),
    include_str!("kernels/momentum.cu"),
);

/// PTX of the kernels for devices of this compute capability. Needs no GPU.
///
/// # Errors
/// NVRTC is not installed, or the compiler's message.
pub fn compile((major, minor): (i32, i32)) -> Result<Ptx> {
    tinynccl::cuda::nvrtc()?;
    let options = CompileOptions {
        options: vec![
            format!("--gpu-architecture=compute_{major}{minor}"),
            "--std=c++17".to_owned(),
            "-default-device".to_owned(),
        ],
        name: Some("ddp_gpu.cu".to_owned()),
        ..CompileOptions::default()
    };
    match compile_ptx_with_opts(SOURCE, options) {
        Ok(ptx) => Ok(ptx),
        Err(CompileError::CompileError { log, .. }) => {
            bail!("NVRTC does not take the kernels:\n{}", log.to_string_lossy().trim_end())
        }
        Err(other) => bail!("NVRTC failed: {other:?}"),
    }
}

/// The kernels, loaded into `context`.
///
/// # Errors
/// As [`compile`], or the driver's.
pub fn load(context: &Arc<CudaContext>) -> Result<Arc<CudaModule>> {
    let capability = context.compute_capability().context("asking for the device's compute capability")?;
    context.load_module(compile(capability)?).context("loading the compiled kernels")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::kernels::NAMES;

    #[test]
    fn every_kernel_is_in_the_source_once() {
        for name in NAMES {
            assert_eq!(SOURCE.matches(&format!("extern \"C\" __global__ void {name}(")).count(), 1, "{name}");
        }
        assert_eq!(SOURCE.matches("__global__").count(), NAMES.len());
    }

    /// For Turing and for Hopper. NVRTC needs no GPU.
    #[test]
    fn the_source_compiles() {
        if let Err(error) = tinynccl::cuda::nvrtc() {
            assert!(matches!(error, tinynccl::Error::Unsupported { .. }), "{error}");
            // Not with a macro, whose output the test harness would capture.
            let _ = writeln!(std::io::stderr(), "SKIPPED the_source_compiles: {error}");
            return;
        }
        for capability in [(7, 5), (9, 0)] {
            let ptx = compile(capability).unwrap_or_else(|error| panic!("{error:#}")).to_src();
            for name in NAMES {
                assert!(ptx.contains(&format!(".entry {name}(")), "{name} for {capability:?}");
            }
        }
    }
}
