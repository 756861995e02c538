//! Messages of a rank to itself within a batch: copies.

use std::sync::Arc;

use super::gpu::{CudaContext, Stream, copy};
use tinynccl_comm::RawCall;
use tinynccl_plan::dtype::DType;
use tinynccl_plan::error::{Error, Result};

/// Messages of a rank to itself: the k-th sent is the k-th received.
#[derive(Debug, Default)]
pub(super) struct Own {
    sends: Vec<(DType, usize, *const u8)>,
    recvs: Vec<(DType, usize, *mut u8)>,
}

impl Own {
    /// Adds a message that we send to ourselves; returns `None` for it.
    pub(super) fn send(&mut self, call: RawCall) -> Option<RawCall> {
        self.sends.push((call.dtype, call.count, call.buffers.input));
        None
    }

    /// Adds a message that we receive from ourselves; returns `None` for it.
    pub(super) fn recv(&mut self, call: RawCall) -> Option<RawCall> {
        self.recvs.push((call.dtype, call.count, call.buffers.output));
        None
    }

    fn pairs(&self, rank: usize) -> Result<impl Iterator<Item = (*const u8, *mut u8, usize)>> {
        let (sends, recvs) = (self.sends.len(), self.recvs.len());
        if sends != recvs {
            let detail = format!("rank {rank} sends {sends} times to itself but receives {recvs} times");
            return Err(Error::invalid("batch", detail));
        }
        let pairs = || self.sends.iter().zip(&self.recvs);
        if let Some((send, recv)) = pairs().find(|(send, recv)| (send.0, send.1) != (recv.0, recv.1)) {
            let detail =
                format!("rank {rank} sends {} {} to itself but receives {} {}", send.1, send.0, recv.1, recv.0);
            return Err(Error::invalid("batch", detail));
        }
        Ok(pairs().map(|(send, recv)| (send.2, recv.2, send.1 * send.0.size())))
    }

    /// # Safety
    /// The memory must be of the host and valid.
    pub(super) unsafe fn copy(&self, rank: usize) -> Result<()> {
        for (from, to, bytes) in self.pairs(rank)? {
            // SAFETY: by the caller; the output is borrowed exclusively, so the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        Ok(())
    }

    /// # Safety
    /// The memory must be of the device, until `stream` has passed the copies.
    pub(super) unsafe fn enqueue(&self, rank: usize, context: &Arc<CudaContext>, stream: &Stream) -> Result<()> {
        for (from, to, bytes) in self.pairs(rank)? {
            // SAFETY: forwarded from the caller.
            unsafe { copy("batch", context, stream.handle(), from as u64, to as u64, bytes) }?;
        }
        Ok(())
    }
}
