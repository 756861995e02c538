//! Turns arguments into a call with checked lengths. Blocking, asynchronous and grouped calls use these functions.
//!
//! `n` is the world size. Invalid lengths give [`Error::InvalidArgument`] before anything is sent. Lengths that are
//! valid here but differ from another rank's give [`Error::Mismatch`] naming both.

use super::memory::{Memory, MemoryMut};
use crate::Inner;
use crate::RawCall;
use crate::executor::Buffers;
use tinynccl_plan::Call;
use tinynccl_plan::dtype::DType;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// Pointers of what is sent and what is received.
pub(super) fn buffers(input: &(impl Memory + ?Sized), output: &mut (impl MemoryMut + ?Sized)) -> Buffers {
    Buffers { input: input.address(), output: output.address_mut() }
}

/// Required lengths.
impl Inner {
    /// A call with an input and an output. A rank ignores the buffer that it does not have.
    // Always inlined: the collective is a constant at each call site, so its shape folds away.
    #[inline(always)]
    pub fn call(
        &self,
        asked: Call,
        input: &(impl Memory + ?Sized),
        output: &mut (impl MemoryMut + ?Sized),
    ) -> Result<RawCall> {
        let (reads, writes) = self.segments(&asked)?;
        let (dtype, count) = match (reads, writes) {
            (0, _) => (output.dtype(), output.elements()),
            (_, 0) => (input.dtype(), input.elements()),
            _ if input.dtype() != output.dtype() => return Err(self.two_types(&asked, input.dtype(), output.dtype())),
            _ => (input.dtype(), self.count(&asked, (input.elements(), reads), (output.elements(), writes))?),
        };
        self.made(asked, dtype, count, buffers(input, output))
    }

    /// A call of one buffer, in which input and output lie as [`Shape::in_place`] says.
    #[inline(always)]
    pub fn call_in_place(&self, asked: Call, buffer: &mut (impl MemoryMut + ?Sized)) -> Result<RawCall> {
        self.root_in_range(&asked)?;
        let len = buffer.elements();
        let shape = self.shape(asked.collective, asked.root);
        let Some((count, input, output)) = shape.cut_in_place(self.state.rank, len) else {
            return Err(self.not_divisible(&asked, len));
        };
        let (base, segment) = (buffer.address_mut(), count * buffer.dtype().size());
        let input = base.wrapping_add(input * segment).cast_const();
        let buffers = Buffers { input, output: base.wrapping_add(output * segment) };
        self.made(asked, buffer.dtype(), count, buffers)
    }

    #[inline(always)]
    pub(crate) fn made(&self, asked: Call, dtype: DType, count: usize, buffers: Buffers) -> Result<RawCall> {
        if let Some(op) = asked.op {
            op.check(asked.collective, self.state.rank, dtype)?;
        }
        Ok(RawCall::over(asked.with_count(dtype, count), buffers))
    }

    /// Segments of our input and of our output.
    #[inline(always)]
    fn segments(&self, asked: &Call) -> Result<(usize, usize)> {
        self.root_in_range(asked)?;
        let (shape, rank) = (self.shape(asked.collective, asked.root), self.state.rank);
        Ok((shape.input_segments(rank), shape.output_segments(rank)))
    }

    #[inline(always)]
    pub(crate) fn root_in_range(&self, asked: &Call) -> Result<()> {
        if !asked.collective.has_root() {
            return Ok(());
        }
        self.peer_in_range(asked.collective.name(), "root", asked.root)
    }

    /// Elements per segment; `input` and `output` are each buffer's elements and segments.
    #[inline(always)]
    fn count(&self, asked: &Call, input: (usize, usize), output: (usize, usize)) -> Result<usize> {
        match (input, output) {
            ((input, 1), (output, 1)) if input == output => Ok(input),
            ((short, 1), (long, n)) | ((long, n), (short, 1)) if short.checked_mul(n) == Some(long) => Ok(short),
            ((input, n), (output, _)) if n > 1 && input == output && input.is_multiple_of(n) => Ok(input / n),
            _ => Err(self.wrong_lengths(asked, input, output)),
        }
    }

    #[cold]
    fn wrong_lengths(&self, asked: &Call, input: (usize, usize), output: (usize, usize)) -> Error {
        let (rank, size) = (self.state.rank, self.size());
        let ((input, _), (output, _)) = (input, output);
        let detail = match asked.collective {
            Collective::AllGather | Collective::Gather => {
                format!("rank {rank}: the output has {output} elements, expected {size} ranks x {input}")
            }
            Collective::ReduceScatter | Collective::Scatter => {
                format!("rank {rank}: the input has {input} elements, expected {size} ranks x {output}")
            }
            _ if input == output => return self.not_divisible(asked, input),
            _ => format!("rank {rank}: the input has {input} elements, the output {output}: expected equal lengths"),
        };
        Error::invalid(asked.collective.name(), detail)
    }

    #[cold]
    fn not_divisible(&self, asked: &Call, len: usize) -> Error {
        let (rank, size) = (self.state.rank, self.size());
        let detail = format!("rank {rank}: {len} elements, expected a multiple of the world size {size}");
        Error::invalid(asked.collective.name(), detail)
    }

    /// Never so for slices.
    #[cold]
    fn two_types(&self, asked: &Call, input: DType, output: DType) -> Error {
        let rank = self.state.rank;
        let detail = format!("rank {rank}: the input is of {input}, the output of {output}: expected one type");
        Error::invalid(asked.collective.name(), detail)
    }

    /// Returns the call of a barrier.
    pub fn barrier(&self) -> RawCall {
        let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
        let buffers = Buffers { input: nothing, output: nothing };
        RawCall::over(Call::of(Collective::Barrier), buffers)
    }

    /// Returns the checked call that sends `data` to `peer`.
    pub fn send(&self, data: &(impl Memory + ?Sized), peer: usize) -> Result<RawCall> {
        self.peer_in_range("send", "peer", peer)?;
        let buffers = Buffers { input: data.address(), output: std::ptr::null_mut() };
        Ok(RawCall::over(Call::message(data.dtype(), self.state.rank, peer, data.elements()), buffers))
    }

    /// Returns the checked call that receives from `peer` into `data`.
    pub fn recv(&self, data: &mut (impl MemoryMut + ?Sized), peer: usize) -> Result<RawCall> {
        self.peer_in_range("recv", "peer", peer)?;
        let buffers = Buffers { input: std::ptr::null(), output: data.address_mut() };
        Ok(RawCall::over(Call::message(data.dtype(), peer, self.state.rank, data.elements()), buffers))
    }
}
