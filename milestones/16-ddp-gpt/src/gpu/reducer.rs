//! Averaging over the ranks, in the order of a stream: the seam between this program and the communicator of GPUs.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::CudaStream;
use tinynccl::ReduceOp;
use tinynccl::comm::RawCall;
use tinynccl::cuda::{DeviceComm, Protocol};
use tinynccl::dtype::DType;
use tinynccl::wire::Collective;

/// Ranks that average f32 arrays on their GPUs. Calls only enqueue.
pub trait Reducer {
    /// Number of ranks.
    fn size(&self) -> usize;

    /// Whether calls may be captured into a graph.
    fn captures(&self) -> bool {
        true
    }

    /// Replaces `count` values at `at` by their mean over the ranks.
    fn average(&self, stream: &Arc<CudaStream>, at: u64, count: usize) -> Result<()>;

    /// Replaces them by rank 0's.
    fn broadcast(&self, stream: &Arc<CudaStream>, at: u64, count: usize) -> Result<()>;

    /// The failure of a call that ran before, if one has failed.
    fn check(&self) -> Result<()>;
}

/// A single rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Reducer for Alone {
    fn size(&self) -> usize {
        1
    }

    fn average(&self, _stream: &Arc<CudaStream>, _at: u64, _count: usize) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, _stream: &Arc<CudaStream>, _at: u64, _count: usize) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// The library's communicator of GPUs.
#[derive(Debug)]
pub struct Device<'c> {
    /// The communicator.
    pub comm: &'c DeviceComm,
    /// Blocks that the average of a large bucket may take, 0 for the communicator's own choice: what it takes, the passes do not
    /// have meanwhile.
    pub blocks: u32,
}

impl Device<'_> {
    fn call(&self, collective: Collective, op: ReduceOp, at: u64, count: usize) -> RawCall {
        RawCall::on_device(tinynccl::Call::new(collective, DType::F32, op, 0, count), at, at)
    }
}

impl Reducer for Device<'_> {
    fn size(&self) -> usize {
        self.comm.size()
    }

    fn captures(&self) -> bool {
        self.comm.path().captures()
    }

    fn average(&self, stream: &Arc<CudaStream>, at: u64, count: usize) -> Result<()> {
        let call = self.call(Collective::AllReduce, ReduceOp::Avg, at, count);
        let mut choice = self.comm.choice(call.collective, count * size_of::<f32>());
        if self.blocks > 0 && matches!(choice.protocol, Protocol::Simple | Protocol::Direct | Protocol::Schedule(..)) {
            choice.blocks = choice.blocks.min(self.blocks);
        }
        // SAFETY: the caller enqueues slices of its gradients, which live as long as the training; the passes write them again only
        // after the optimizer, which waits for this.
        Ok(unsafe { self.comm.enqueue_as(stream.cu_stream(), &call, choice) }?)
    }

    fn broadcast(&self, stream: &Arc<CudaStream>, at: u64, count: usize) -> Result<()> {
        let call = self.call(Collective::Broadcast, ReduceOp::Sum, at, count);
        // SAFETY: as above; nothing else runs before the first step.
        Ok(unsafe { self.comm.enqueue(stream.cu_stream(), &call) }?)
    }

    fn check(&self) -> Result<()> {
        Ok(self.comm.check()?)
    }
}
