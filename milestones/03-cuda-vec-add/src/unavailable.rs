//! Distinguishes "it cannot run here" from "it failed" by the exit status, for scripts and tests.

use std::fmt;
use std::process::ExitCode;

/// Exit status of a program that lacks a requirement. Test runners treat 77 as "skipped".
pub(crate) const EXIT_UNAVAILABLE: u8 = 77;

/// The missing requirement.
#[derive(Debug, PartialEq)]
pub(crate) enum Unavailable {
    /// No libcuda, which comes with the driver.
    Driver,
    /// The driver is older than the functions this program was built for; versions as CUDA counts them: 12040 is 12.4.
    OldDriver { has: i32, needs: i32 },
    /// The driver is there; this is its error about devices.
    Device(String),
    /// No libnvrtc, the compiler.
    Compiler,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        match self {
            Unavailable::Driver => f.write_str(
                "no NVIDIA driver here (libcuda.so.1 was not found): this program needs an NVIDIA GPU and its driver \
                 (Debian: nvidia-driver; in a container: start it with the GPUs, as by --gpus all)",
            ),
            Unavailable::OldDriver { has, needs } => write!(
                f,
                "the NVIDIA driver is too old: it is for CUDA {}, this program for CUDA {} or later; install a newer driver",
                version(*has),
                version(*needs)
            ),
            Unavailable::Device(cause) => {
                write!(f, "no GPU to use: {cause}. `nvidia-smi` lists those that the driver sees; CUDA_VISIBLE_DEVICES can hide them")
            }
            Unavailable::Compiler => f.write_str(
                "no run-time compiler here (neither libnvrtc.so nor libnvrtc.so.12 was found): install the CUDA toolkit, or its part NVRTC alone \
                 (Debian: libnvrtc12 or nvidia-cuda-toolkit; pip: nvidia-cuda-nvrtc-cu12), and put its folder into LD_LIBRARY_PATH",
            ),
        }
    }
}

impl std::error::Error for Unavailable {}

/// Turns `result` into an exit code for `main`, and prints an error: 77 for [`Unavailable`], 1 for any other error.
pub(crate) fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            match error.downcast_ref::<Unavailable>() {
                Some(_) => ExitCode::from(EXIT_UNAVAILABLE),
                None => ExitCode::FAILURE,
            }
        }
    }
}
