//! The path of a communicator's data, and the reason.

use std::fmt;
use std::time::Duration;

use cudarc::driver::sys;

use crate::checked::call::Round;
use crate::kernels::{Kernels, Team};
use crate::window::MAX_RANKS;
use tinynccl_comm::Comm;
use tinynccl_comm::RawCall;
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::CudaPath;

/// Stream of a call, and its sequence number among the calls of its communicator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) stream: sys::CUstream,
    pub(crate) number: u32,
}

impl Turn {
    /// Stream and number of the `i`-th call behind this one.
    pub(crate) fn after(self, i: u32) -> Turn {
        Turn { number: self.number.wrapping_add(i), ..self }
    }
}

/// Numbers of the last calls of which a path knows how far they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The last one that has begun: its stream has come to it.
    pub(crate) begun: Option<u32>,
    /// The last one that is over.
    pub(crate) finished: Option<u32>,
}

/// One path. Arguments and buffers have been checked, and calls come one at a time.
pub(crate) trait DataPath: fmt::Debug + Send + Sync {
    fn path(&self) -> Path;

    /// Memory that it takes on each rank.
    fn bytes(&self) -> usize;

    /// Makes ready what such a collective needs, so that [`DataPath::carry`] only launches.
    fn prepare(&self, _call: &RawCall, _choice: Choice) -> Result<()> {
        Ok(())
    }

    /// Makes ready what messages need, so that enqueuing them only launches. `long` are the other
    /// ends of those that need slots.
    fn prepare_messages(&self, _long: &[usize]) -> Result<()> {
        Ok(())
    }

    /// Enqueues a collective of several ranks.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`](crate::DeviceComm::enqueue).
    unsafe fn carry(&self, turn: Turn, call: &RawCall, choice: Choice) -> Result<()>;

    /// Returns true if one launch may carry such a call and others.
    fn fuses(&self, _call: &RawCall, _choice: Choice) -> bool {
        false
    }

    /// Makes ready what launches of several of such calls need.
    fn prepare_fused(&self, _calls: &[&RawCall]) -> Result<()> {
        Ok(())
    }

    /// Enqueues several such calls, in one launch where the path can; `turn` belongs to the first.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`](crate::DeviceComm::enqueue), for each; and no output may overlap a buffer of
    /// another.
    unsafe fn carry_fused(&self, turn: Turn, calls: &[(RawCall, Choice)]) -> Result<()> {
        // SAFETY: forwarded from the caller.
        calls.iter().zip(0..).try_for_each(|((call, choice), i)| unsafe { self.carry(turn.after(i), call, *choice) })
    }

    /// Enqueues a message at least, and the copy beside it if there is one. Kernels compare the signature of `call`.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue_send_recv`](crate::DeviceComm::enqueue_send_recv), and for the copy's two buffers.
    unsafe fn carry_round(&self, turn: Turn, call: &RawCall, round: Round) -> Result<()>;

    /// For kernels that reach the other ranks' memory; `None` if none do.
    fn kernels(&self) -> Option<(&Kernels, &Team)> {
        None
    }

    /// The failure of an earlier call, if one has failed. `host` knows of ranks that are gone, and notifies the others.
    fn check(&self, host: Option<&Comm>) -> Result<()>;

    /// [`DataPath::check`] before a call is made: without the failures that hold calls.
    fn admit(&self, host: Option<&Comm>) -> Result<()> {
        self.check(host)
    }

    /// Returns true if a failure ended a call of this rank early; known once the streams have run their calls.
    fn cut_short(&self) -> bool {
        false
    }

    /// Ends waiting calls; later ones give `error`.
    fn abort(&self, error: Error);

    /// Ends waiting calls as the failure of another rank does, which may hold them instead ([`DataPath::set_hold`]).
    fn hear(&self, error: &Error) {
        self.abort(error.clone());
    }

    /// Enqueues, behind a wait that a failure may have released, what keeps the calls behind it from passing on data
    /// that did not come.
    ///
    /// # Safety
    /// `stream` must be a stream of this context.
    unsafe fn guard(&self, _stream: sys::CUstream) -> Result<()> {
        Ok(())
    }

    /// Sets if calls that wait go on doing so when another rank fails
    /// ([`CudaFailure`](tinynccl_sys::config::CudaFailure)). With `false`, calls that wait for a rank that has failed
    /// end now. Returns the value before.
    fn set_hold(&self, _hold: bool) -> bool {
        false
    }

    /// Time since the failure that [`DataPath::check`] gives; `None` without one.
    fn failure_age(&self) -> Option<Duration> {
        None
    }

    /// Returns how far the calls are, where that is known. It may ask the device, and waits for it at most a second.
    fn progress(&self) -> Progress {
        Progress::default()
    }
}

/// Why the peer path is not even tried; `None` if it is.
pub(crate) fn obstacle(asked: CudaPath, one_host: bool, ranks: usize) -> Option<String> {
    match asked {
        CudaPath::Hosted => Some("TINYNCCL_CUDA_PATH=hosted requests it".to_owned()),
        _ if !one_host => Some("the ranks are on several hosts".to_owned()),
        _ if ranks > MAX_RANKS => Some(format!("there are {ranks} ranks, and kernels join {MAX_RANKS} at most")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peers_memory_is_tried_where_it_may_work() {
        for asked in [CudaPath::Auto, CudaPath::Peer] {
            assert_eq!(obstacle(asked, true, MAX_RANKS), None);
            assert!(obstacle(asked, true, MAX_RANKS + 1).unwrap().contains("9 ranks"));
            assert!(obstacle(asked, false, 2).unwrap().contains("several hosts"));
        }
        assert!(obstacle(CudaPath::Hosted, true, 2).unwrap().contains("TINYNCCL_CUDA_PATH"));
    }
}
