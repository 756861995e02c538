//! Blocking collectives. Each checks its arguments, then hands pointers to the executor.
//!
//! `n` is the world size. Lengths that cannot be right give [`Error::InvalidArgument`] before anything is sent; lengths that
//! are right here but differ from another rank's give [`Error::Mismatch`] naming both.

use super::{Comm, Inner, key};
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{Buffers, CallKey};
use crate::wire::Collective;

/// A checked call: what to run, on which memory.
pub(super) struct Call {
    pub(super) key: CallKey,
    pub(super) buffers: Buffers,
}

// SAFETY: the pointers are used by one thread at a time, while the caller keeps the memory alive and untouched.
unsafe impl Send for Call {}

/// Pointers of a send and a receive slice.
fn buffers<T: Element>(input: &[T], output: &mut [T]) -> Buffers {
    Buffers { input: input.as_ptr().cast(), output: output.as_mut_ptr().cast() }
}

/// Pointers for an in-place call: input at `skip_in`, output at `skip_out` elements into `buffer`.
fn in_place<T: Element>(buffer: &mut [T], skip_in: usize, skip_out: usize) -> Buffers {
    let base = buffer.as_mut_ptr();
    Buffers { input: base.wrapping_add(skip_in).cast_const().cast(), output: base.wrapping_add(skip_out).cast() }
}

impl Inner {
    fn same_length(&self, c: Collective, input: usize, output: usize) -> Result<usize> {
        if input == output {
            return Ok(input);
        }
        Err(Error::invalid(
            c.name(),
            format!(
                "rank {}: the input has {input} elements, the output {output}: expected equal lengths",
                self.state.rank
            ),
        ))
    }

    /// `long` must be the world size times `short`.
    fn segments(&self, c: Collective, which: &str, long: usize, short: usize) -> Result<usize> {
        if short.checked_mul(self.size()) == Some(long) {
            return Ok(short);
        }
        Err(Error::invalid(
            c.name(),
            format!(
                "rank {}: the {which} has {long} elements, expected {} ranks x {short}",
                self.state.rank,
                self.size()
            ),
        ))
    }

    fn divisible(&self, c: Collective, len: usize) -> Result<usize> {
        if len.is_multiple_of(self.size()) {
            return Ok(len / self.size());
        }
        Err(Error::invalid(
            c.name(),
            format!("rank {}: {len} elements, expected a multiple of the world size {}", self.state.rank, self.size()),
        ))
    }

    pub(super) fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<Call> {
        let c = Collective::AllReduce;
        Ok(Call { key: key(c, T::DTYPE, Some(op), 0, buffer.len()), buffers: in_place(buffer, 0, 0) })
    }

    pub(super) fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Broadcast;
        self.peer_in_range(c.name(), "root", root)?;
        Ok(Call { key: key(c, T::DTYPE, None, root, buffer.len()), buffers: in_place(buffer, 0, 0) })
    }

    pub(super) fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Call> {
        let c = Collective::AllGather;
        let count = self.segments(c, "output", output.len(), input.len())?;
        Ok(Call { key: key(c, T::DTYPE, None, 0, count), buffers: buffers(input, output) })
    }

    pub(super) fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Call> {
        let c = Collective::ReduceScatter;
        let count = self.segments(c, "input", input.len(), output.len())?;
        Ok(Call { key: key(c, T::DTYPE, Some(op), 0, count), buffers: buffers(input, output) })
    }

    pub(super) fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Call> {
        let c = Collective::AllToAll;
        self.same_length(c, input.len(), output.len())?;
        let count = self.divisible(c, input.len())?;
        Ok(Call { key: key(c, T::DTYPE, None, 0, count), buffers: buffers(input, output) })
    }

    pub(super) fn reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp, root: usize) -> Result<Call> {
        let c = Collective::Reduce;
        self.peer_in_range(c.name(), "root", root)?;
        if self.state.rank == root {
            self.same_length(c, input.len(), output.len())?;
        }
        Ok(Call { key: key(c, T::DTYPE, Some(op), root, input.len()), buffers: buffers(input, output) })
    }

    pub(super) fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Gather;
        self.peer_in_range(c.name(), "root", root)?;
        if self.state.rank == root {
            self.segments(c, "output", output.len(), input.len())?;
        }
        Ok(Call { key: key(c, T::DTYPE, None, root, input.len()), buffers: buffers(input, output) })
    }

    pub(super) fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Scatter;
        self.peer_in_range(c.name(), "root", root)?;
        if self.state.rank == root {
            self.segments(c, "input", input.len(), output.len())?;
        }
        Ok(Call { key: key(c, T::DTYPE, None, root, output.len()), buffers: buffers(input, output) })
    }

    /// Runs a checked call after everything that was queued before it.
    pub(super) fn run(&self, call: Result<Call>) -> Result<()> {
        let call = call?;
        self.drain();
        // SAFETY: the constructors above checked the lengths against the key, from slices which the caller of this
        // function still holds borrowed.
        unsafe { self.collective(&call.key, call.buffers, false) }
    }
}

impl Comm {
    /// Every rank's `output` becomes the element-wise reduction of all ranks' `input`; both of the same length.
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let c = Collective::AllReduce;
        let call = self
            .inner
            .same_length(c, input.len(), output.len())
            .map(|count| Call { key: key(c, T::DTYPE, Some(op), 0, count), buffers: buffers(input, output) });
        self.inner.run(call)
    }

    /// [`Comm::all_reduce`] with one buffer for input and output.
    pub fn all_reduce_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.inner.run(self.inner.all_reduce(buffer, op))
    }

    /// Every rank's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.inner.run(self.inner.all_gather(input, output))
    }

    /// [`Comm::all_gather`] where our input already lies at segment `rank` of `buffer`.
    pub fn all_gather_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<()> {
        let c = Collective::AllGather;
        let call = self.inner.divisible(c, buffer.len()).map(|count| Call {
            key: key(c, T::DTYPE, None, 0, count),
            buffers: in_place(buffer, self.rank() * count, 0),
        });
        self.inner.run(call)
    }

    /// `output` becomes segment `rank` of the reduction of all ranks' `input` (`n` x the output's length).
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.inner.run(self.inner.reduce_scatter(input, output, op))
    }

    /// [`Comm::reduce_scatter`] whose result replaces segment `rank` of `buffer`; the other segments are left as they were.
    pub fn reduce_scatter_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        let c = Collective::ReduceScatter;
        let call = self.inner.divisible(c, buffer.len()).map(|count| Call {
            key: key(c, T::DTYPE, Some(op), 0, count),
            buffers: in_place(buffer, 0, self.rank() * count),
        });
        self.inner.run(call)
    }

    /// Every rank's `buffer` becomes the root's.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.broadcast(buffer, root))
    }

    /// [`Comm::broadcast`] from the root's `input` into every rank's `output`; `input` is ignored elsewhere.
    pub fn broadcast_from<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        let c = Collective::Broadcast;
        let mut check = || {
            self.inner.peer_in_range(c.name(), "root", root)?;
            if self.rank() == root {
                self.inner.same_length(c, input.len(), output.len())?;
            }
            Ok(Call { key: key(c, T::DTYPE, None, root, output.len()), buffers: buffers(input, output) })
        };
        self.inner.run(check())
    }

    /// The root's `output` becomes the reduction of all ranks' `input`; `output` is ignored (and may be empty) elsewhere.
    pub fn reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        self.inner.run(self.inner.reduce(input, output, op, root))
    }

    /// [`Comm::reduce`] whose result replaces the root's `buffer`; elsewhere `buffer` is left as it was.
    pub fn reduce_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        let c = Collective::Reduce;
        let call = self
            .inner
            .peer_in_range(c.name(), "root", root)
            .map(|()| Call { key: key(c, T::DTYPE, Some(op), root, buffer.len()), buffers: in_place(buffer, 0, 0) });
        self.inner.run(call)
    }

    /// The root's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order; ignored elsewhere.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.gather(input, output, root))
    }

    /// `output` becomes segment `rank` of the root's `input` (`n` x the output's length; ignored elsewhere).
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.scatter(input, output, root))
    }

    /// Segment `s` of `output` becomes segment `rank` of rank `s`'s `input`; both have `n` equal segments.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.inner.run(self.inner.all_to_all(input, output))
    }

    /// Nobody returns before everybody has called.
    pub fn barrier(&self) -> Result<()> {
        let mut nothing: [u8; 0] = [];
        let call = Call { key: key(Collective::Barrier, DType::U8, None, 0, 0), buffers: in_place(&mut nothing, 0, 0) };
        self.inner.run(Ok(call))
    }
}
