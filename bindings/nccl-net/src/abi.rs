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

/// The functions that are the same in versions 8 to 12, in the order in which tables have them.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident {
        init: $init:ty, properties: $properties:ty, listen: $listen:ty, connect: $connect:ty, isend: $isend:ty,
        irecv: $irecv:ty $(, $extra:ident: $extra_ty:ty)* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[repr(C)]
        #[allow(missing_docs, reason = "the functions are NCCL's, and documented in its headers")]
        pub struct $name {
            pub name: *const std::ffi::c_char,
            pub init: $init,
            pub devices: unsafe extern "C" fn(*mut std::ffi::c_int) -> $crate::abi::Status,
            pub get_properties: unsafe extern "C" fn(std::ffi::c_int, *mut $properties) -> $crate::abi::Status,
            pub listen: $listen,
            pub connect: $connect,
            pub accept: unsafe extern "C" fn(*mut std::ffi::c_void, *mut *mut std::ffi::c_void, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub reg_mr: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void, usize, std::ffi::c_int, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub reg_mr_dma_buf: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void, usize, std::ffi::c_int, u64, std::ffi::c_int, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub dereg_mr: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void) -> $crate::abi::Status,
            pub isend: $isend,
            pub irecv: $irecv,
            pub iflush: unsafe extern "C" fn(*mut std::ffi::c_void, std::ffi::c_int, *mut *mut std::ffi::c_void, *mut std::ffi::c_int, *mut *mut std::ffi::c_void, *mut *mut std::ffi::c_void) -> $crate::abi::Status,
            pub test: unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_int, *mut std::ffi::c_int) -> $crate::abi::Status,
            pub close_send: unsafe extern "C" fn(*mut std::ffi::c_void) -> $crate::abi::Status,
            pub close_recv: unsafe extern "C" fn(*mut std::ffi::c_void) -> $crate::abi::Status,
            pub close_listen: unsafe extern "C" fn(*mut std::ffi::c_void) -> $crate::abi::Status,
            pub get_device_mr: $crate::abi::Absent,
            pub irecv_consumed: $crate::abi::Absent,
            $(pub $extra: $extra_ty,)*
        }

        // SAFETY: addresses of functions, and of a text that does not change.
        unsafe impl Sync for $name {}
    };
}
pub(crate) use table;

/// A table with the functions of [`plugin`](crate::plugin), and those that the version alone has.
macro_rules! filled {
    ($name:ident { $($field:ident: $value:expr),* $(,)? }) => {
        $name {
            name: $crate::plugin::NAME.as_ptr(),
            devices: $crate::plugin::devices,
            accept: $crate::plugin::accept,
            reg_mr: $crate::plugin::reg_mr,
            reg_mr_dma_buf: $crate::plugin::reg_mr_dma_buf,
            dereg_mr: $crate::plugin::dereg_mr,
            iflush: $crate::plugin::iflush,
            test: $crate::plugin::test,
            close_send: $crate::plugin::close_send,
            close_recv: $crate::plugin::close_recv,
            close_listen: $crate::plugin::close_listen,
            get_device_mr: None,
            irecv_consumed: None,
            $($field: $value,)*
        }
    };
}
pub(crate) use filled;
