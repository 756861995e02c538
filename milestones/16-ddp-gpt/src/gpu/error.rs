//! "It cannot run here", kept apart from "it failed", and CUDA's errors in words.

use std::fmt;

use anyhow::anyhow;
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// What is missing, and what to do about it.
#[derive(Debug, PartialEq)]
pub enum Unavailable {
    /// No libcuda, which comes with the driver.
    Driver,
    /// The driver is older than the functions this program was built for; versions as CUDA counts them: 12040 is 12.4.
    OldDriver {
        /// Of the driver.
        has: i32,
        /// Ours.
        needs: i32,
    },
    /// The driver is there, and says this about devices.
    Device(String),
    /// No libnvrtc, the compiler.
    Compiler,
    /// No libcublas.
    Blas,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        match self {
            Unavailable::Driver => f.write_str(
                "--device cuda: no NVIDIA driver here (libcuda.so.1 was not found); it needs an NVIDIA GPU and its driver \
                 (Debian: nvidia-driver; in a container: start it with the GPUs, as by --gpus all), or take --device cpu",
            ),
            Unavailable::OldDriver { has, needs } => write!(
                f,
                "--device cuda: the NVIDIA driver is too old: it is for CUDA {}, this program for CUDA {} or later; install a newer \
                 driver, or take --device cpu",
                version(*has),
                version(*needs)
            ),
            Unavailable::Device(cause) => write!(
                f,
                "--device cuda: no GPU to use: {cause}. `nvidia-smi` lists those that the driver sees; CUDA_VISIBLE_DEVICES can hide \
                 them"
            ),
            Unavailable::Compiler => f.write_str(
                "--device cuda: no run-time compiler here (neither libnvrtc.so nor libnvrtc.so.12 was found): install the CUDA toolkit, \
                 or its part NVRTC alone (Debian: libnvrtc12; pip: nvidia-cuda-nvrtc-cu12), and put its folder into LD_LIBRARY_PATH",
            ),
            Unavailable::Blas => f.write_str(
                "--device cuda: no cuBLAS here (neither libcublas.so nor libcublas.so.12 was found; of CUDA 13, make a link \
                 libcublas.so to libcublas.so.13): install the CUDA toolkit, or its part cuBLAS alone (Debian: libcublas12; pip: \
                 nvidia-cublas-cu12), and put its folder into LD_LIBRARY_PATH",
            ),
        }
    }
}

impl std::error::Error for Unavailable {}

/// `error` with what was being done.
pub(crate) fn cuda(doing: &str, error: DriverError) -> anyhow::Error {
    anyhow!("{doing}: {}", words(error))
}

/// CUDA's name, number and text of an error, and what usually is behind it.
pub(crate) fn words(error: DriverError) -> String {
    let text = |s: std::result::Result<&std::ffi::CStr, DriverError>| {
        s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let mut line = format!("{} ({}): {}", text(error.error_name()), error.0 as u32, text(error.error_string()));
    let cause = match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "the model's activations do not fit: take a smaller --batch, or more ranks"
        }
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => "a kernel touched memory that is not mapped; only a new process helps",
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => "compiled for another generation of GPU",
        CUresult::CUDA_ERROR_NO_DEVICE => "the driver is here, a GPU is not",
        _ => return line,
    };
    line.push_str("; ");
    line.push_str(cause);
    line
}
