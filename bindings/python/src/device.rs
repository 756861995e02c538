//! Calls whose memory is on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, result, sys};
use pyo3::prelude::*;
use tinynccl::cuda::{self, DeviceComm};
use tinynccl::wire::Collective;
use tinynccl::{Comm, Error, Result};

use crate::calls::{Prepared, What};
use crate::stream::{Events, Stream};

/// A rank's communicator on its GPU.
pub(crate) struct Gpu {
    comm: DeviceComm,
    context: Arc<CudaContext>,
    ordinal: usize,
    events: Arc<Events>,
}

impl Gpu {
    /// Joins the ranks of `comm`; every rank must call it.
    pub(crate) fn new(comm: &Comm, ordinal: usize) -> Result<Gpu> {
        cuda::available()?;
        let context = CudaContext::new(ordinal).map_err(|e| failed("cuda", format!("opening GPU {ordinal}"), e))?;
        let _current = Current::keep();
        let comm = DeviceComm::new(comm, &context)?;
        let events = Events::new(&context);
        Ok(Gpu { comm, context, ordinal, events })
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(crate) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.comm.check()
    }

    pub(crate) fn abort(&self) {
        self.comm.abort();
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let _current = Current::keep();
        self.bind()?;
        self.comm.synchronize()
    }

    /// Orders all later work of `stream` after the event.
    ///
    /// # Safety
    /// It is a stream of this GPU.
    pub(crate) unsafe fn wait_for(&self, stream: u64, event: &CudaEvent) -> Result<()> {
        let _current = Current::keep();
        self.bind()?;
        // SAFETY: forwarded from the caller.
        unsafe { wait(stream as sys::CUstream, event) }
    }

    /// An event behind all that is in the stream.
    ///
    /// # Safety
    /// It is a stream of this GPU.
    pub(crate) unsafe fn mark(&self, stream: u64) -> Result<CudaEvent> {
        let _current = Current::keep();
        self.bind()?;
        // SAFETY: forwarded from the caller.
        unsafe { self.record(stream as sys::CUstream) }
    }

    /// # Safety
    /// As [`Gpu::mark`], with the GPU bound.
    unsafe fn record(&self, stream: sys::CUstream) -> Result<CudaEvent> {
        let event = self.events.take()?;
        // SAFETY: we alone use the event; the caller guarantees the stream.
        unsafe { result::event::record(event.cu_event(), stream) }
            .map_err(|e| failed("cuda", "marking a place in a stream".to_owned(), e))?;
        Ok(event)
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| failed("cuda", format!("taking GPU {}", self.ordinal), e))
    }

    /// Puts the calls into a stream, as it says; returns their end, if it is to be marked.
    ///
    /// # Safety
    /// The calls' memory must be of this GPU, as long as the call says, and stay until the stream has run them. The
    /// streams must be of this GPU, and stay until the next call.
    pub(crate) unsafe fn enqueue(&self, calls: &[Prepared], stream: Stream) -> Result<Option<CudaEvent>> {
        let _current = Current::keep();
        self.bind()?;
        let Stream { handle, behind } = stream;
        let stream = handle as sys::CUstream;
        // SAFETY: forwarded from the caller.
        unsafe {
            if let Some(other) = behind.filter(|other| *other != handle) {
                let ready = self.record(other as sys::CUstream)?;
                let waits = wait(stream, &ready);
                // The event may be reused: a wait refers to the last record before it.
                self.events.put(ready);
                waits?;
            }
            self.enqueue_in_order(calls, stream)?;
            behind.map(|_| self.record(stream)).transpose()
        }
    }

    /// Each message that is sent goes together with one that is received.
    ///
    /// # Safety
    /// As [`Gpu::enqueue`], with the GPU bound.
    unsafe fn enqueue_in_order(&self, calls: &[Prepared], stream: sys::CUstream) -> Result<()> {
        let mut messages = Messages::default();
        for call in calls {
            match &call.what {
                What::Send { peer, count } => messages.send(call.input, count * call.dtype.size(), *peer),
                What::Recv { peer, count } => messages.recv(call.output, count * call.dtype.size(), *peer),
                What::AllToAllV { send, recv } => {
                    let elem = call.dtype.size();
                    for (peer, (send, recv)) in send.iter().zip(recv).enumerate() {
                        messages.send(call.input + send.start * elem, send.len() * elem, peer);
                        messages.recv(call.output + recv.start * elem, recv.len() * elem, peer);
                    }
                }
                What::AllGatherV { count, recv } => {
                    let elem = call.dtype.size();
                    for (peer, recv) in recv.iter().enumerate() {
                        messages.send(call.input, count * elem, peer);
                        messages.recv(call.output + recv.start * elem, recv.len() * elem, peer);
                    }
                }
                // SAFETY: forwarded from the caller.
                &What::Even { collective, op, root, count } => unsafe {
                    self.messages(&mut messages, stream)?;
                    let bytes = count * call.dtype.size();
                    match collective {
                        Collective::Gather => messages.gather(self.comm.rank(), self.comm.size(), root, bytes, call),
                        Collective::Scatter => messages.scatter(self.comm.rank(), self.comm.size(), root, bytes, call),
                        _ => {
                            let (input, output) = (call.input as u64, call.output as u64);
                            // A rank that only receives has no input, one that only sends no output.
                            let input = if input == 0 { output } else { input };
                            let output = if output == 0 { input } else { output };
                            let dtype = call.dtype;
                            self.comm
                                .enqueue(stream, &cuda::Call { collective, dtype, op, root, count, input, output })?;
                        }
                    }
                },
            }
        }
        // SAFETY: forwarded from the caller.
        unsafe { self.messages(&mut messages, stream) }
    }

    /// # Safety
    /// As [`Gpu::enqueue`].
    unsafe fn messages(&self, messages: &mut Messages, stream: sys::CUstream) -> Result<()> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        let Messages { sends, recvs } = std::mem::take(messages);
        let (own_sends, sends): (Vec<Message>, Vec<Message>) = sends.into_iter().partition(|m| m.2 == rank);
        let (own_recvs, recvs): (Vec<Message>, Vec<Message>) = recvs.into_iter().partition(|m| m.2 == rank);
        if own_sends.len() != own_recvs.len() || own_sends.iter().zip(&own_recvs).any(|(s, r)| s.1 != r.1) {
            let sum = |all: &[Message]| all.iter().map(|m| m.1).sum::<usize>();
            let detail = format!(
                "rank {rank} sends {} bytes to itself in {} messages but receives {} in {}",
                sum(&own_sends),
                own_sends.len(),
                sum(&own_recvs),
                own_recvs.len()
            );
            return Err(Error::invalid("send/recv", detail));
        }
        for (from, to) in own_sends.iter().zip(&own_recvs) {
            if from.0 != to.0 && from.1 > 0 {
                // SAFETY: both are the caller's, that long.
                unsafe { result::memcpy_dtod_async(to.0, from.0, from.1, stream) }
                    .map_err(|e| failed("send/recv", format!("copying {} bytes", from.1), e))?;
            }
        }
        // In round k every rank sends k ranks up and receives from k ranks down, so the two ends of a message meet.
        let sends = rounds(sends, |peer| (peer + size - rank) % size);
        let mut recvs = rounds(recvs, |peer| (rank + size - peer) % size);
        for (round, send) in &sends {
            let matching = recvs.iter().position(|(other, _)| other == round).map(|place| recvs.remove(place).1);
            // SAFETY: forwarded from the caller.
            unsafe { self.comm.enqueue_send_recv(stream, Some(*send), matching) }?;
        }
        for (_, recv) in recvs {
            // SAFETY: forwarded from the caller.
            unsafe { self.comm.enqueue_send_recv(stream, None, Some(recv)) }?;
        }
        Ok(())
    }
}

/// # Safety
/// It is a stream of the GPU that is bound, whose event it is.
unsafe fn wait(stream: sys::CUstream, event: &CudaEvent) -> Result<()> {
    let flags = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: the event lives; the caller guarantees the stream.
    unsafe { result::stream::wait_event(stream, event.cu_event(), flags) }
        .map_err(|e| failed("cuda", "letting a stream wait for another".to_owned(), e))
}

/// Address, bytes, peer.
type Message = (u64, usize, usize);

/// Messages collected for one pass.
#[derive(Default)]
struct Messages {
    sends: Vec<Message>,
    recvs: Vec<Message>,
}

impl Messages {
    fn send(&mut self, at: usize, bytes: usize, peer: usize) {
        self.sends.push((at as u64, bytes, peer));
    }

    fn recv(&mut self, at: usize, bytes: usize, peer: usize) {
        self.recvs.push((at as u64, bytes, peer));
    }

    fn gather(&mut self, rank: usize, size: usize, root: usize, bytes: usize, call: &Prepared) {
        self.send(call.input, bytes, root);
        if rank == root {
            (0..size).for_each(|peer| self.recv(call.output + peer * bytes, bytes, peer));
        }
    }

    fn scatter(&mut self, rank: usize, size: usize, root: usize, bytes: usize, call: &Prepared) {
        if rank == root {
            (0..size).for_each(|peer| self.send(call.input + peer * bytes, bytes, peer));
        }
        self.recv(call.output, bytes, root);
    }
}

/// In order of (how many came before with the same peer, distance).
fn rounds(messages: Vec<Message>, distance: impl Fn(usize) -> usize) -> Vec<((usize, usize), Message)> {
    let mut all: Vec<((usize, usize), Message)> = Vec::with_capacity(messages.len());
    for message in messages {
        let before = all.iter().filter(|(_, other)| other.2 == message.2).count();
        all.push(((before, distance(message.2)), message));
    }
    all.sort_by_key(|&(round, _)| round);
    all
}

/// The number of GPUs that CUDA sees; 0 without CUDA.
#[pyfunction]
pub(crate) fn cuda_device_count() -> usize {
    tinynccl::cuda::device_count().unwrap_or(0)
}

/// The context of this thread, put back when dropped: torch asks the driver which GPU is current.
pub(crate) struct Current(sys::CUcontext);

impl Current {
    pub(crate) fn keep() -> Current {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes the context; without one it is NULL. The driver was found before a `Gpu` was made.
        let _ = unsafe { sys::cuCtxGetCurrent(&mut context) };
        Current(context)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: it was current before.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

pub(crate) fn failed(op: &str, detail: String, error: cudarc::driver::DriverError) -> Error {
    Error::Cuda { op: op.to_owned(), detail, status: format!("{error:?}") }
}
