//! Calls by address, for callers that learn the element type at run time, such as bindings to other languages.

use std::ops::{Deref, Range};

use crate::Call;
use crate::algorithm::Shape;
use crate::comm::engine::bound::Bound;
use crate::comm::engine::queue::InFlight;
use crate::comm::{After, Comm, Inner, Queued};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::executor::Buffers;
use crate::wire::Collective;

/// A call over memory given by address. Addresses must be aligned to the type; they may be null where nothing is read
/// or written. Input and output are apart, or lie as in the `_in_place` form of the call.
#[derive(Debug, Clone)]
pub struct RawCall {
    call: Call,
    input: *const u8,
    output: *mut u8,
    /// Set for calls with a length per rank.
    ranges: Option<Ranges>,
}

/// Elements of the input for each rank (of all_to_all alone), and of the output from each rank.
#[derive(Debug, Clone)]
pub(crate) struct Ranges {
    pub(crate) send: Vec<Range<usize>>,
    pub(crate) recv: Vec<Range<usize>>,
}

// SAFETY: addresses alone; the caller of `run_raw` or `enqueue_raw` vouches for the memory.
unsafe impl Send for RawCall {}
// SAFETY: as above.
unsafe impl Sync for RawCall {}

impl Deref for RawCall {
    type Target = Call;
    fn deref(&self) -> &Call {
        &self.call
    }
}

impl From<&Bound> for RawCall {
    fn from(bound: &Bound) -> RawCall {
        RawCall::new(bound.call, bound.buffers.input, bound.buffers.output)
    }
}

impl RawCall {
    /// A collective, or a message made by [`Call::send`] or [`Call::recv`].
    pub const fn new(call: Call, input: *const u8, output: *mut u8) -> RawCall {
        RawCall { call, input, output, ranges: None }
    }

    /// A collective or a message in a GPU's memory, for [`DeviceComm::enqueue`](crate::cuda::DeviceComm::enqueue).
    pub const fn on_device(call: Call, input: u64, output: u64) -> RawCall {
        RawCall::new(call, input as *const u8, output as *mut u8)
    }

    /// The addresses of input and output.
    pub fn addresses(&self) -> (*const u8, *mut u8) {
        (self.input, self.output)
    }

    /// The addresses of input and output in a GPU's memory.
    pub(crate) fn device_addresses(&self) -> (u64, u64) {
        (self.input as u64, self.output as u64)
    }

    /// Ranges per rank of a `v` collective; `None` if one count holds for all ranks.
    pub(crate) fn ranges(&self) -> Option<&Ranges> {
        self.ranges.as_ref()
    }

    /// [`Comm::all_to_all_v`]; the ranges count elements from `input` and from `output`.
    pub fn all_to_all_v(
        dtype: DType,
        input: *const u8,
        send: Vec<Range<usize>>,
        output: *mut u8,
        recv: Vec<Range<usize>>,
    ) -> RawCall {
        let call = Call::of(Collective::AllToAll).with_count(dtype, 0);
        RawCall { call, input, output, ranges: Some(Ranges { send, recv }) }
    }

    /// [`Comm::all_gather_v`] of our `count` elements.
    pub fn all_gather_v(
        dtype: DType,
        count: usize,
        input: *const u8,
        output: *mut u8,
        recv: Vec<Range<usize>>,
    ) -> RawCall {
        let call = Call::of(Collective::AllGather).with_count(dtype, count);
        RawCall { call, input, output, ranges: Some(Ranges { send: Vec::new(), recv }) }
    }

    /// The name of the method of [`Comm`] that makes such a call.
    pub fn name(&self) -> &'static str {
        match (self.collective, &self.ranges) {
            (Collective::SendRecv, _) if self.root == Call::OWN => "send",
            (Collective::SendRecv, _) => "recv",
            (Collective::AllToAll, Some(_)) => "all_to_all_v",
            (_, Some(_)) => "all_gather_v",
            (collective, None) => collective.name(),
        }
    }

    /// Elements read and written by `rank` of `size`.
    fn lengths(&self, rank: usize, size: usize) -> (usize, usize) {
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|r| r.end).max().unwrap_or(0);
        match (self.collective, &self.ranges) {
            (Collective::AllToAll, Some(ranges)) => (end(&ranges.send), end(&ranges.recv)),
            (_, Some(ranges)) => (self.count, end(&ranges.recv)),
            (Collective::SendRecv, None) if self.root == Call::OWN => (self.count, 0),
            (Collective::SendRecv, None) => (0, self.count),
            (Collective::Barrier, None) => (0, 0),
            (collective, None) => {
                let shape = Shape { collective, ranks: size, root: self.root, channels: 1 };
                let elements = |segments: usize| self.count.saturating_mul(segments);
                (elements(shape.input_segments(rank)), elements(shape.output_segments(rank)))
            }
        }
    }

    /// Offset of the input from the output in the in-place form, in elements.
    fn in_place(&self, rank: usize, size: usize) -> Option<isize> {
        if self.ranges.is_some() || self.collective == Collective::SendRecv {
            return None;
        }
        let shape = Shape { collective: self.collective, ranks: size, root: self.root, channels: 1 };
        let (input, output) = shape.in_place(rank)?;
        isize::try_from(self.count).ok()?.checked_mul(output as isize - input as isize)
    }

    /// Checks the addresses alone.
    fn check(&self, rank: usize, size: usize) -> Result<()> {
        let elem = self.dtype.size();
        let (reads, writes) = self.lengths(rank, size);
        let (input, output) = (self.input as usize, self.output as usize);
        for (which, at, len) in [("input", input, reads), ("output", output, writes)] {
            if len > 0 && (at == 0 || !at.is_multiple_of(elem)) {
                let detail = format!(
                    "rank {rank}: the {which} is at {at:#x}, expected an address that is aligned to {elem} bytes"
                );
                return Err(Error::invalid(self.name(), detail));
            }
        }
        let (reads, writes) = (reads.saturating_mul(elem), writes.saturating_mul(elem));
        let apart = input.saturating_add(reads) <= output || output.saturating_add(writes) <= input;
        let offset = (input as isize).wrapping_sub(output as isize);
        if apart || self.in_place(rank, size).is_some_and(|at| at.wrapping_mul(elem as isize) == offset) {
            return Ok(());
        }
        Err(Error::invalid(
            self.name(),
            format!(
                "rank {rank}: the input ({reads} bytes at {input:#x}) and the output ({writes} bytes at {output:#x}) overlap: expected \
                 them apart, or the one at our place in the other"
            ),
        ))
    }
}

impl Inner {
    fn bind(&self, raw: &RawCall) -> Result<Bound> {
        let (rank, size) = (self.state.rank, self.size());
        let name = raw.name();
        raw.check(rank, size)?;
        // Null is valid if there is nothing to read or write.
        let some = |at: *mut u8| if at.is_null() { std::ptr::dangling_mut::<u64>().cast() } else { at };
        let buffers = Buffers { input: some(raw.input.cast_mut()), output: some(raw.output) };
        let (reads, writes) = raw.lengths(rank, size);
        match (raw.collective, &raw.ranges) {
            (Collective::AllToAll, Some(Ranges { send, recv })) => {
                self.all_to_all_v_of(raw.dtype, (reads, send), (writes, recv), buffers)
            }
            (_, Some(Ranges { recv, .. })) => self.all_gather_v_of(raw.dtype, reads, (writes, recv), buffers),
            (Collective::Barrier, None) => Ok(self.barrier()),
            (Collective::SendRecv, None) if (raw.root == Call::OWN) == (raw.peer == Call::OWN) => {
                Err(Error::invalid(name, "not a message of this rank: expected Call::send or Call::recv"))
            }
            (Collective::SendRecv, None) => {
                let own = |end: usize| if end == Call::OWN { rank } else { end };
                self.peer_in_range(name, "peer", raw.partner(Call::OWN))?;
                Ok(Bound::new(Call { root: own(raw.root), peer: own(raw.peer), ..raw.call }, buffers))
            }
            (_, None) => {
                self.peer_in_range(name, "root", raw.root)?;
                self.made(raw.call, raw.dtype, raw.count, buffers)
            }
        }
    }

    /// Runs the messages of a rank to itself and returns the other calls.
    ///
    /// # Safety
    /// As [`Comm::run_raw`].
    unsafe fn calls_of(&self, raw: &[RawCall]) -> Result<Vec<Bound>> {
        let rank = self.state.rank;
        let is_message = |raw: &RawCall| raw.collective == Collective::SendRecv;
        let to_self = |raw: &&RawCall| is_message(raw) && raw.partner(Call::OWN) == rank;
        let calls = raw.iter().filter(|raw| !to_self(raw)).map(|raw| self.bind(raw)).collect::<Result<Vec<_>>>()?;
        let own = |sends: bool| {
            let mine = raw.iter().filter(to_self);
            mine.filter(move |raw| (raw.root == Call::OWN) == sends)
        };
        if own(true).count() != own(false).count() {
            let detail = format!(
                "rank {rank} sends {} times to itself but receives {} times: put the send and the recv into one group",
                own(true).count(),
                own(false).count()
            );
            return Err(Error::invalid("send/recv", detail));
        }
        for (send, recv) in own(true).zip(own(false)) {
            let (sent, received) = (send.lengths(rank, 1).0, recv.lengths(rank, 1).1);
            if (send.dtype, sent) != (recv.dtype, received) {
                let detail =
                    format!("rank {rank} sends {sent} {} to itself but receives {received} {}", send.dtype, recv.dtype);
                return Err(Error::invalid("send/recv", detail));
            }
            send.check(rank, 1)?;
            recv.check(rank, 1)?;
            // SAFETY: by the caller, both are valid for that many bytes; `copy` lets them overlap.
            unsafe { std::ptr::copy(send.input, recv.output, sent * send.dtype.size()) };
        }
        Ok(calls)
    }

    /// # Safety
    /// As [`Comm::run_raw`].
    unsafe fn run_calls(&self, raw: &[RawCall], background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe {
            let calls = self.calls_of(raw)?;
            self.run_bound("group", &calls, background)
        }
    }
}

impl Inner {
    /// Runs one call alone, several together.
    ///
    /// # Safety
    /// As [`Inner::execute`], for the memory of every call.
    pub(crate) unsafe fn run_bound(&self, op: &str, calls: &[Bound], background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe {
            match calls {
                [] => self.state.check(|| op.to_owned()),
                [one] => self.execute(one, background),
                many => self.batch(op, many, background),
            }
        }
    }
}

impl Comm {
    /// Runs one call, or several as a [`Comm::group`], and returns when they are complete.
    ///
    /// # Safety
    /// The memory of every call must be valid for its type, count and collective, and untouched by others, until this
    /// returns.
    pub unsafe fn run_raw(&self, calls: &[RawCall]) -> Result<()> {
        self.inner.drain();
        // SAFETY: forwarded from the caller.
        unsafe { self.inner.run_calls(calls, false) }
    }

    /// Queues `calls` behind the asynchronous calls made so far. `done` gets the outcome in the thread that ran the
    /// call: the communicator's progress thread, which does nothing else meanwhile, or the thread that called
    /// [`Queued::help`].
    ///
    /// `done` returns a function, which is called when the call has ended for all waiters and the next one may begin.
    /// That function may make calls itself, and wait for them with [`Queued::help`].
    ///
    /// With `leave` and an empty queue the call stays queued for up to two milliseconds, so that a waiting thread can
    /// run it itself. This suits short calls, which most callers wait for at once.
    ///
    /// # Safety
    /// As [`Comm::run_raw`], until `done` is called.
    ///
    /// # Errors
    /// When nothing was queued; `done` is dropped then.
    pub unsafe fn enqueue_raw(
        &self,
        calls: Vec<RawCall>,
        leave: bool,
        done: impl FnOnce(Result<()>) -> After + Send + 'static,
    ) -> Result<Queued> {
        self.inner.state.check(|| calls.first().map_or("group", RawCall::name).to_owned())?;
        let inner = self.inner.clone();
        let job = move |background, in_flight: InFlight<'_>| {
            // SAFETY: forwarded from the caller.
            let outcome = unsafe { inner.run_calls(&calls, background) };
            drop(inner);
            drop(in_flight);
            done(outcome)
        };
        self.inner.queue.push(|| format!("tinynccl-{}", self.inner.state.id), leave, Box::new(job))
    }

    /// Returns true if no asynchronous call is queued or running. A caller that has seen the last call end gets true.
    pub fn is_idle(&self) -> bool {
        self.inner.queue.is_idle()
    }
}
