//! Collectives over device buffers of cudarc: lengths checked, streams ordered by its events.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};

use super::call::Call;
use super::comm::DeviceComm;
use crate::dtype::{Element, ReduceOp};
use crate::error::{Error, Result};
use crate::wire::Collective;

impl DeviceComm {
    /// Every rank's `output` becomes the element-wise reduction of all ranks' `input`; both of the same length.
    pub fn all_reduce<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        let counts = (input.len(), output.len());
        self.checked(stream, Collective::AllReduce, counts, (1, 1))?;
        self.run(stream, Collective::AllReduce, op, 0, counts.0, input, output)
    }

    /// [`DeviceComm::all_reduce`] with one buffer for input and output.
    pub fn all_reduce_in_place<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        buffer: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.in_place(stream, Collective::AllReduce, op, 0, buffer)
    }

    /// Every rank's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
    pub fn all_gather<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let counts = (input.len(), output.len());
        self.checked(stream, Collective::AllGather, counts, (1, self.size()))?;
        self.run(stream, Collective::AllGather, ReduceOp::Sum, 0, counts.0, input, output)
    }

    /// `output` becomes segment `rank` of the reduction of all ranks' `input` (`n` x the output's length).
    pub fn reduce_scatter<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        let counts = (input.len(), output.len());
        self.checked(stream, Collective::ReduceScatter, counts, (self.size(), 1))?;
        self.run(stream, Collective::ReduceScatter, op, 0, counts.1, input, output)
    }

    /// Every rank's `buffer` becomes the root's.
    pub fn broadcast<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        buffer: &mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<()> {
        self.in_place(stream, Collective::Broadcast, ReduceOp::Sum, root, buffer)
    }

    /// The root's `output` becomes the reduction of all ranks' `input`; elsewhere `output` stays as it is. Both of the same
    /// length.
    pub fn reduce<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let counts = (input.len(), output.len());
        self.checked(stream, Collective::Reduce, counts, (1, 1))?;
        self.run(stream, Collective::Reduce, op, root, counts.0, input, output)
    }

    /// Segment `s` of `output` becomes segment `rank` of rank `s`'s `input`; both have `n` equal segments.
    pub fn all_to_all<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let counts = (input.len(), output.len());
        self.checked(stream, Collective::AllToAll, counts, (self.size(), self.size()))?;
        self.run(stream, Collective::AllToAll, ReduceOp::Sum, 0, counts.0 / self.size(), input, output)
    }

    /// Sends to `peer`, which must receive as many elements. The stream waits until the peer receives when the message is longer than
    /// the slots, or from 4 MiB on when the communicator has registered buffers: two ranks that send to each other first and
    /// receive then must use [`DeviceComm::send_recv`].
    pub fn send<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        buffer: &impl DevicePtr<T>,
        peer: usize,
    ) -> Result<()> {
        self.here(stream, "send")?;
        let bytes = buffer.len() * size_of::<T>();
        let (at, _read) = buffer.device_ptr(stream);
        // SAFETY: the buffer is cudarc's, which keeps it until the stream has passed the event recorded when the guard is dropped.
        unsafe { self.enqueue_send_recv(stream, Some((at, bytes, peer)), None) }
    }

    /// Receives what `peer` sends.
    pub fn recv<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        buffer: &mut impl DevicePtrMut<T>,
        peer: usize,
    ) -> Result<()> {
        self.here(stream, "recv")?;
        let bytes = buffer.len() * size_of::<T>();
        let (at, _written) = buffer.device_ptr_mut(stream);
        // SAFETY: as in `send`.
        unsafe { self.enqueue_send_recv(stream, None, Some((at, bytes, peer))) }
    }

    /// Sends to one rank and receives from one (maybe another, maybe the same) at the same time.
    pub fn send_recv<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        send: &impl DevicePtr<T>,
        to: usize,
        recv: &mut impl DevicePtrMut<T>,
        from: usize,
    ) -> Result<()> {
        self.here(stream, "send_recv")?;
        let lengths = (send.len() * size_of::<T>(), recv.len() * size_of::<T>());
        let (out, _read) = send.device_ptr(stream);
        let (into, _written) = recv.device_ptr_mut(stream);
        let (to, from) = ((out, lengths.0, to), (into, lengths.1, from));
        // SAFETY: as in `send`.
        unsafe { self.enqueue_send_recv(stream, Some(to), Some(from)) }
    }

    fn in_place<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective,
        op: ReduceOp,
        root: usize,
        buffer: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        self.here(stream, collective.name())?;
        let count = buffer.len();
        let (at, _written) = buffer.device_ptr_mut(stream);
        let call = Call { collective, dtype: T::DTYPE, op, root, count, input: at, output: at };
        // SAFETY: as in `run`.
        unsafe { self.enqueue(stream, &call) }
    }

    #[expect(clippy::too_many_arguments, reason = "what a collective is")]
    fn run<T: Element + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        collective: Collective,
        op: ReduceOp,
        root: usize,
        count: usize,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let (from, _read) = input.device_ptr(stream);
        let (to, _written) = output.device_ptr_mut(stream);
        let call = Call { collective, dtype: T::DTYPE, op, root, count, input: from, output: to };
        // SAFETY: lengths were checked; cudarc keeps the buffers until the stream has passed the events recorded when the
        // guards are dropped, behind the call.
        unsafe { self.enqueue(stream, &call) }
    }

    /// The lengths are to each other as `parts`.
    fn checked(
        &self,
        stream: &CudaStream,
        collective: Collective,
        (input, output): (usize, usize),
        parts: (usize, usize),
    ) -> Result<()> {
        self.here(stream, collective.name())?;
        if input * parts.1 == output * parts.0 && input % parts.0 == 0 {
            return Ok(());
        }
        Err(Error::invalid(
            collective.name(),
            format!(
                "the input has {input} elements, the output {output}: expected {} segments in and {} out, of the same length",
                parts.0, parts.1
            ),
        ))
    }

    fn here(&self, stream: &CudaStream, op: &str) -> Result<()> {
        if stream.context() == self.context() {
            return Ok(());
        }
        Err(Error::invalid(
            op,
            format!(
                "the stream is of GPU {}, the communicator of GPU {}",
                stream.context().ordinal(),
                self.context().ordinal()
            ),
        ))
    }
}
