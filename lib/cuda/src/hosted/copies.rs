//! The stream operations of a call: copies, and waits between them.
//!
//! All of a call is enqueued before `enqueue` returns, in an order in which each operation waits only for earlier ones
//! and for the workers. So streams may share hardware queues. The workers' threads never call the driver, because the
//! program may hold its lock in a call that waits for the device.
//!
//! The driver's queues hold about a thousand operations of a stream. `enqueue` of a call of more than some 300 chunks
//! therefore returns only after the first chunks have passed. Ranks that one thread drives must make shorter calls, or
//! take larger chunks: otherwise the next rank's call comes too late, and the deadline ends both.

use std::sync::Arc;

use cudarc::driver::result::{event, memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async, stream as streams};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};

use super::around::Around;
use super::progress::Worker;
use super::route::{Route, Side};
use super::signals::Signals;
use super::staging::DEPTH;
use tinynccl_plan::error::Error;

const NO_FLAGS: sys::CUevent_wait_flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

/// Reason for which a call was not enqueued.
pub(super) enum Stopped {
    Driver(DriverError),
    Around(Error),
}

impl From<DriverError> for Stopped {
    fn from(error: DriverError) -> Stopped {
        Stopped::Driver(error)
    }
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Stopped {
        Stopped::Around(error)
    }
}

/// Private streams for calls of several chunks: one down, one up.
#[derive(Debug)]
pub(super) struct Copies {
    down: Arc<CudaStream>,
    up: Arc<CudaStream>,
    begin: CudaEvent,
    /// All copies down are done.
    read: CudaEvent,
    end: CudaEvent,
    /// Per worker and slot: the slot is free again.
    free: Vec<[CudaEvent; DEPTH]>,
    /// Chunks of each worker so far.
    numbers: Vec<u32>,
}

impl Copies {
    pub(super) fn new(context: &Arc<CudaContext>, workers: usize) -> Result<Copies, DriverError> {
        let event = || context.new_event(None);
        let slots = || Ok([event()?, event()?, event()?]);
        Ok(Copies {
            down: context.new_stream()?,
            up: context.new_stream()?,
            begin: event()?,
            read: event()?,
            end: event()?,
            free: (0..workers).map(|_| slots()).collect::<Result<_, DriverError>>()?,
            numbers: vec![0; workers],
        })
    }

    /// Numbers of the first chunk that each worker gets of the next call.
    pub(super) fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// Enqueues a call on its streams.
    ///
    /// # Safety
    /// As `DeviceComm::enqueue`: the route's device memory must be there until the stream has passed the call.
    pub(super) unsafe fn put(
        &mut self,
        stream: sys::CUstream,
        route: &Route,
        workers: &[Arc<Worker>],
        signals: &Signals,
        around: &mut dyn Around,
    ) -> Result<(), Stopped> {
        let chunks = route.chunks();
        // SAFETY: forwarded from the caller.
        let put = unsafe {
            match chunks {
                1 => self.put_one(stream, route, workers, signals, around),
                _ => self.put_many(stream, route, workers, signals, around),
            }
        };
        if put.is_err() {
            // What was enqueued uses the caller's memory. The first error is the one to tell.
            // SAFETY: see above.
            let _ = unsafe { self.join(stream) };
        }
        for (worker, number) in self.numbers.iter_mut().enumerate() {
            *number = number.wrapping_add((chunks + workers.len() - 1 - worker) as u32 / workers.len() as u32);
        }
        put
    }

    /// Makes the caller's stream wait for ours.
    unsafe fn join(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: forwarded from the caller; streams and events are ours and of one context.
        unsafe {
            event::record(self.read.cu_event(), self.down.cu_stream())?;
            streams::wait_event(stream, self.read.cu_event(), NO_FLAGS)?;
            event::record(self.end.cu_event(), self.up.cu_stream())?;
            streams::wait_event(stream, self.end.cu_event(), NO_FLAGS)
        }
    }

    /// All of it in the caller's stream: there is nothing to overlap.
    unsafe fn put_one(
        &self,
        stream: sys::CUstream,
        route: &Route,
        workers: &[Arc<Worker>],
        signals: &Signals,
        around: &mut dyn Around,
    ) -> Result<(), Stopped> {
        let slot = workers[0].slot(0);
        let number = self.numbers[0];
        around.before(0)?;
        // SAFETY: forwarded from the caller; the slot is free, because the call before is over where this one begins.
        unsafe {
            copy(stream, route.down.as_ref(), 0, slot, Way::Down)?;
            signals.arrive(stream, 0, number)?;
            copy_own(stream, route)?;
            around.meanwhile()?;
            signals.wait(stream, 0, number)?;
            copy(stream, route.up.as_ref(), 0, slot, Way::Up)?;
        }
        if around.follows(0) {
            around.after(0)?;
        }
        Ok(())
    }

    unsafe fn put_many(
        &self,
        stream: sys::CUstream,
        route: &Route,
        workers: &[Arc<Worker>],
        signals: &Signals,
        around: &mut dyn Around,
    ) -> Result<(), Stopped> {
        let chunks = route.chunks();
        let (down, up) = (self.down.cu_stream(), self.up.cu_stream());
        let number = |worker: usize, turn: usize| self.numbers[worker].wrapping_add(turn as u32);
        let place = |chunk: usize| (chunk % workers.len(), chunk / workers.len());
        around.before(0)?;
        // SAFETY: forwarded from the caller; streams and events are ours and of one context.
        unsafe {
            event::record(self.begin.cu_event(), stream)?;
            streams::wait_event(down, self.begin.cu_event(), NO_FLAGS)?;
            streams::wait_event(up, self.begin.cu_event(), NO_FLAGS)?;
            // A chunk waits for the previous one in its slot.
            let ahead = workers.len() * DEPTH - 1;
            for step in 0..chunks + ahead {
                if step < chunks {
                    if step > 0 && around.before(step)? {
                        // A wait is for what was recorded last when it was enqueued.
                        event::record(self.begin.cu_event(), stream)?;
                        streams::wait_event(down, self.begin.cu_event(), NO_FLAGS)?;
                    }
                    let (worker, turn) = place(step);
                    let slot = turn % DEPTH;
                    if turn >= DEPTH {
                        streams::wait_event(down, self.free[worker][slot].cu_event(), NO_FLAGS)?;
                    }
                    copy(down, route.down.as_ref(), step, workers[worker].slot(slot), Way::Down)?;
                    signals.arrive(down, worker, number(worker, turn))?;
                }
                if step == 0 {
                    copy_own(stream, route)?;
                    around.meanwhile()?;
                }
                if let Some(chunk) = step.checked_sub(ahead) {
                    let (worker, turn) = place(chunk);
                    let slot = turn % DEPTH;
                    signals.wait(up, worker, number(worker, turn))?;
                    copy(up, route.up.as_ref(), chunk, workers[worker].slot(slot), Way::Up)?;
                    // Only if another chunk will use the slot.
                    if chunk + workers.len() * DEPTH < chunks {
                        event::record(self.free[worker][slot].cu_event(), up)?;
                    }
                    if around.follows(chunk) {
                        event::record(self.end.cu_event(), up)?;
                        streams::wait_event(stream, self.end.cu_event(), NO_FLAGS)?;
                        around.after(chunk)?;
                    }
                }
            }
            // Signalled by the host already, unless a failure has released the waits: then the caller may free its
            // input.
            event::record(self.read.cu_event(), down)?;
            streams::wait_event(up, self.read.cu_event(), NO_FLAGS)?;
            event::record(self.end.cu_event(), up)?;
            streams::wait_event(stream, self.end.cu_event(), NO_FLAGS)?;
        }
        Ok(())
    }

    /// Waits for the copies.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        self.down.synchronize()?;
        self.up.synchronize()
    }
}

#[derive(Debug, Clone, Copy)]
enum Way {
    Down,
    Up,
}

/// Our own part of the output, on the device.
unsafe fn copy_own(stream: sys::CUstream, route: &Route) -> Result<(), DriverError> {
    match &route.own {
        // SAFETY: the caller of `enqueue` vouches for both.
        Some(own) => unsafe { memcpy_dtod_async(own.to, own.from, own.bytes as usize, stream) },
        None => Ok(()),
    }
}

/// Copies a chunk of all rows.
///
/// # Safety
/// The side's memory and the slot must be there until the stream has passed the copy.
unsafe fn copy(
    stream: sys::CUstream,
    side: Option<&Side>,
    chunk: usize,
    slot: *mut u8,
    way: Way,
) -> Result<(), DriverError> {
    let Some((side, (offset, len))) = side.and_then(|side| Some((side, side.part(chunk)?))) else { return Ok(()) };
    if len == 0 {
        return Ok(());
    }
    for run in side.runs() {
        // Whole rows are contiguous on both sides.
        let step = if len == side.stride { run.len() } else { 1 };
        for first in run.step_by(step) {
            let device = side.at + first as u64 * side.stride + offset;
            let host = slot.wrapping_add(side.place(first, len) as usize);
            let bytes = step * len as usize;
            // SAFETY: forwarded from the caller; nothing else uses this part of the slot meanwhile.
            unsafe {
                match way {
                    Way::Down => memcpy_dtoh_async(std::slice::from_raw_parts_mut(host, bytes), device, stream),
                    Way::Up => memcpy_htod_async(device, std::slice::from_raw_parts(host, bytes), stream),
                }
            }?;
        }
    }
    Ok(())
}
