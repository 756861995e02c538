//! Calls by address, for callers that learn the type of the elements at run time: bindings to other languages.

use std::ops::Range;

use super::call::Call;
use super::{After, Comm, Inner, Queued};
use crate::algorithm::Shape;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{Buffers, CallKey};
use crate::wire::Collective;

/// A call over memory given by address. Addresses must be aligned to the type; they may be null where nothing is read or
/// written. Input and output are apart, or lie as in the `_in_place` form of the call.
#[derive(Debug, Clone)]
pub struct RawCall {
    what: What,
    dtype: DType,
    input: *const u8,
    output: *mut u8,
}

#[derive(Debug, Clone)]
enum What {
    Even { collective: Collective, op: ReduceOp, root: usize, count: usize },
    Send { peer: usize, count: usize },
    Recv { peer: usize, count: usize },
    AllToAllV { send: Vec<Range<usize>>, recv: Vec<Range<usize>> },
    AllGatherV { count: usize, recv: Vec<Range<usize>> },
}

// SAFETY: addresses alone; who hands them to `run_raw` or `enqueue_raw` vouches for the memory.
unsafe impl Send for RawCall {}
// SAFETY: as above.
unsafe impl Sync for RawCall {}

impl RawCall {
    /// A collective of [`Comm`]: `count` elements of the whole buffer for all_reduce, broadcast and reduce, of one rank's segment
    /// for the others. What the collective does not have (an operator, a root) is ignored; for a message see [`RawCall::send`].
    pub fn collective(
        collective: Collective,
        dtype: DType,
        op: ReduceOp,
        root: usize,
        count: usize,
        input: *const u8,
        output: *mut u8,
    ) -> RawCall {
        RawCall { what: What::Even { collective, op, root, count }, dtype, input, output }
    }

    /// [`Comm::send`].
    pub fn send(dtype: DType, count: usize, input: *const u8, peer: usize) -> RawCall {
        RawCall { what: What::Send { peer, count }, dtype, input, output: std::ptr::null_mut() }
    }

    /// [`Comm::recv`].
    pub fn recv(dtype: DType, count: usize, output: *mut u8, peer: usize) -> RawCall {
        RawCall { what: What::Recv { peer, count }, dtype, input: std::ptr::null(), output }
    }

    /// [`Comm::all_to_all_v`]; the ranges count elements from `input` and from `output`.
    pub fn all_to_all_v(
        dtype: DType,
        input: *const u8,
        send: Vec<Range<usize>>,
        output: *mut u8,
        recv: Vec<Range<usize>>,
    ) -> RawCall {
        RawCall { what: What::AllToAllV { send, recv }, dtype, input, output }
    }

    /// [`Comm::all_gather_v`] of our `count` elements.
    pub fn all_gather_v(
        dtype: DType,
        count: usize,
        input: *const u8,
        output: *mut u8,
        recv: Vec<Range<usize>>,
    ) -> RawCall {
        RawCall { what: What::AllGatherV { count, recv }, dtype, input, output }
    }

    fn name(&self) -> &'static str {
        match &self.what {
            What::Even { collective, .. } => collective.name(),
            What::Send { .. } => "send",
            What::Recv { .. } => "recv",
            What::AllToAllV { .. } => "all_to_all_v",
            What::AllGatherV { .. } => "all_gather_v",
        }
    }

    /// Elements read and written by `rank` of `size`.
    fn lengths(&self, rank: usize, size: usize) -> (usize, usize) {
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|r| r.end).max().unwrap_or(0);
        match &self.what {
            What::Send { count, .. } => (*count, 0),
            What::Recv { count, .. } => (0, *count),
            What::AllToAllV { send, recv } => (end(send), end(recv)),
            What::AllGatherV { count, recv } => (*count, end(recv)),
            What::Even { collective: Collective::Barrier | Collective::SendRecv, .. } => (0, 0),
            What::Even { collective, root, count, .. } => {
                let shape = Shape { collective: *collective, ranks: size, root: *root, channels: 1 };
                let segments = |n: usize| count.saturating_mul(n);
                (segments(shape.input_segments(rank)), segments(shape.output_segments(rank)))
            }
        }
    }

    /// How far the input lies behind the output in the in-place form, in elements.
    fn in_place(&self, rank: usize, size: usize) -> Option<isize> {
        let &What::Even { collective, root, count, .. } = &self.what else { return None };
        let (input, output) = Shape { collective, ranks: size, root, channels: 1 }.in_place(rank)?;
        isize::try_from(count).ok()?.checked_mul(output as isize - input as isize)
    }

    /// What can be said of the addresses alone.
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
    fn call_of(&self, raw: &RawCall) -> Result<Call> {
        let (rank, size) = (self.state.rank, self.size());
        let name = raw.name();
        raw.check(rank, size)?;
        // Null may come with nothing to read or write.
        let some = |at: *mut u8| if at.is_null() { std::ptr::dangling_mut::<u64>().cast() } else { at };
        let buffers = Buffers { input: some(raw.input.cast_mut()), output: some(raw.output) };
        let (reads, writes) = raw.lengths(rank, size);
        match &raw.what {
            &What::Send { peer, count } => {
                self.peer_in_range(name, "peer", peer)?;
                Ok(Call::message(raw.dtype, rank, peer, count, buffers))
            }
            &What::Recv { peer, count } => {
                self.peer_in_range(name, "peer", peer)?;
                Ok(Call::message(raw.dtype, peer, rank, count, buffers))
            }
            What::AllToAllV { send, recv } => self.all_to_all_v_of(raw.dtype, (reads, send), (writes, recv), buffers),
            What::AllGatherV { recv, .. } => self.all_gather_v_of(raw.dtype, reads, (writes, recv), buffers),
            What::Even { collective: Collective::SendRecv, .. } => {
                Err(Error::invalid(name, "not a collective: make the call with RawCall::send or RawCall::recv"))
            }
            What::Even { collective: Collective::Barrier, .. } => Ok(self.barrier()),
            &What::Even { collective, op, root, count } => {
                self.peer_in_range(name, "root", root)?;
                let op = collective.reduces().then_some(op);
                let root = if collective.has_root() { root } else { 0 };
                self.made(CallKey { op, root, ..CallKey::of(collective) }, raw.dtype, count, buffers)
            }
        }
    }

    /// The calls that are not between us and ourselves; those are carried out.
    ///
    /// # Safety
    /// As [`Comm::run_raw`].
    unsafe fn calls_of(&self, raw: &[RawCall]) -> Result<Vec<Call>> {
        let rank = self.state.rank;
        let to_self =
            |raw: &&RawCall| matches!(raw.what, What::Send { peer, .. } | What::Recv { peer, .. } if peer == rank);
        let calls = raw.iter().filter(|raw| !to_self(raw)).map(|raw| self.call_of(raw)).collect::<Result<Vec<_>>>()?;
        let own = |sends: bool| {
            let mine = raw.iter().filter(to_self);
            mine.filter(move |raw| matches!(raw.what, What::Send { .. }) == sends)
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
            match calls.as_slice() {
                [] => self.state.check(|| "group".to_owned()),
                [one] => self.execute(one, background),
                many => self.batch("group", many, background),
            }
        }
    }
}

impl Comm {
    /// Runs one call, or several as a [`Comm::group`], and returns when they are complete.
    ///
    /// # Safety
    /// The memory of every call must be valid for its type, count and collective, and untouched by others, until this returns.
    pub unsafe fn run_raw(&self, calls: &[RawCall]) -> Result<()> {
        self.inner.drain();
        // SAFETY: forwarded from the caller.
        unsafe { self.inner.run_calls(calls, false) }
    }

    /// Queues the same behind the asynchronous calls made so far. `done` gets the outcome, in the thread that carried the call
    /// out: the communicator's progress thread, which does nothing else meanwhile, or the one that called [`Queued::help`].
    ///
    /// What `done` returns is called when the call has ended for everybody and the next one may begin; it may make calls itself, and
    /// wait for them with [`Queued::help`].
    ///
    /// With `leave`, and nothing before it, the call lies for up to two milliseconds, so that its waiter can come and help; for short
    /// calls, which most callers wait for at once.
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
        let job = move |background| {
            // SAFETY: forwarded from the caller.
            let outcome = unsafe { inner.run_calls(&calls, background) };
            drop(inner);
            done(outcome)
        };
        self.inner.queue.push(|| format!("tinynccl-{}", self.inner.state.id), leave, Box::new(job))
    }

    /// Whether no asynchronous call is queued or running.
    pub fn is_idle(&self) -> bool {
        self.inner.queue.is_idle()
    }
}
