//! A kernel of ours, put into a stream.

use cudarc::driver::{DriverError, sys};

use super::window::MAX_RANKS;

/// Threads of a block; the kernels are compiled for it.
pub(super) const THREADS: u32 = 512;

/// As `struct Team` of `kernels/team.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Team {
    pub(super) windows: [u64; MAX_RANKS],
    pub(super) report: u64,
    pub(super) patience: u64,
    pub(super) call: u64,
    pub(super) rank: u32,
    pub(super) number: u32,
}

/// # Safety
/// The parameters must be of the types which the kernel declares, and what they point to must be there until it has run.
pub(super) unsafe fn launch(
    function: sys::CUfunction,
    blocks: u32,
    stream: sys::CUstream,
    parameters: &mut [*mut std::ffi::c_void],
) -> Result<(), DriverError> {
    // SAFETY: forwarded from the caller.
    unsafe { cudarc::driver::result::launch_kernel(function, (blocks, 1, 1), (THREADS, 1, 1), 0, stream, parameters) }
}
