//! The library's functions, found by name as a program's loader finds them. Enums are ints, as a C compiler passes
//! them.
#![allow(non_snake_case, reason = "NCCL's names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;

use libloading::Library;
use nccl::abi::{Config, SimInfo, UniqueId};

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`.
pub(super) type Stream = *mut c_void;

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    // SAFETY: our library; its constructors need nothing.
    unsafe { Library::new("libnccl.so.2") }.expect("libnccl.so.2")
});

/// Declares functions; each is looked up when it is first called.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {$(
        #[allow(clippy::too_many_arguments, reason = "as many as NCCL has")]
        pub(super) fn $name($($argument: $type),*) -> c_int {
            type Function = unsafe extern "C" fn($($type),*) -> c_int;
            static FOUND: LazyLock<Function> = LazyLock::new(|| {
                // SAFETY: of that type: `header.rs` compares the header with NVIDIA's.
                *unsafe { LIBRARY.get::<Function>(stringify!($name)) }.expect(stringify!($name))
            });
            // SAFETY: tests pass pointers that are valid, or what the library must refuse.
            unsafe { (*FOUND)($($argument),*) }
        }
    )*};
}

functions! {
    ncclGetVersion(version: *mut c_int);
    ncclGetUniqueId(id: *mut UniqueId);
    ncclCommInitRank(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int);
    ncclCommInitRankConfig(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int, config: *const Config);
    ncclCommInitRankScalable(
        comm: *mut Comm, size: c_int, rank: c_int, count: c_int, ids: *const UniqueId, config: *const Config,
    );
    ncclCommInitAll(comm: *mut Comm, count: c_int, devices: *const c_int);
    ncclCommFinalize(comm: Comm);
    ncclCommDestroy(comm: Comm);
    ncclCommAbort(comm: Comm);
    ncclCommRevoke(comm: Comm, flags: c_int);
    ncclCommSplit(comm: Comm, color: c_int, key: c_int, new: *mut Comm, config: *const Config);
    ncclCommShrink(
        comm: Comm, excluded: *const c_int, count: c_int, new: *mut Comm, config: *const Config, flags: c_int,
    );
    ncclCommGetUniqueId(comm: Comm, id: *mut UniqueId);
    ncclCommGrow(
        comm: Comm, size: c_int, id: *const UniqueId, rank: c_int, new: *mut Comm, config: *const Config,
    );
    ncclCommGetAsyncError(comm: Comm, status: *mut c_int);
    ncclCommCount(comm: Comm, count: *mut c_int);
    ncclCommCuDevice(comm: Comm, device: *mut c_int);
    ncclCommUserRank(comm: Comm, rank: *mut c_int);
    ncclCommSuspend(comm: Comm, flags: c_int);
    ncclCommResume(comm: Comm);
    ncclCommMemStats(comm: Comm, which: c_int, value: *mut u64);
    ncclAllReduce(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm, stream: Stream,
    );
    ncclBroadcast(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream,
    );
    ncclBcast(buffer: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream);
    ncclReduce(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Comm,
        stream: Stream,
    );
    ncclAllGather(from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, comm: Comm, stream: Stream);
    ncclReduceScatter(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm, stream: Stream,
    );
    ncclAlltoAll(from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, comm: Comm, stream: Stream);
    ncclGather(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream,
    );
    ncclScatter(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream,
    );
    ncclSend(from: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream);
    ncclRecv(to: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream);
    ncclGroupStart();
    ncclGroupEnd();
    ncclGroupSimulateEnd(info: *mut SimInfo);
    ncclMemAlloc(at: *mut *mut c_void, bytes: usize);
    ncclMemFree(at: *mut c_void);
    ncclCommRegister(comm: Comm, at: *mut c_void, bytes: usize, handle: *mut *mut c_void);
    ncclCommDeregister(comm: Comm, handle: *mut c_void);
    ncclCommWindowRegister(comm: Comm, at: *mut c_void, bytes: usize, window: *mut *mut c_void, flags: c_int);
    ncclCommWindowDeregister(comm: Comm, window: *mut c_void);
    ncclRedOpCreatePreMulSum(op: *mut c_int, scalar: *mut c_void, dtype: c_int, residence: c_int, comm: Comm);
    ncclRedOpDestroy(op: c_int, comm: Comm);
    ncclSignal(peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Comm, stream: Stream);
}

/// The text of a status.
pub(super) fn error_string(status: c_int) -> String {
    type Function = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: of that type; the text is static.
    unsafe { text(LIBRARY.get::<Function>("ncclGetErrorString").unwrap()(status)) }
}

/// The text of the last failure, of a communicator or of this thread.
pub(super) fn last_error(comm: Comm) -> String {
    type Function = unsafe extern "C" fn(Comm) -> *const c_char;
    // SAFETY: of that type; the text lives until the next failure.
    unsafe { text(LIBRARY.get::<Function>("ncclGetLastError").unwrap()(comm)) }
}

unsafe fn text(at: *const c_char) -> String {
    assert!(!at.is_null());
    // SAFETY: a text of the library.
    unsafe { CStr::from_ptr(at) }.to_str().unwrap().to_owned()
}
