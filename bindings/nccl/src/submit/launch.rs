//! Calls, put onto streams.

use std::sync::Arc;

use cudarc::driver::result::{event, stream as streams};
use cudarc::driver::sys;
use tinynccl::comm::RawCall;
use tinynccl::cuda::Path;

use crate::abi::error::{Error, Result};
use crate::comm::communicator::Communicator;
use crate::comm::gpu::Current;

/// A call of one communicator on one stream.
pub(crate) struct Call {
    pub(crate) comm: Arc<Communicator>,
    pub(crate) stream: Stream,
    pub(crate) work: Work,
}

/// The operation that a call enqueues.
pub(crate) enum Work {
    /// A collective or a message.
    Plain(RawCall),
    /// A custom operation, around a collective perhaps.
    Own { around: Option<RawCall>, enqueue: Enqueue },
    /// A wait for other ranks, which is enqueued last of its group: what they wait for may be in it.
    Wait(Enqueue),
}

/// Enqueues on a stream; the GPU is current.
pub(crate) type Enqueue = Box<dyn FnOnce(&Arc<Communicator>, sys::CUstream) -> Result<()> + Send>;

/// A stream of the caller, which stays valid as long as NCCL requires: until the calls on it are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(pub(crate) sys::CUstream);

// SAFETY: a handle that the driver lets any thread use; a `Part` with a per-thread stream stays with its thread.
unsafe impl Send for Stream {}

/// Enqueues a collective or a message that is in no group, by the shortest path.
#[inline]
pub(crate) fn plain(comm: &Communicator, stream: Stream, raw: &RawCall) -> Result<()> {
    let device = comm.device()?;
    let _current = Current::enter(device.context())?;
    // SAFETY: the program vouches for its buffers and its stream, as NCCL's interface requires.
    unsafe { device.enqueue(stream.0, raw) }.map_err(Error::from)
}

/// Enqueues a call that is in no group, or the only one of a group.
pub(crate) fn one(Call { comm, stream, work }: Call) -> Result<()> {
    match work {
        Work::Plain(raw) => plain(&comm, stream, &raw),
        Work::Own { enqueue, .. } | Work::Wait(enqueue) => {
            let _current = Current::enter(comm.device()?.context())?;
            enqueue(&comm, stream.0)
        }
    }
}

/// Enqueues the calls of a group, which are none afterwards: those of each communicator together.
pub(crate) fn all(calls: &mut Vec<Call>) -> Result<()> {
    if calls.len() < 2 {
        return calls.pop().map_or(Ok(()), one);
    }
    let mut parts: Vec<Part> = Vec::new();
    for call in calls.drain(..) {
        let index = parts.iter().position(|part| Arc::ptr_eq(&part.comm, &call.comm));
        let index = index.unwrap_or_else(|| {
            parts.push(Part { comm: call.comm.clone(), streams: Vec::new(), work: Vec::new() });
            parts.len() - 1
        });
        parts[index].add(call);
    }
    if parts.len() > 1 {
        // Before the first launch: kernels of one rank may wait for those of another of these, and loading code may
        // wait for kernels.
        parts.iter().try_for_each(Part::prepare)?;
    }
    if parts.len() > 1 && parts.iter().any(Part::is_long) && !parts.iter().any(Part::is_bound) {
        return side_by_side(parts);
    }
    parts.into_iter().try_for_each(Part::launch)
}

/// Launches each part in a separate thread. Enqueueing blocks when a stream is full; what the first rank waits for may
/// be calls of the second.
fn side_by_side(parts: Vec<Part>) -> Result<()> {
    let lost = || Error::internal("a thread that enqueued calls panicked");
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || part.launch())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(lost()))).collect()
    });
    outcomes.into_iter().collect()
}

/// Calls of one communicator in a group that are enqueued without waiting, whatever they are.
const CALLS: usize = 200;
/// Bytes of them, where a long call is many operations.
const BYTES: usize = 16 << 20;
/// The handle of `cudaStreamPerThread`, a different stream in each thread.
const OF_THREAD: usize = 2;

/// The calls of one communicator in a group.
struct Part {
    comm: Arc<Communicator>,
    /// The streams of the calls, each once.
    streams: Vec<Stream>,
    work: Vec<Work>,
}

impl Part {
    fn add(&mut self, call: Call) {
        if !self.streams.contains(&call.stream) {
            self.streams.push(call.stream);
        }
        self.work.push(call.work);
    }

    fn prepare(&self) -> Result<()> {
        let device = self.comm.device()?;
        let _current = Current::enter(device.context())?;
        let calls = self.work.iter().filter_map(|work| match work {
            Work::Plain(raw) => Some(raw),
            Work::Own { around, .. } => around.as_ref(),
            Work::Wait(_) => None,
        });
        Ok(device.prepare(calls)?)
    }

    /// True if enqueueing may wait for other ranks: a stream takes 1024 operations.
    fn is_long(&self) -> bool {
        let Ok(device) = self.comm.device() else { return false };
        let bytes = |work: &Work| match work {
            Work::Plain(raw) => raw.bytes(),
            Work::Own { around, .. } => around.as_ref().map_or(0, |raw| raw.bytes()),
            Work::Wait(_) => 0,
        };
        let bytes = || self.work.iter().map(bytes).fold(0, usize::saturating_add);
        self.work.len() > CALLS
            || matches!(device.path(), Path::Hosted | Path::Hosts) && bytes() > BYTES / device.size()
    }

    /// True if only this thread can enqueue: one of the streams is `cudaStreamPerThread`.
    fn is_bound(&self) -> bool {
        self.streams.iter().any(|stream| stream.0.addr() == OF_THREAD)
    }

    /// Enqueues all of it on the first stream, which waits for the others, and they for it. Under capture they become
    /// one graph.
    fn launch(self) -> Result<()> {
        let device = self.comm.device()?;
        let _current = Current::enter(device.context())?;
        let Some((first, others)) = self.streams.split_first() else { return Ok(()) };
        if let ([], [Work::Plain(raw)]) = (others, &self.work[..]) {
            // SAFETY: as in `plain`.
            return Ok(unsafe { device.enqueue(first.0, raw) }?);
        }
        for other in others {
            follow(*first, *other)?;
        }
        let (mut group, mut waits) = (device.group(first.0), Vec::new());
        for work in self.work {
            match work {
                // SAFETY: as in `plain`.
                Work::Plain(raw) => unsafe { group.add(&raw) }?,
                Work::Own { enqueue, .. } => {
                    group.flush()?;
                    enqueue(&self.comm, first.0)?;
                }
                Work::Wait(enqueue) => waits.push(enqueue),
            }
        }
        group.finish()?;
        waits.into_iter().try_for_each(|enqueue| enqueue(&self.comm, first.0))?;
        others.iter().try_for_each(|other| follow(*other, *first))
    }
}

/// Makes `later` wait for what is in `earlier`.
fn follow(later: Stream, earlier: Stream) -> Result<()> {
    let failed = |e| Error::cuda("ordering the streams of a group", e);
    let event = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed)?;
    // SAFETY: the event is ours, the streams are the caller's, of the current device.
    let done = unsafe {
        event::record(event, earlier.0)
            .and_then(|()| streams::wait_event(later.0, event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT))
    };
    // SAFETY: as above; the driver keeps what the wait needs.
    let freed = unsafe { event::destroy(event) };
    done.and(freed).map_err(failed)
}
