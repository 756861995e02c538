//! The arguments of a kernel, and its launch.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};

use super::cache::Function;
use crate::checked::call::Signature;
use crate::window::MAX_RANKS;
use tinynccl_comm::RawCall;
use tinynccl_plan::wire::Collective;

/// Threads of a block; the kernels are compiled for it.
pub(crate) const THREADS: u32 = 512;

/// As `struct Team` of `team.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Team {
    pub(crate) windows: [u64; MAX_RANKS],
    pub(crate) extensions: [u64; MAX_RANKS],
    pub(crate) report: u64,
    pub(crate) patience: u64,
    pub(crate) call: u64,
    pub(crate) rank: u32,
    pub(crate) number: u32,
    pub(crate) guarded: u32,
    pub(crate) unused: u32,
}

impl Team {
    /// The team in call `number`.
    pub(crate) fn in_call(&self, call: &RawCall, number: u32) -> Team {
        Team { call: Signature::new(call).0, number, ..*self }
    }
}

/// As `struct Remote` of `args.cuh`: how other ranks name this rank's buffers.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Remote {
    pub(crate) input: u64,
    pub(crate) output: u64,
}

/// `FLOW_GATHER` and `FLOW_SCATTER` of `args.cuh`.
pub(crate) const FLOW_GATHER: u32 = 1;
pub(crate) const FLOW_SCATTER: u32 = 2;

/// As `struct Args` of `args.cuh`: the first parameter of every kernel but `fused`. A family may have further ones.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Args {
    pub(crate) team: Team,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) bytes: u64,
    pub(crate) stride: u64,
    pub(crate) remote: Remote,
    pub(crate) scratch: u64,
    pub(crate) root: u32,
    pub(crate) flow: u32,
}

impl Args {
    pub(crate) fn new(team: Team, call: &RawCall) -> Args {
        let bytes = call.bytes() as u64;
        let (input, output) = call.device_addresses();
        Args {
            team,
            input,
            output,
            bytes,
            stride: match call.collective {
                Collective::AllToAll | Collective::ReduceScatter | Collective::Scatter => bytes,
                _ => 0,
            },
            remote: Remote::default(),
            scratch: 0,
            root: call.root as u32,
            flow: match call.collective {
                Collective::Gather => FLOW_GATHER,
                Collective::Scatter => FLOW_SCATTER,
                _ => 0,
            },
        }
    }
}

/// Enqueues a kernel; `more`: the family's further parameters, two at most.
///
/// # Safety
/// `more` must point to the parameters that the kernel declares after its `Args`. All memory that they point to must
/// stay valid until the kernel has run.
pub(crate) unsafe fn launch(
    function: Function,
    blocks: u32,
    stream: sys::CUstream,
    args: &Args,
    more: &[*const c_void],
) -> Result<(), DriverError> {
    let mut parameters = [(&raw const *args).cast(), std::ptr::null(), std::ptr::null()];
    for (parameter, own) in parameters[1..].iter_mut().zip(more) {
        *parameter = *own;
    }
    // SAFETY: forwarded from the caller.
    unsafe { launch_with(function, blocks, stream, parameters) }
}

/// [`launch`] of a kernel with other parameters.
///
/// # Safety
/// `parameters` must point to those that the kernel declares; else as there.
pub(crate) unsafe fn launch_with<const N: usize>(
    function: Function,
    blocks: u32,
    stream: sys::CUstream,
    parameters: [*const c_void; N],
) -> Result<(), DriverError> {
    // The driver reads as many as the kernel declares, and writes none.
    let mut parameters = parameters.map(<*const c_void>::cast_mut);
    let mut early = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: THREADS,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream,
        attrs: &raw mut early,
        numAttrs: function.begins_early.into(),
    };
    // SAFETY: forwarded from the caller; the driver reads the configuration during the call.
    unsafe { sys::cuLaunchKernelEx(&raw const config, function.handle, parameters.as_mut_ptr(), std::ptr::null_mut()) }
        .result()
}

/// Size and field offsets of a struct shared with kernels, each as CUDA C computes it and as the host has it.
#[cfg(test)]
macro_rules! mirrored {
    ($host:ty as $name:literal { $($field:ident $(as $theirs:literal)?),* $(,)? }) => {{
        #[allow(unused_mut, reason = "a name that both have needs no change")]
        let mut all: Vec<(String, usize)> = vec![(format!("sizeof({})", $name), size_of::<$host>())];
        $({
            let theirs = stringify!($field);
            $(let theirs = { let _ = theirs; $theirs };)?
            // The expansion of `offsetof` in NVRTC's compiler, which has no headers.
            all.push((format!("__INTADDR__(&((({}*)0)->{theirs}))", $name), std::mem::offset_of!($host, $field)));
        })*
        all
    }};
}
#[cfg(test)]
pub(crate) use mirrored;

#[cfg(test)]
pub(super) fn layouts() -> Vec<(String, usize)> {
    [
        mirrored!(Team as "Team" { windows as "window", extensions as "extension", report, patience, call, rank, number, guarded }),
        mirrored!(Remote as "Remote" { input, output }),
        mirrored!(Args as "Args" { team, input, output, bytes, stride, remote, scratch, root, flow }),
        vec![
            ("FLOW_GATHER".to_owned(), FLOW_GATHER as usize),
            ("FLOW_SCATTER".to_owned(), FLOW_SCATTER as usize),
        ],
    ]
    .concat()
}
