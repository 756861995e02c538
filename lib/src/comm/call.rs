//! Checked calls: what to run, on which memory. Blocking, asynchronous and grouped calls are made of these.
//!
//! `n` is the world size. Lengths that cannot be right give [`Error::InvalidArgument`] before anything is sent; lengths that
//! are right here but differ from another rank's give [`Error::Mismatch`] naming both.

use super::Inner;
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{Buffers, CallKey, Transfers};
use crate::wire::Collective;

/// A checked call.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) key: CallKey,
    pub(super) buffers: Buffers,
    /// Where each pair of ranks has a length of its own; the key has no count then.
    pub(super) transfers: Option<Box<Transfers>>,
}

// SAFETY: the pointers are used by one thread at a time, while the caller keeps the memory alive and untouched.
unsafe impl Send for Call {}

impl Call {
    fn new(
        collective: Collective,
        dtype: DType,
        op: Option<ReduceOp>,
        root: usize,
        count: usize,
        buffers: Buffers,
    ) -> Call {
        let key = CallKey { collective, dtype, op, root, count, whole: count, peer: 0 };
        Call { key, buffers, transfers: None }
    }

    /// A message from `sender` to `receiver`.
    pub(super) fn message(dtype: DType, sender: usize, receiver: usize, count: usize, buffers: Buffers) -> Call {
        let collective = Collective::SendRecv;
        let key = CallKey { collective, dtype, op: None, root: sender, count, whole: count, peer: receiver };
        Call { key, buffers, transfers: None }
    }
}

/// Pointers of a send and a receive slice.
pub(super) fn buffers<T: Element>(input: &[T], output: &mut [T]) -> Buffers {
    Buffers { input: input.as_ptr().cast(), output: output.as_mut_ptr().cast() }
}

/// Pointers for an in-place call: input at `skip_in`, output at `skip_out` elements into `buffer`.
fn in_place<T: Element>(buffer: &mut [T], skip_in: usize, skip_out: usize) -> Buffers {
    let base = buffer.as_mut_ptr();
    Buffers { input: base.wrapping_add(skip_in).cast_const().cast(), output: base.wrapping_add(skip_out).cast() }
}

/// What lengths must be.
impl Inner {
    fn same_length(&self, c: Collective, input: usize, output: usize) -> Result<usize> {
        if input == output {
            return Ok(input);
        }
        let rank = self.state.rank;
        let detail =
            format!("rank {rank}: the input has {input} elements, the output {output}: expected equal lengths");
        Err(Error::invalid(c.name(), detail))
    }

    /// `long` must be the world size times `short`.
    fn segments(&self, c: Collective, which: &str, long: usize, short: usize) -> Result<usize> {
        let (rank, size) = (self.state.rank, self.size());
        if short.checked_mul(size) == Some(long) {
            return Ok(short);
        }
        let detail = format!("rank {rank}: the {which} has {long} elements, expected {size} ranks x {short}");
        Err(Error::invalid(c.name(), detail))
    }

    fn divisible(&self, c: Collective, len: usize) -> Result<usize> {
        let (rank, size) = (self.state.rank, self.size());
        if len.is_multiple_of(size) {
            return Ok(len / size);
        }
        let detail = format!("rank {rank}: {len} elements, expected a multiple of the world size {size}");
        Err(Error::invalid(c.name(), detail))
    }

    fn is_root(&self, c: Collective, root: usize) -> Result<bool> {
        self.peer_in_range(c.name(), "root", root)?;
        Ok(self.state.rank == root)
    }
}

/// The calls, named as the methods of `Comm` that make them.
impl Inner {
    pub(super) fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Call> {
        let c = Collective::AllReduce;
        let count = self.same_length(c, input.len(), output.len())?;
        Ok(Call::new(c, T::DTYPE, Some(op), 0, count, buffers(input, output)))
    }

    pub(super) fn all_reduce_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<Call> {
        Ok(Call::new(Collective::AllReduce, T::DTYPE, Some(op), 0, buffer.len(), in_place(buffer, 0, 0)))
    }

    pub(super) fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Call> {
        let c = Collective::AllGather;
        let count = self.segments(c, "output", output.len(), input.len())?;
        Ok(Call::new(c, T::DTYPE, None, 0, count, buffers(input, output)))
    }

    pub(super) fn all_gather_in_place<T: Element>(&self, buffer: &mut [T]) -> Result<Call> {
        let c = Collective::AllGather;
        let count = self.divisible(c, buffer.len())?;
        Ok(Call::new(c, T::DTYPE, None, 0, count, in_place(buffer, self.state.rank * count, 0)))
    }

    pub(super) fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<Call> {
        let c = Collective::ReduceScatter;
        let count = self.segments(c, "input", input.len(), output.len())?;
        Ok(Call::new(c, T::DTYPE, Some(op), 0, count, buffers(input, output)))
    }

    pub(super) fn reduce_scatter_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<Call> {
        let c = Collective::ReduceScatter;
        let count = self.divisible(c, buffer.len())?;
        Ok(Call::new(c, T::DTYPE, Some(op), 0, count, in_place(buffer, 0, self.state.rank * count)))
    }

    pub(super) fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Broadcast;
        self.is_root(c, root)?;
        Ok(Call::new(c, T::DTYPE, None, root, buffer.len(), in_place(buffer, 0, 0)))
    }

    pub(super) fn broadcast_from<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Broadcast;
        if self.is_root(c, root)? {
            self.same_length(c, input.len(), output.len())?;
        }
        Ok(Call::new(c, T::DTYPE, None, root, output.len(), buffers(input, output)))
    }

    pub(super) fn reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp, root: usize) -> Result<Call> {
        let c = Collective::Reduce;
        if self.is_root(c, root)? {
            self.same_length(c, input.len(), output.len())?;
        }
        Ok(Call::new(c, T::DTYPE, Some(op), root, input.len(), buffers(input, output)))
    }

    pub(super) fn reduce_in_place<T: Element>(&self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<Call> {
        let c = Collective::Reduce;
        self.is_root(c, root)?;
        Ok(Call::new(c, T::DTYPE, Some(op), root, buffer.len(), in_place(buffer, 0, 0)))
    }

    pub(super) fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Gather;
        if self.is_root(c, root)? {
            self.segments(c, "output", output.len(), input.len())?;
        }
        Ok(Call::new(c, T::DTYPE, None, root, input.len(), buffers(input, output)))
    }

    pub(super) fn gather_in_place<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Gather;
        let is_root = self.is_root(c, root)?;
        let count = if is_root { self.divisible(c, buffer.len())? } else { buffer.len() };
        let skip = if is_root { self.state.rank * count } else { 0 };
        Ok(Call::new(c, T::DTYPE, None, root, count, in_place(buffer, skip, 0)))
    }

    pub(super) fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Scatter;
        if self.is_root(c, root)? {
            self.segments(c, "input", input.len(), output.len())?;
        }
        Ok(Call::new(c, T::DTYPE, None, root, output.len(), buffers(input, output)))
    }

    pub(super) fn scatter_in_place<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<Call> {
        let c = Collective::Scatter;
        let is_root = self.is_root(c, root)?;
        let count = if is_root { self.divisible(c, buffer.len())? } else { buffer.len() };
        let skip = if is_root { self.state.rank * count } else { 0 };
        Ok(Call::new(c, T::DTYPE, None, root, count, in_place(buffer, 0, skip)))
    }

    pub(super) fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Call> {
        let c = Collective::AllToAll;
        self.same_length(c, input.len(), output.len())?;
        let count = self.divisible(c, input.len())?;
        Ok(Call::new(c, T::DTYPE, None, 0, count, buffers(input, output)))
    }

    pub(super) fn barrier(&self) -> Call {
        let mut nothing: [u8; 0] = [];
        Call::new(Collective::Barrier, DType::U8, None, 0, 0, in_place(&mut nothing, 0, 0))
    }

    pub(super) fn send<T: Element>(&self, data: &[T], peer: usize) -> Result<Call> {
        self.peer_in_range("send", "peer", peer)?;
        let buffers = Buffers { input: data.as_ptr().cast(), output: std::ptr::null_mut() };
        Ok(Call::message(T::DTYPE, self.state.rank, peer, data.len(), buffers))
    }

    pub(super) fn recv<T: Element>(&self, data: &mut [T], peer: usize) -> Result<Call> {
        self.peer_in_range("recv", "peer", peer)?;
        let buffers = Buffers { input: std::ptr::null(), output: data.as_mut_ptr().cast() };
        Ok(Call::message(T::DTYPE, peer, self.state.rank, data.len(), buffers))
    }
}
