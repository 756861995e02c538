//! Structures, flags and statuses of NCCL's C interface (2.30).

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ncclResult_t`.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Success = 0,
    /// CUDA refused something.
    UnhandledCudaError = 1,
    /// The operating system refused something.
    SystemError = 2,
    /// An error inside this library.
    InternalError = 3,
    /// An argument has a wrong value.
    InvalidArgument = 4,
    /// The call does not fit the calls before it, or those of the other ranks.
    InvalidUsage = 5,
    /// Another rank is gone, or the network to it.
    RemoteError = 6,
    /// Not done yet; `ncclCommGetAsyncError` reports the end.
    InProgress = 7,
    /// A deadline passed (since 2.30).
    Timeout = 8,
}

impl Status {
    /// Every value, in order.
    pub const ALL: [Status; 9] = [
        Status::Success,
        Status::UnhandledCudaError,
        Status::SystemError,
        Status::InternalError,
        Status::InvalidArgument,
        Status::InvalidUsage,
        Status::RemoteError,
        Status::InProgress,
        Status::Timeout,
    ];
}

impl From<()> for Status {
    fn from((): ()) -> Status {
        Status::Success
    }
}

/// Bytes of a unique id.
pub const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    /// Opaque to callers.
    pub internal: [u8; UNIQUE_ID_BYTES],
}

/// `NCCL_API_MAGIC`.
pub const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
pub const UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` of 2.30. Callers of other versions pass less or more: `size` is its length in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's names")]
pub struct Config {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub traffic_class: c_int,
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    pub n_channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
    pub graph_usage_mode: c_int,
    pub num_rma_ctx: c_int,
    pub max_p2p_peers: c_int,
    pub graph_stream_ordering: c_int,
}

impl Config {
    /// Defines nothing, as `NCCL_CONFIG_INITIALIZER`.
    pub const NOTHING: Config = Config {
        size: size_of::<Config>(),
        magic: CONFIG_MAGIC,
        version: 0,
        blocking: UNDEFINED,
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: UNDEFINED,
        net_name: std::ptr::null(),
        split_share: UNDEFINED,
        traffic_class: UNDEFINED,
        comm_name: std::ptr::null(),
        collnet_enable: UNDEFINED,
        cta_policy: UNDEFINED,
        shrink_share: UNDEFINED,
        nvls_ctas: UNDEFINED,
        n_channels_per_net_peer: UNDEFINED,
        nvlink_centric_sched: UNDEFINED,
        graph_usage_mode: UNDEFINED,
        num_rma_ctx: UNDEFINED,
        max_p2p_peers: UNDEFINED,
        graph_stream_ordering: UNDEFINED,
    };
}

/// `NCCL_SIM_INFO_INITIALIZER`'s magic.
pub const SIM_INFO_MAGIC: c_uint = 0x7468_5283;

/// `ncclSimInfo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's names")]
pub struct SimInfo {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    /// Microseconds; -1 when unknown.
    pub estimated_time: f32,
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WaitSignalDesc {
    /// Signals to wait for.
    pub op_count: c_int,
    /// The rank that sends them.
    pub peer: c_int,
    /// Number of the signal.
    pub signal: c_int,
    /// Number of the context.
    pub context: c_int,
}

/// `ncclTeam_t`, passed by value: ranks at equal distances.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Team {
    /// Their number.
    pub ranks: c_int,
    /// Ours among them.
    pub rank: c_int,
    /// The distance of neighbours, in ranks of the communicator.
    pub stride: c_int,
}

/// `ncclMultimemHandle_t`, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Multimem {
    /// Address of the multicast memory.
    pub base: *mut c_void,
}

/// `ncclCommProperties_t` of 2.30; 2.29.2 ends before `lsa_teams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's names")]
pub struct Properties {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub rank: c_int,
    pub ranks: c_int,
    pub cuda_device: c_int,
    pub nvml_device: c_int,
    pub device_api: bool,
    pub multimem: bool,
    pub gin: c_int,
    pub lsa_teams: c_int,
    pub host_rma: bool,
    pub railed_gin: c_int,
}

/// Opaque target of an `ncclWindow_t`.
#[repr(C)]
pub struct Window {
    _opaque: [u8; 0],
}

/// Opaque target of an `ncclParamHandle_t`.
#[repr(C)]
pub struct ParamHandle {
    _opaque: [u8; 0],
}

/// `NCCL_SPLIT_NOCOLOR`.
pub const NO_COLOR: c_int = -1;
/// `NCCL_SHRINK_DEFAULT`.
pub const SHRINK_DEFAULT: c_int = 0;
/// `NCCL_SHRINK_ABORT`.
pub const SHRINK_ABORT: c_int = 1;
/// `NCCL_REVOKE_DEFAULT`.
pub const REVOKE_DEFAULT: c_int = 0;
/// `NCCL_SUSPEND_MEM`.
pub const SUSPEND_MEM: c_int = 1;
/// `NCCL_WIN_DEFAULT`.
pub const WIN_DEFAULT: c_int = 0;
/// `NCCL_WIN_COLL_SYMMETRIC`.
pub const WIN_COLL_SYMMETRIC: c_int = 1;
/// `NCCL_WIN_STRICT_ORDERING`.
pub const WIN_STRICT_ORDERING: c_int = 2;
/// `NCCL_WIN_REQUIRED_ALIGNMENT`.
pub const WIN_ALIGNMENT: usize = 4096;
/// `ncclScalarDevice`.
pub const SCALAR_DEVICE: c_int = 0;
/// `ncclScalarHostImmediate`.
pub const SCALAR_HOST: c_int = 1;
/// `ncclStatGpuMemSuspend`.
pub const STAT_SUSPEND: c_int = 0;
/// `ncclStatGpuMemSuspended`.
pub const STAT_SUSPENDED: c_int = 1;
/// `ncclStatGpuMemPersist`.
pub const STAT_PERSIST: c_int = 2;
/// `ncclStatGpuMemTotal`.
pub const STAT_TOTAL: c_int = 3;
/// `ncclNumOps`: operators from here on are made by `ncclRedOpCreatePreMulSum`.
pub const NUM_OPS: c_int = 5;
