//! Checked calls: what to run, on which memory. Blocking, asynchronous and grouped calls are made of these.
//!
//! `n` is the world size. Lengths that cannot be right give [`Error::InvalidArgument`] before anything is sent; lengths that
//! are right here but differ from another rank's give [`Error::Mismatch`] naming both.

use super::Inner;
use super::memory::{Memory, MemoryMut};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{Buffers, CallKey, Transfers};
use crate::wire::Collective;

/// A checked call.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) key: CallKey,
    pub(crate) buffers: Buffers,
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

/// Pointers of what is sent and what is received.
pub(super) fn buffers(input: &(impl Memory + ?Sized), output: &mut (impl MemoryMut + ?Sized)) -> Buffers {
    Buffers { input: input.address(), output: output.address_mut() }
}

/// Pointers for an in-place call: input at `skip_in`, output at `skip_out` elements into `buffer`.
fn in_place(buffer: &mut (impl MemoryMut + ?Sized), skip_in: usize, skip_out: usize) -> Buffers {
    let (base, size) = (buffer.address_mut(), buffer.dtype().size());
    Buffers { input: base.wrapping_add(skip_in * size).cast_const(), output: base.wrapping_add(skip_out * size) }
}

/// What lengths must be.
impl Inner {
    /// Always so for slices.
    #[inline]
    fn same_type(&self, c: Collective, input: DType, output: DType) -> Result<DType> {
        if input == output {
            return Ok(input);
        }
        let rank = self.state.rank;
        Err(Error::invalid(
            c.name(),
            format!("rank {rank}: the input is of {input}, the output of {output}: expected one type"),
        ))
    }

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

    /// Values of the type can be combined by the operator.
    #[inline]
    pub(super) fn combines(&self, c: Collective, dtype: DType, op: ReduceOp) -> Result<()> {
        op.check(c.name(), self.state.rank, dtype)
    }

    fn is_root(&self, c: Collective, root: usize) -> Result<bool> {
        self.peer_in_range(c.name(), "root", root)?;
        Ok(self.state.rank == root)
    }
}

/// The calls, named as the methods of `Comm` that make them.
impl Inner {
    pub(crate) fn all_reduce(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
        op: ReduceOp,
    ) -> Result<Call> {
        let c = Collective::AllReduce;
        let dtype = self.same_type(c, input.dtype(), output.dtype())?;
        let count = self.same_length(c, input.elements(), output.elements())?;
        self.combines(c, dtype, op)?;
        Ok(Call::new(c, dtype, Some(op), 0, count, buffers(input, output)))
    }

    pub(crate) fn all_reduce_in_place(&self, buffer: &mut (impl MemoryMut + ?Sized), op: ReduceOp) -> Result<Call> {
        self.combines(Collective::AllReduce, buffer.dtype(), op)?;
        Ok(Call::new(Collective::AllReduce, buffer.dtype(), Some(op), 0, buffer.elements(), in_place(buffer, 0, 0)))
    }

    pub(crate) fn all_gather(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
    ) -> Result<Call> {
        let c = Collective::AllGather;
        let dtype = self.same_type(c, input.dtype(), output.dtype())?;
        let count = self.segments(c, "output", output.elements(), input.elements())?;
        Ok(Call::new(c, dtype, None, 0, count, buffers(input, output)))
    }

    pub(crate) fn all_gather_in_place(&self, buffer: &mut (impl MemoryMut + ?Sized)) -> Result<Call> {
        let c = Collective::AllGather;
        let count = self.divisible(c, buffer.elements())?;
        Ok(Call::new(c, buffer.dtype(), None, 0, count, in_place(buffer, self.state.rank * count, 0)))
    }

    pub(crate) fn reduce_scatter(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
        op: ReduceOp,
    ) -> Result<Call> {
        let c = Collective::ReduceScatter;
        let dtype = self.same_type(c, input.dtype(), output.dtype())?;
        let count = self.segments(c, "input", input.elements(), output.elements())?;
        self.combines(c, dtype, op)?;
        Ok(Call::new(c, dtype, Some(op), 0, count, buffers(input, output)))
    }

    pub(crate) fn reduce_scatter_in_place(&self, buffer: &mut (impl MemoryMut + ?Sized), op: ReduceOp) -> Result<Call> {
        let c = Collective::ReduceScatter;
        let count = self.divisible(c, buffer.elements())?;
        self.combines(c, buffer.dtype(), op)?;
        Ok(Call::new(c, buffer.dtype(), Some(op), 0, count, in_place(buffer, 0, self.state.rank * count)))
    }

    pub(crate) fn broadcast(&self, buffer: &mut (impl MemoryMut + ?Sized), root: usize) -> Result<Call> {
        let c = Collective::Broadcast;
        self.is_root(c, root)?;
        Ok(Call::new(c, buffer.dtype(), None, root, buffer.elements(), in_place(buffer, 0, 0)))
    }

    pub(crate) fn broadcast_from(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
        root: usize,
    ) -> Result<Call> {
        let c = Collective::Broadcast;
        if self.is_root(c, root)? {
            self.same_type(c, input.dtype(), output.dtype())?;
            self.same_length(c, input.elements(), output.elements())?;
        }
        Ok(Call::new(c, output.dtype(), None, root, output.elements(), buffers(input, output)))
    }

    pub(crate) fn reduce(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
        op: ReduceOp,
        root: usize,
    ) -> Result<Call> {
        let c = Collective::Reduce;
        if self.is_root(c, root)? {
            self.same_type(c, input.dtype(), output.dtype())?;
            self.same_length(c, input.elements(), output.elements())?;
        }
        self.combines(c, input.dtype(), op)?;
        Ok(Call::new(c, input.dtype(), Some(op), root, input.elements(), buffers(input, output)))
    }

    pub(crate) fn reduce_in_place(
        &self,
        buffer: &mut (impl MemoryMut + ?Sized),
        op: ReduceOp,
        root: usize,
    ) -> Result<Call> {
        let c = Collective::Reduce;
        self.is_root(c, root)?;
        self.combines(c, buffer.dtype(), op)?;
        Ok(Call::new(c, buffer.dtype(), Some(op), root, buffer.elements(), in_place(buffer, 0, 0)))
    }

    pub(crate) fn gather(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
        root: usize,
    ) -> Result<Call> {
        let c = Collective::Gather;
        if self.is_root(c, root)? {
            self.same_type(c, input.dtype(), output.dtype())?;
            self.segments(c, "output", output.elements(), input.elements())?;
        }
        Ok(Call::new(c, input.dtype(), None, root, input.elements(), buffers(input, output)))
    }

    pub(crate) fn gather_in_place(&self, buffer: &mut (impl MemoryMut + ?Sized), root: usize) -> Result<Call> {
        let c = Collective::Gather;
        let is_root = self.is_root(c, root)?;
        let count = if is_root { self.divisible(c, buffer.elements())? } else { buffer.elements() };
        let skip = if is_root { self.state.rank * count } else { 0 };
        Ok(Call::new(c, buffer.dtype(), None, root, count, in_place(buffer, skip, 0)))
    }

    pub(crate) fn scatter(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
        root: usize,
    ) -> Result<Call> {
        let c = Collective::Scatter;
        if self.is_root(c, root)? {
            self.same_type(c, input.dtype(), output.dtype())?;
            self.segments(c, "input", input.elements(), output.elements())?;
        }
        Ok(Call::new(c, output.dtype(), None, root, output.elements(), buffers(input, output)))
    }

    pub(crate) fn scatter_in_place(&self, buffer: &mut (impl MemoryMut + ?Sized), root: usize) -> Result<Call> {
        let c = Collective::Scatter;
        let is_root = self.is_root(c, root)?;
        let count = if is_root { self.divisible(c, buffer.elements())? } else { buffer.elements() };
        let skip = if is_root { self.state.rank * count } else { 0 };
        Ok(Call::new(c, buffer.dtype(), None, root, count, in_place(buffer, 0, skip)))
    }

    pub(crate) fn all_to_all(
        &self,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
    ) -> Result<Call> {
        let c = Collective::AllToAll;
        let dtype = self.same_type(c, input.dtype(), output.dtype())?;
        self.same_length(c, input.elements(), output.elements())?;
        let count = self.divisible(c, input.elements())?;
        Ok(Call::new(c, dtype, None, 0, count, buffers(input, output)))
    }

    pub(crate) fn barrier(&self) -> Call {
        let mut nothing: [u8; 0] = [];
        Call::new(Collective::Barrier, DType::U8, None, 0, 0, in_place(&mut nothing[..], 0, 0))
    }

    pub(crate) fn send(&self, data: &(impl Memory + ?Sized), peer: usize) -> Result<Call> {
        self.peer_in_range("send", "peer", peer)?;
        let buffers = Buffers { input: data.address(), output: std::ptr::null_mut() };
        Ok(Call::message(data.dtype(), self.state.rank, peer, data.elements(), buffers))
    }

    pub(crate) fn recv(&self, data: &mut (impl MemoryMut + ?Sized), peer: usize) -> Result<Call> {
        self.peer_in_range("recv", "peer", peer)?;
        let buffers = Buffers { input: std::ptr::null(), output: data.address_mut() };
        Ok(Call::message(data.dtype(), peer, self.state.rank, data.elements(), buffers))
    }
}
