//! The task to time: an operation of some size, and its buffers.

use std::any::Any;
use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaStream, DevicePtr};
use tinynccl::algorithm::Shape;
use tinynccl::comm::RawCall;
use tinynccl::cuda::DeviceComm;
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

/// One operation of one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    pub(super) collective: Collective,
    pub(super) dtype: DType,
    /// Elements, as the collective counts them: of a segment where there are segments.
    pub(super) count: usize,
    /// Bytes of each buffer, as nccl-tests count them.
    pub(super) bytes: usize,
    pub(super) ranks: usize,
    /// Operator of a reduction.
    pub(super) op: ReduceOp,
}

/// Device memory of a task.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Addresses of input and output.
    pub(super) addresses: [u64; 2],
    _memory: Box<dyn Any>,
}

impl Task {
    /// `None` if so few bytes cannot be cut into the segments.
    pub(super) fn new(collective: Collective, dtype: DType, bytes: usize, ranks: usize) -> Option<Task> {
        let shape = Shape { collective, ranks, root: 0, channels: 1 };
        let segments = shape.input_segments(0).max(shape.output_segments(0));
        let count = bytes / dtype.size() / segments;
        (count > 0).then_some(Task { collective, dtype, count, bytes, ranks, op: ReduceOp::Sum })
    }

    /// Bytes of `count` elements.
    pub(super) fn segment(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// With `device`, registered with it.
    pub(super) fn buffers(
        &self,
        stream: &Arc<CudaStream>,
        rank: usize,
        device: Option<&DeviceComm>,
    ) -> Result<Buffers> {
        let host = self.pattern(rank);
        let (addresses, memory): (_, Box<dyn Any>) = match device {
            Some(device) => {
                let mut pair = [device.alloc::<u8>(stream, self.bytes)?, device.alloc(stream, self.bytes)?];
                stream.memcpy_htod(&host, &mut pair[0].as_view_mut())?;
                (pair.each_ref().map(|memory| memory.device_ptr(stream).0), Box::new(pair))
            }
            None => {
                let mut pair = [stream.alloc_zeros::<u8>(self.bytes)?, stream.alloc_zeros(self.bytes)?];
                stream.memcpy_htod(&host, &mut pair[0])?;
                (pair.each_ref().map(|memory| memory.device_ptr(stream).0), Box::new(pair))
            }
        };
        Ok(Buffers { addresses, _memory: memory })
    }

    /// Bytes that are not zeroes: they can be faster than data.
    fn pattern(&self, rank: usize) -> Vec<u8> {
        // Small whole numbers in f32 and bf16 alike: 1.0 and 2.0 have a zero low half in f32.
        let byte = |i: usize| if i % 2 == 1 { 0x3f } else { (i / 2 + rank) as u8 & 0x7f };
        (0..self.bytes).map(|i| byte(i % (1 << 20))).collect()
    }

    /// Through this library.
    pub(super) fn enqueue(&self, device: &DeviceComm, stream: &Arc<CudaStream>, buffers: &Buffers) -> Result<()> {
        let [input, output] = buffers.addresses;
        if self.collective == Collective::SendRecv {
            let (rank, size, bytes) = (device.rank(), device.size(), self.segment());
            let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
            // SAFETY: both buffers are of `bytes` bytes or more, and used in this stream alone.
            return Ok(unsafe {
                device.enqueue_send_recv(stream, Some((input, bytes, to)), Some((output, bytes, from)))
            }?);
        }
        let call = Call::new(self.collective, self.dtype, self.op, 0, self.count);
        // SAFETY: both buffers are as long as nccl-tests count, which is the longer of a collective's two.
        Ok(unsafe { device.enqueue(stream, &RawCall::on_device(call, input, output)) }?)
    }

    /// GB/s of the link that an ideal algorithm would need.
    pub(super) fn busbw(&self, seconds: f64) -> f64 {
        self.collective.bus_factor(self.ranks) * self.bytes as f64 / seconds / 1e9
    }
}
