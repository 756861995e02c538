//! A rank: a communicator, its GPU, a stream.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, sys};
use nccl::abi::UniqueId;

use super::background;
use super::functions::*;

pub(super) const SUCCESS: c_int = 0;
pub(super) const INVALID_ARGUMENT: c_int = 4;
pub(super) const INVALID_USAGE: c_int = 5;
pub(super) const REMOTE_ERROR: c_int = 6;
pub(super) const IN_PROGRESS: c_int = 7;

/// A rank of a test.
pub(super) struct Rank {
    pub(super) comm: Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
}

// SAFETY: NCCL's communicators may be used from any thread.
unsafe impl Send for Rank {}
// SAFETY: as above.
unsafe impl Sync for Rank {}

/// A communicator for another thread.
#[derive(Clone, Copy)]
pub(super) struct Shared(pub(super) Comm);

// SAFETY: as above.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Panics with the library's text unless a call was successful.
#[track_caller]
pub(super) fn ok(status: c_int) {
    assert!(status == SUCCESS, "{}: {}", error_string(status), last_error(std::ptr::null_mut()));
}

/// Panics unless a call failed with `status` and its text has all of the words.
#[track_caller]
pub(super) fn refused(got: c_int, status: c_int, words: &[&str]) {
    let text = last_error(std::ptr::null_mut());
    assert_eq!(got, status, "{}: {text}", error_string(got));
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text:?}");
    }
}

pub(super) fn unique_id() -> UniqueId {
    let mut id = UniqueId { internal: [0; 128] };
    ok(ncclGetUniqueId(&mut id));
    id
}

/// GPU `device`, current in this thread.
pub(super) fn gpu(device: usize) -> Arc<CudaContext> {
    let context = CudaContext::new(device).unwrap();
    // SAFETY: tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    context
}

impl Rank {
    /// A communicator that is there, on the GPU of its number.
    pub(super) fn of(comm: Comm, rank: usize, size: usize, context: Arc<CudaContext>) -> Rank {
        let stream = context.new_stream().unwrap();
        Rank { comm, rank, size, context, stream }
    }

    /// Joins by an id, on the GPU of its number.
    pub(super) fn join(id: UniqueId, rank: usize, size: usize) -> Rank {
        let context = gpu(rank);
        let mut comm = std::ptr::null_mut();
        ok(ncclCommInitRank(&mut comm, size as c_int, id, rank as c_int));
        Rank::of(comm, rank, size, context)
    }

    /// Joins with a non-blocking communicator.
    pub(super) fn join_in_background(id: UniqueId, rank: usize, size: usize) -> Rank {
        let context = gpu(rank);
        let mut comm = std::ptr::null_mut();
        let begun = ncclCommInitRankConfig(&mut comm, size as c_int, id, rank as c_int, &background::config());
        background::begun(begun, comm);
        Rank::of(comm, rank, size, context)
    }

    /// Returns true while work waits on the stream.
    pub(super) fn is_busy(&self) -> bool {
        // SAFETY: the stream is alive.
        let state = unsafe { sys::cuStreamQuery(self.stream.cu_stream()) };
        state == sys::CUresult::CUDA_ERROR_NOT_READY
    }

    pub(super) fn stream(&self) -> Stream {
        self.stream.cu_stream().cast()
    }

    /// Device memory with these bytes.
    pub(super) fn memory(&self, bytes: &[u8]) -> Memory {
        Memory { slice: self.stream.clone_htod(bytes).unwrap(), stream: self.stream.clone() }
    }

    /// Waits for the stream; the communicator must be well.
    #[track_caller]
    pub(super) fn wait(&self) {
        self.stream.synchronize().unwrap();
        let status = self.async_error();
        assert!(status == SUCCESS, "rank {}: {}: {}", self.rank, error_string(status), last_error(self.comm));
    }

    pub(super) fn async_error(&self) -> c_int {
        async_error(self.comm)
    }

    /// Sums a number over the ranks: whether they still work together.
    #[track_caller]
    pub(super) fn still_works(&self) {
        let memory = self.memory(&(1 + self.rank as i32).to_le_bytes().repeat(100));
        ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 100, 2, 0, self.comm, self.stream()));
        self.wait();
        let sum = (self.size * (self.size + 1) / 2) as i32;
        assert_eq!(memory.read(), sum.to_le_bytes().repeat(100), "rank {}", self.rank);
    }

    pub(super) fn destroy(self) {
        ok(ncclCommDestroy(self.comm));
    }
}

pub(super) fn async_error(comm: Comm) -> c_int {
    let mut status = -1;
    ok(ncclCommGetAsyncError(comm, &mut status));
    status
}

/// Device memory.
pub(super) struct Memory {
    slice: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

impl Memory {
    /// The address of a byte.
    pub(super) fn at(&self, byte: usize) -> *const c_void {
        self.at_mut(byte)
    }

    pub(super) fn at_mut(&self, byte: usize) -> *mut c_void {
        (self.slice.device_ptr(&self.stream).0 as usize + byte) as *mut c_void
    }

    /// Its bytes, when the stream has come here.
    pub(super) fn read(&self) -> Vec<u8> {
        self.stream.clone_dtoh(&self.slice).unwrap()
    }
}

/// Runs `body` as each rank of a new communicator, in threads, with a GPU each.
pub(super) fn threads<R: Send>(size: usize, body: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    each(size, unique_id(), |rank| {
        let result = body(&rank);
        rank.destroy();
        result
    })
}

/// Runs `body` as each rank of a new communicator, in threads.
pub(super) fn each<R: Send>(size: usize, id: UniqueId, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks = (0..size).map(|rank| scope.spawn(move || body(Rank::join(id, rank, size))));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// All ranks of a new communicator, held by this thread.
pub(super) fn all(size: usize) -> Vec<Rank> {
    let mut comms = vec![std::ptr::null_mut(); size];
    ok(ncclCommInitAll(comms.as_mut_ptr(), size as c_int, std::ptr::null()));
    comms.into_iter().enumerate().map(|(rank, comm)| Rank::of(comm, rank, size, gpu(rank))).collect()
}

/// Runs `work` in a group, which must succeed.
#[track_caller]
pub(super) fn group(work: impl FnOnce()) {
    ok(ncclGroupStart());
    work();
    ok(ncclGroupEnd());
}
