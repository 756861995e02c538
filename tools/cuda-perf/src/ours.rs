//! A task through this library.

use anyhow::Result;
use cudarc::driver::CudaStream;
use std::sync::Arc;
use tinynccl::comm::RawCall;
use tinynccl::cuda::DeviceComm;
use tinynccl::{Call, ReduceOp};

use crate::task::{Buffers, Operation, Task};

pub(crate) fn enqueue(device: &DeviceComm, stream: &Arc<CudaStream>, task: &Task, buffers: &Buffers) -> Result<()> {
    let (input, output) = (buffers.input, buffers.output);
    if task.operation == Operation::SendRecv {
        let (rank, size) = (device.rank(), device.size());
        let bytes = task.count * task.dtype.size();
        // SAFETY: both buffers are of `bytes` bytes or more, and used in this stream alone.
        return Ok(unsafe {
            device.enqueue_send_recv(
                stream,
                Some((input, bytes, (rank + 1) % size)),
                Some((output, bytes, (rank + size - 1) % size)),
            )
        }?);
    }
    let call =
        RawCall::on_device(Call::new(task.collective(), task.dtype, ReduceOp::Sum, 0, task.count), input, output);
    // SAFETY: both buffers are as long as nccl-tests count, which is the longer of a collective's two.
    Ok(unsafe { device.enqueue(stream, &call) }?)
}
