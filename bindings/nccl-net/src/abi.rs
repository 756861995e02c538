//! Types and table macros that all versions of NCCL's interface for networks have in common.

use std::ffi::{c_char, c_int, c_ulong};

/// `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum Status {
    /// It worked.
    Success = 0,
    /// The operating system refused something.
    SystemError = 2,
    /// A bug of this library.
    InternalError = 3,
    /// A wrong argument.
    InvalidArgument = 4,
    /// Arguments that do not fit together, or the other ranks' calls.
    InvalidUsage = 5,
    /// A peer has failed.
    RemoteError = 6,
}

/// `ncclDebugLogger_t`: level, subsystems, file, line, format. Its further arguments are those of the format.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// An optional function of a table, which this plugin does not have: null.
pub type Absent = Option<unsafe extern "C" fn()>;

/// `ncclNetCommConfig_t` of versions 10 to 12.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct CommConfig {
    /// Traffic class; -1 for none.
    pub traffic_class: c_int,
}

/// `NCCL_PTR_HOST`.
pub const PTR_HOST: c_int = 1;
/// `NCCL_NET_DEVICE_HOST`: no part of the network runs on the GPU.
pub const NET_DEVICE_HOST: c_int = 0;
/// `NCCL_NET_DEVICE_INVALID_VERSION`.
pub const NET_DEVICE_NO_VERSION: c_int = 0;
/// Most bytes of a message: 1 TiB, NCCL's own limit.
pub const MAX_BYTES: usize = 1 << 40;

/// Properties of a device up to version 8, with which those of all later versions begin, but for `force_flush`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PropertiesV8 {
    /// Name, in NCCL's log.
    pub name: *const c_char,
    /// Path in /sys; null where there is none.
    pub pci_path: *const c_char,
    /// Identity of the NIC; 0 for none.
    pub guid: u64,
    /// Kinds of memory.
    pub ptr_support: c_int,
    /// Nonzero if a registration counts for all connections.
    pub reg_is_global: c_int,
    /// Speed, in Mbit/s.
    pub speed: c_int,
    /// Port of the NIC.
    pub port: c_int,
    /// Latency, in microseconds.
    pub latency: f32,
    /// Most connections.
    pub max_comms: c_int,
    /// Most receives of a group.
    pub max_recvs: c_int,
    /// Kind of network code that runs on the GPU; [`NET_DEVICE_HOST`] for none.
    pub net_device_type: c_int,
    /// Version of the network code on the GPU; [`NET_DEVICE_NO_VERSION`] for none.
    pub net_device_version: c_int,
}

/// The devices that a virtual one joins, `N` at most.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct VirtualDevice<const N: usize> {
    /// Number of devices joined.
    pub ndevs: c_int,
    /// Indices of the devices joined, of which the first `ndevs` count.
    pub devs: [c_int; N],
}

/// Properties of a device of versions 9 and 10 (`N` = 4), with which those of 11 and 12 (`N` = 8) begin.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PropertiesV9<const N: usize> {
    /// Name, in NCCL's log.
    pub name: *const c_char,
    /// Path in /sys; null where there is none.
    pub pci_path: *const c_char,
    /// Identity of the NIC; 0 for none.
    pub guid: u64,
    /// Kinds of memory.
    pub ptr_support: c_int,
    /// Nonzero if a registration counts for all connections.
    pub reg_is_global: c_int,
    /// Nonzero if receives must be flushed.
    pub force_flush: c_int,
    /// Speed, in Mbit/s.
    pub speed: c_int,
    /// Port of the NIC.
    pub port: c_int,
    /// Latency, in microseconds.
    pub latency: f32,
    /// Most connections.
    pub max_comms: c_int,
    /// Most receives of a group.
    pub max_recvs: c_int,
    /// Kind of network code that runs on the GPU; [`NET_DEVICE_HOST`] for none.
    pub net_device_type: c_int,
    /// Version of the network code on the GPU; [`NET_DEVICE_NO_VERSION`] for none.
    pub net_device_version: c_int,
    /// Devices that this one joins: itself alone.
    pub v_props: VirtualDevice<N>,
    /// Most bytes of a message.
    pub max_p2p_bytes: usize,
    /// Most bytes of a collective's message.
    pub max_coll_bytes: usize,
}
