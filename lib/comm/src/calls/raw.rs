//! Calls by address, for callers that learn the element type at run time, such as bindings to other languages.

use std::ops::Range;

use crate::engine::queue::InFlight;
use crate::engine::raw_call::RawCall;
use crate::executor::Buffers;
use crate::{After, Comm, Inner, Queued};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

impl RawCall {
    /// Elements read and written by `rank` of `size`.
    fn lengths(&self, rank: usize, size: usize) -> (usize, usize) {
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|r| r.end).max().unwrap_or(0);
        match (self.collective, &self.ranges) {
            (_, Some(ranges)) => (end(&ranges.send), end(&ranges.recv)),
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
        let (input, output) = (self.buffers.input as usize, self.buffers.output as usize);
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
    /// Checks a call of the caller's, and gives this rank's number to a message of [`Call::OWN`].
    fn checked(&self, raw: &RawCall) -> Result<RawCall> {
        let (rank, size) = (self.state.rank, self.size());
        let name = raw.name();
        raw.check(rank, size)?;
        // Null is valid if there is nothing to read or write.
        let some = |at: *mut u8| if at.is_null() { std::ptr::dangling_mut::<u64>().cast() } else { at };
        let (input, output) = raw.addresses();
        let buffers = Buffers { input: some(input.cast_mut()), output: some(output) };
        match (raw.collective, &raw.ranges) {
            (_, Some(ranges)) => {
                let lengths = raw.lengths(rank, size);
                self.uneven_call(raw.call, (**ranges).clone(), lengths, buffers)
            }
            (Collective::Barrier, None) => Ok(self.barrier()),
            (Collective::SendRecv, None) if (raw.root == Call::OWN) == (raw.peer == Call::OWN) => {
                Err(Error::invalid(name, "not a message of this rank: expected Call::send or Call::recv"))
            }
            (Collective::SendRecv, None) => {
                let own = |end: usize| if end == Call::OWN { rank } else { end };
                self.peer_in_range(name, "peer", raw.partner(Call::OWN))?;
                Ok(RawCall::over(Call { root: own(raw.root), peer: own(raw.peer), ..raw.call }, buffers))
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
    unsafe fn calls_of(&self, raw: &[RawCall]) -> Result<Vec<RawCall>> {
        let rank = self.state.rank;
        let is_message = |raw: &RawCall| raw.collective == Collective::SendRecv;
        let to_self = |raw: &&RawCall| is_message(raw) && raw.partner(Call::OWN) == rank;
        let calls = raw.iter().filter(|raw| !to_self(raw)).map(|raw| self.checked(raw)).collect::<Result<Vec<_>>>()?;
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
            unsafe { std::ptr::copy(send.buffers.input, recv.buffers.output, sent * send.dtype.size()) };
        }
        Ok(calls)
    }

    /// # Safety
    /// As [`Comm::run_raw`].
    unsafe fn run_calls(&self, raw: &[RawCall], background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe {
            let calls = self.calls_of(raw)?;
            self.run_checked("group", &calls, background)
        }
    }
}

impl Inner {
    /// Runs one checked call alone, several together.
    ///
    /// # Safety
    /// As [`Inner::execute`], for the memory of every call.
    pub unsafe fn run_checked(&self, op: &str, calls: &[RawCall], background: bool) -> Result<()> {
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
    /// Nothing was queued; `done` is dropped.
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
