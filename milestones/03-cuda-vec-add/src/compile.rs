//! From CUDA C to loaded functions: NVRTC produces PTX, and the driver turns it into machine code.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts, sys};
use std::sync::Arc;

use crate::device::cuda;
use crate::unavailable::Unavailable;

/// The kernels, in CUDA C.
pub(crate) const SOURCE: &str = include_str!("vec_add.cu");

/// The four functions of [`SOURCE`], in the order of the table.
pub(crate) const KERNELS: [&str; 4] = ["add_element", "add_strided", "add_vector", "add_blocked"];

/// Compiled kernels and the time it took.
#[derive(Debug)]
pub(crate) struct Kernels {
    /// One for each of [`KERNELS`].
    pub(crate) functions: Vec<CudaFunction>,
    pub(crate) nvrtc: (i32, i32),
    pub(crate) target: String,
    pub(crate) ptx_bytes: usize,
    /// CUDA C to PTX.
    pub(crate) compiling: Duration,
    /// PTX to machine code. The driver caches the result in ~/.nv/ComputeCache, so a second start is faster.
    pub(crate) loading: Duration,
}

/// NVRTC's version, or an error if the library is missing.
pub(crate) fn nvrtc_version() -> Result<(i32, i32)> {
    // SAFETY: only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::Compiler.into());
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes only to the two variables.
    match unsafe { sys::nvrtcVersion(&mut major, &mut minor) } {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        other => bail!("cannot ask NVRTC for its version: {other:?}"),
    }
}

/// PTX is not the machine language of any GPU. `compute_90` limits it to instructions of that generation, and the
/// driver of a later GPU can still translate it. (`sm_90` would produce machine code for that one generation.)
// EXERCISE 1 (How it works): the name of the virtual machine that the PTX targets, from the compute capability.
pub(crate) fn target((major, minor): (i32, i32)) -> String {
    format!("compute_{major}{minor}")
}

/// Compiles `source` and loads `names` from it.
pub(crate) fn compile(
    context: &Arc<CudaContext>,
    capability: (i32, i32),
    source: &str,
    names: &[&str],
) -> Result<Kernels> {
    let nvrtc = nvrtc_version()?;
    let target = target(capability);
    let options = CompileOptions {
        options: vec![format!("--gpu-architecture={target}")],
        name: Some("vec_add.cu".to_owned()),
        ..CompileOptions::default()
    };
    let start = Instant::now();
    let ptx = match compile_ptx_with_opts(source, options) {
        Ok(ptx) => ptx,
        // The compiler's own message with file and line.
        Err(CompileError::CompileError { log, nvrtc, .. }) => {
            bail!("NVRTC does not take the source ({:?}):\n{}", nvrtc.0, log.to_string_lossy().trim_end())
        }
        Err(other) => bail!("NVRTC failed: {other}"),
    };
    let compiling = start.elapsed();
    log::info!("NVRTC {}.{} compiled for {target} in {compiling:?}", nvrtc.0, nvrtc.1);
    let ptx_bytes = ptx.as_bytes().map_or(0, <[u8]>::len);
    let start = Instant::now();
    let module = context.load_module(ptx).map_err(|e| cuda("cannot load the compiled kernels", e))?;
    let loading = start.elapsed();
    log::info!("the driver made machine code of {ptx_bytes} bytes of PTX in {loading:?}");
    let functions = names
        .iter()
        .map(|name| module.load_function(name).map_err(|e| cuda(&format!("cannot find {name} in the module"), e)))
        .collect::<Result<_>>()?;
    Ok(Kernels { functions, nvrtc, target, ptx_bytes, compiling, loading })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_the_devices_generation() {
        assert_eq!(target((9, 0)), "compute_90");
        assert_eq!(target((12, 1)), "compute_121");
    }

    #[test]
    fn the_source_has_every_kernel_with_the_name_it_is_looked_up_by() {
        for name in KERNELS {
            assert!(SOURCE.contains(&format!("extern \"C\" __global__ void {name}(")), "{name}");
        }
        assert_eq!(SOURCE.matches("__global__").count(), KERNELS.len());
    }
}
