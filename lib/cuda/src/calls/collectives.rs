//! Collectives over device buffers of cudarc: lengths checked, streams ordered by its events.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::comm::DeviceComm;
use tinynccl_comm::RawCall;
use tinynccl_comm::calls::table::{asked, collectives};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::dtype::{Element, ReduceOp};
use tinynccl_plan::error::{Error, Result};

macro_rules! enqueued {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        impl DeviceComm {
            $(enqueued! { @ $form $device $name $collective $arguments })*
        }
    };
    (@ $form:ident - $($rest:tt)*) => {};
    (@ apart device $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`Comm::", stringify!($name), "`](tinynccl_comm::Comm::", stringify!($name), ") of memory of GPUs, put into a stream.")]
        pub fn $name<T: Element>(
            &self,
            stream: &Arc<CudaStream>,
            input: &impl DevicePtr<T>,
            output: &mut impl DevicePtrMut<T>
            $(, $arg: $ty)*
        ) -> Result<()> {
            self.apart(stream, asked!($collective $(, $arg)*), input, output)
        }
    };
    (@ place device $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`Comm::", stringify!($name), "`](tinynccl_comm::Comm::", stringify!($name), ") of memory of GPUs, put into a stream.")]
        pub fn $name<T: Element>(
            &self,
            stream: &Arc<CudaStream>,
            buffer: &mut impl DevicePtrMut<T>
            $(, $arg: $ty)*
        ) -> Result<()> {
            self.in_place(stream, asked!($collective $(, $arg)*), buffer)
        }
    };
}
collectives!(enqueued);

impl DeviceComm {
    /// Sends to `peer`, which must receive as many elements. The stream waits until the peer receives when the message
    /// is longer than the slots (about 5 MiB with 32 blocks): two ranks that send such messages to each other first
    /// and receive then must use [`DeviceComm::send_recv`].
    pub fn send<T: Element>(&self, stream: &Arc<CudaStream>, buffer: &impl DevicePtr<T>, peer: usize) -> Result<()> {
        self.here(stream, "send")?;
        let bytes = buffer.len() * size_of::<T>();
        let (at, _read) = buffer.device_ptr(stream);
        // SAFETY: the buffer is cudarc's, which keeps it until the stream has passed the event recorded when the guard
        // is dropped.
        unsafe { self.enqueue_send_recv(stream, Some((at, bytes, peer)), None) }
    }

    /// Receives a message of `peer`.
    pub fn recv<T: Element>(
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
    pub fn send_recv<T: Element>(
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

    /// One buffer for input and output, which lie in it as [`Shape::in_place`] says.
    fn in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        call: Call,
        buffer: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let op = call.collective.name();
        self.here(stream, op)?;
        let len = buffer.len();
        let Some((count, input, output)) = self.shape(&call)?.cut_in_place(self.rank(), len) else {
            return Err(Error::invalid(
                op,
                format!("{len} elements, expected a multiple of {}, one per rank", self.size()),
            ));
        };
        let call = call.with_count(T::DTYPE, count);
        let (at, _written) = buffer.device_ptr_mut(stream);
        let segment = |segment: usize| at + (segment * call.bytes()) as u64;
        // SAFETY: as in `apart`.
        unsafe { self.enqueue(stream, &RawCall::on_device(call, segment(input), segment(output))) }
    }

    fn apart<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        call: Call,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let (op, counts) = (call.collective.name(), (input.len(), output.len()));
        self.here(stream, op)?;
        let shape = self.shape(&call)?;
        let count = match (shape.input_segments(self.rank()), shape.output_segments(self.rank())) {
            (0, _) => counts.1,
            (_, 0) => counts.0,
            (reads, writes) if counts.0 * writes == counts.1 * reads && counts.0 % reads == 0 => counts.0 / reads,
            (reads, writes) => {
                let detail = format!(
                    "the input has {} elements, the output {}: expected {reads} segments in and {writes} out, of the same length",
                    counts.0, counts.1
                );
                return Err(Error::invalid(op, detail));
            }
        };
        let (from, _read) = input.device_ptr(stream);
        let (to, _written) = output.device_ptr_mut(stream);
        // SAFETY: lengths were checked; cudarc keeps the buffers until the stream has passed the events recorded when
        // the guards are dropped, behind the call.
        unsafe { self.enqueue(stream, &RawCall::on_device(call.with_count(T::DTYPE, count), from, to)) }
    }

    /// Shape of a call whose root is a rank.
    fn shape(&self, call: &Call) -> Result<Shape> {
        self.root_in_range(call)?;
        Ok(Shape { collective: call.collective, ranks: self.size(), root: call.root, channels: 1 })
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
