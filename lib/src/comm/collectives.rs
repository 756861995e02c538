//! Blocking collectives. Each checks its arguments, then hands pointers to the executor.
//!
//! `n` is the world size. Lengths that cannot be right give [`Error::InvalidArgument`](crate::Error::InvalidArgument) before
//! anything is sent; lengths that are right here but differ from another rank's give
//! [`Error::Mismatch`](crate::Error::Mismatch) naming both.

use super::call::Call;
use super::{Comm, Inner};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;

impl Inner {
    /// Runs a checked call after everything that was queued before it.
    pub(super) fn run(&self, call: Result<Call>) -> Result<()> {
        let call = call?;
        self.drain();
        // SAFETY: the constructors in `call` and `uneven` checked the lengths against the key, from slices which the caller
        // of this function still holds borrowed.
        unsafe { self.execute(&call, false) }
    }

    /// Runs a checked call.
    ///
    /// # Safety
    /// The memory which the call was made from must be valid, and untouched by others, until this returns.
    pub(crate) unsafe fn execute(&self, call: &Call, background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe {
            match &call.transfers {
                None => self.collective(&call.key, call.buffers, background),
                Some(_) => self.batch(call.key.collective.name(), std::slice::from_ref(call), background),
            }
        }
    }
}

impl Comm {
    /// Every rank's `output` becomes the element-wise reduction of all ranks' `input`; both of the same length.
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.inner.run(self.inner.all_reduce(input, output, op))
    }

    /// [`Comm::all_reduce`] with one buffer for input and output.
    pub fn all_reduce_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.inner.run(self.inner.all_reduce_in_place(buffer, op))
    }

    /// Every rank's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.inner.run(self.inner.all_gather(input, output))
    }

    /// [`Comm::all_gather`] where our input already lies at segment `rank` of `buffer`.
    pub fn all_gather_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<()> {
        self.inner.run(self.inner.all_gather_in_place(buffer))
    }

    /// `output` becomes segment `rank` of the reduction of all ranks' `input` (`n` x the output's length).
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.inner.run(self.inner.reduce_scatter(input, output, op))
    }

    /// [`Comm::reduce_scatter`] whose result replaces segment `rank` of `buffer`; the other segments are left as they were.
    pub fn reduce_scatter_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.inner.run(self.inner.reduce_scatter_in_place(buffer, op))
    }

    /// Every rank's `buffer` becomes the root's.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.broadcast(buffer, root))
    }

    /// [`Comm::broadcast`] from the root's `input` into every rank's `output`; `input` is ignored elsewhere.
    pub fn broadcast_from<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.broadcast_from(input, output, root))
    }

    /// The root's `output` becomes the reduction of all ranks' `input`; `output` is ignored (and may be empty) elsewhere.
    pub fn reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        self.inner.run(self.inner.reduce(input, output, op, root))
    }

    /// [`Comm::reduce`] whose result replaces the root's `buffer`; elsewhere `buffer` is left as it was.
    pub fn reduce_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        self.inner.run(self.inner.reduce_in_place(buffer, op, root))
    }

    /// All to one: the root's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order. `output` is
    /// ignored elsewhere.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.gather(input, output, root))
    }

    /// [`Comm::gather`] where the root's own input already lies at segment `root` of its `buffer` (`n` segments); elsewhere
    /// `buffer` is the input, one segment.
    pub fn gather_in_place<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.gather_in_place(buffer, root))
    }

    /// One to all: `output` becomes segment `rank` of the root's `input` (`n` x the output's length; ignored elsewhere).
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.scatter(input, output, root))
    }

    /// [`Comm::scatter`] from the root's `buffer` (`n` segments), whose own segment stays where it is; elsewhere `buffer` is
    /// the output, one segment.
    pub fn scatter_in_place<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.inner.run(self.inner.scatter_in_place(buffer, root))
    }

    /// Segment `s` of `output` becomes segment `rank` of rank `s`'s `input`; both have `n` equal segments.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.inner.run(self.inner.all_to_all(input, output))
    }

    /// Nobody returns before everybody has called.
    pub fn barrier(&self) -> Result<()> {
        self.inner.run(Ok(self.inner.barrier()))
    }
}
