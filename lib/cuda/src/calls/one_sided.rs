//! One-sided messages: a rank writes into a buffer that another rank registered, and signals that it has.
//!
//! The receiver takes no part in the copy. It waits for a number of signals; a signal arrives behind the copies before
//! it in the sender's stream. The copies are the copy engines', signals and waits are kernels of one block, so that a
//! graph can replay them. As NCCL's `ncclPutSignal`, `ncclSignal` and `ncclWaitSignal`.

use super::registered::Registered;
use crate::checked::buffers::{self, Buffer};
use crate::checked::call::Stream;
use crate::comm::DeviceComm;
use crate::driver::{copy, cuda};
use crate::kernels::{Args, Family, Framing, Kernel, Kernels, Team, launch};
use crate::peer::Registration;
use crate::window::MAX_RANKS;
use tinynccl_plan::error::{Error, Result};

/// Counts per rank in `kernels/signal.cu`.
const COUNTS: usize = 4;

/// The signals of a rank, which all ranks reach. Of [`DeviceComm::signals`].
#[derive(Debug)]
pub struct Signals {
    memory: Registered<u32>,
    own: u64,
}

/// As `struct Awaited` of `kernels/signal.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Awaited {
    of: [u32; MAX_RANKS],
}

impl DeviceComm {
    /// Memory for signals of all ranks to this one. Every rank must call it, as [`DeviceComm::alloc`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where kernels do not reach the other ranks' memory ([`DeviceComm::path_reason`]); those
    /// of [`DeviceComm::alloc`].
    pub fn signals(&self) -> Result<Signals> {
        self.one_sided()?;
        let stream = self.context().default_stream();
        let memory = self.alloc::<u32>(&stream, COUNTS * self.size())?;
        let own = memory.place(self.rank()).map(|(at, _)| at);
        let own = own.ok_or_else(|| self.unreached("the memory of signals", self.rank()))?;
        Ok(Signals { memory, own })
    }

    /// Enqueues a copy of `bytes` at `from` to the place `offset` bytes into the buffer that `peer` registered in the
    /// same call as `into`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a peer or range that does not exist; [`Error::Unsupported`] when our device does
    /// not reach that buffer.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`] for `from`; `peer` must keep its registration until it has seen a later signal.
    pub unsafe fn put(
        &self,
        stream: impl Into<Stream>,
        from: u64,
        bytes: usize,
        into: &Registration,
        peer: usize,
        offset: usize,
    ) -> Result<()> {
        let op = "put";
        self.made(self.admit())?;
        self.check_peer(op, peer)?;
        let (at, length) = into.place(peer).ok_or_else(|| self.unreached("the buffer", peer))?;
        if (offset as u64).checked_add(bytes as u64).is_none_or(|end| end > length) {
            return Err(Error::invalid(
                op,
                format!(
                    "rank {}: {bytes} bytes at offset {offset} reach beyond the buffer of rank {peer}, which has {length}",
                    self.rank()
                ),
            ));
        }
        let stream = stream.into();
        if self.checks_memory && bytes > 0 {
            let used = Buffer { name: "message put", at: from, bytes: bytes as u64, element: 1 };
            buffers::check(op, self.rank(), self.context(), stream.handle(), &[Some(used)])?;
        }
        // SAFETY: the caller vouches for `from`, and for the peer's registration; the range is in it.
        unsafe { copy(op, self.context(), stream.handle(), from, at + offset as u64, bytes) }
    }

    /// Enqueues one signal to `peer`.
    ///
    /// # Errors
    /// As [`DeviceComm::put`].
    ///
    /// # Safety
    /// `stream` must be of this device. `peer` must keep its [`Signals`] until it has seen the signal.
    pub unsafe fn signal(&self, stream: impl Into<Stream>, signals: &Signals, peer: usize) -> Result<()> {
        let op = "signal";
        self.made(self.admit())?;
        self.check_peer(op, peer)?;
        let (kernels, team) = self.one_sided()?;
        let (at, _) = signals.memory.place(peer).ok_or_else(|| self.unreached("the memory of signals", peer))?;
        let function = kernels.function(Kernel::new(Family::Signal, Framing::Simple), None)?;
        let args = Args { team: *team, input: signals.own, output: at, root: peer as u32, ..Args::default() };
        // SAFETY: the kernel declares nothing more; it writes counts of ours, and ours at the peer.
        unsafe { launch(function, 1, stream.into().handle(), &args, &[]) }
            .map_err(|e| cuda(op, "launching a kernel", e))
    }

    /// Makes the stream wait for signals: of each rank, how many more than were waited for before. A wait ends with the
    /// communicator's deadline, whose error [`DeviceComm::check`] gives.
    ///
    /// # Errors
    /// As [`DeviceComm::put`].
    ///
    /// # Safety
    /// `stream` must be of this device, and `signals` must be kept until it has passed the wait.
    pub unsafe fn wait_signals(
        &self,
        stream: impl Into<Stream>,
        signals: &Signals,
        awaited: &[(usize, u32)],
    ) -> Result<()> {
        let op = "wait_signals";
        self.made(self.admit())?;
        let (kernels, team) = self.one_sided()?;
        let awaited = self.awaited(op, awaited)?;
        let function = kernels.function(Kernel::new(Family::SignalWait, Framing::Simple), None)?;
        let args = Args { team: *team, output: signals.own, ..Args::default() };
        // SAFETY: the kernel declares `Awaited`; it reads and writes our counts.
        unsafe { launch(function, 1, stream.into().handle(), &args, &[(&raw const awaited).cast()]) }
            .map_err(|e| cuda(op, "launching a kernel", e))
    }

    fn awaited(&self, op: &str, list: &[(usize, u32)]) -> Result<Awaited> {
        let mut awaited = Awaited::default();
        for &(peer, count) in list {
            self.check_peer(op, peer)?;
            let sum = awaited.of[peer].checked_add(count).filter(|&sum| sum <= i32::MAX as u32);
            awaited.of[peer] = sum.ok_or_else(|| {
                Error::invalid(
                    op,
                    format!("rank {}: more than {} signals of rank {peer} awaited", self.rank(), i32::MAX),
                )
            })?;
        }
        Ok(awaited)
    }

    fn check_peer(&self, op: &str, peer: usize) -> Result<()> {
        if peer < self.size() {
            return Ok(());
        }
        Err(Error::invalid(op, format!("rank {}: peer is {peer}, expected a rank below {}", self.rank(), self.size())))
    }

    fn one_sided(&self) -> Result<(&Kernels, &Team)> {
        self.path.kernels().ok_or_else(|| Error::Unsupported {
            what: "one-sided messages".to_owned(),
            detail: format!("calls take the {} path ({}): send and receive instead", self.path(), self.path_reason()),
        })
    }

    fn unreached(&self, what: &str, peer: usize) -> Error {
        Error::Unsupported {
            what: "a one-sided message".to_owned(),
            detail: format!(
                "rank {} does not reach {what} of rank {peer}: register memory of cuMemAlloc (cudaMalloc), in the same call on all \
                 ranks",
                self.rank()
            ),
        }
    }
}

#[cfg(test)]
pub(crate) fn layouts() -> Vec<(String, usize)> {
    crate::kernels::mirrored!(Awaited as "Awaited" { of })
}
