//! The state of a communicator: one rank's membership.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tinynccl::Comm;
use tinynccl::cuda::DeviceComm;

use crate::abi::Status;
use crate::fault::{Fault, Result};
use crate::scaled::Operators;
use crate::windows::Windows;

/// Where a communicator is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Meeting the other ranks.
    Starting,
    /// Takes calls.
    Ready,
    /// It could not start, or a call has failed for good: [`Member::fault`].
    Failed,
    /// `ncclCommRevoke` was called.
    Revoked,
    /// `ncclCommFinalize` was called.
    Finalized,
    /// `ncclCommAbort` was called.
    Aborted,
}

impl Phase {
    const ALL: [Phase; 6] =
        [Phase::Starting, Phase::Ready, Phase::Failed, Phase::Revoked, Phase::Finalized, Phase::Aborted];
}

/// What a communicator that has started consists of.
#[derive(Debug)]
pub(crate) struct Ranks {
    /// For splits and exchanges.
    pub(crate) comm: Comm,
    /// For calls.
    pub(crate) device: Arc<DeviceComm>,
}

/// One rank's membership in a communicator.
#[derive(Debug)]
pub(crate) struct Member {
    /// For people: `commName` of the configuration, or a number.
    name: String,
    /// CUDA's number of the rank's GPU.
    ordinal: usize,
    /// Whether calls return only when they are done (`blocking` of the configuration).
    blocking: bool,
    /// Rank and size; of a split they are known when it is done.
    place: OnceLock<(usize, usize)>,
    ranks: OnceLock<Ranks>,
    phase: AtomicU8,
    /// Operations of the communicator that run in the background.
    under_way: AtomicU32,
    /// Ends the start, wherever it waits.
    stop: AtomicBool,
    fault: Mutex<Option<Fault>>,
    last_error: Mutex<Option<String>>,
    operators: Operators,
    windows: Windows,
}

impl Member {
    /// A communicator that meets the other ranks; `place` is rank and size, if known.
    pub(crate) fn starting(
        name: impl Into<String>,
        ordinal: usize,
        place: Option<(usize, usize)>,
        blocking: bool,
    ) -> Member {
        Member {
            name: name.into(),
            ordinal,
            blocking,
            place: place.map(OnceLock::from).unwrap_or_default(),
            ranks: OnceLock::new(),
            phase: AtomicU8::new(Phase::Starting as u8),
            under_way: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            fault: Mutex::new(None),
            last_error: Mutex::new(None),
            operators: Operators::default(),
            windows: Windows::default(),
        }
    }

    /// The operators that it has made.
    pub(crate) fn operators(&self) -> &Operators {
        &self.operators
    }

    /// Its registered buffers.
    pub(crate) fn windows(&self) -> &Windows {
        &self.windows
    }

    /// Where it is in its life.
    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Acquire))]
    }

    /// The name, for people.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// CUDA's number of the rank's GPU.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Whether calls return only when they are done.
    pub(crate) fn is_blocking(&self) -> bool {
        self.blocking
    }

    /// What it consists of, to make calls.
    ///
    /// # Errors
    /// `ncclInvalidArgument` while it is not ready, `ncclInvalidUsage` after revoke or finalize, its fault after a
    /// failure.
    #[inline]
    pub(crate) fn ranks(&self) -> Result<&Ranks> {
        match (self.phase(), self.ranks.get()) {
            (Phase::Ready, Some(ranks)) if self.under_way.load(Ordering::Acquire) == 0 => Ok(ranks),
            _ => Err(self.unready()),
        }
    }

    #[cold]
    fn unready(&self) -> Fault {
        let name = &self.name;
        match self.phase() {
            Phase::Starting | Phase::Ready => Fault::argument(format!(
                "communicator {name} is not ready: call ncclCommGetAsyncError until it gives another status than \
                 ncclInProgress"
            )),
            Phase::Failed => self.fault().unwrap_or_else(|| Fault::internal("failed without a cause")),
            Phase::Revoked => {
                Fault::usage(format!("communicator {name} has been revoked: split, shrink or destroy it"))
            }
            Phase::Finalized => Fault::usage(format!("communicator {name} has been finalized: destroy it")),
            Phase::Aborted => Fault::argument(format!("communicator {name} has been aborted: make a new one")),
        }
    }

    /// The device communicator, to make calls. Errors as [`Member::ranks`].
    #[inline]
    pub(crate) fn device(&self) -> Result<&Arc<DeviceComm>> {
        self.ranks().map(|ranks| &ranks.device)
    }

    /// Rank and size, once they are known.
    pub(crate) fn place(&self) -> Result<(usize, usize)> {
        self.place.get().copied().ok_or_else(|| self.unready())
    }

    /// Our rank.
    pub(crate) fn rank(&self) -> Result<usize> {
        self.place().map(|(rank, _)| rank)
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> Result<usize> {
        self.place().map(|(_, size)| size)
    }

    /// Why it failed, if it did.
    pub(crate) fn fault(&self) -> Option<Fault> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The status that `ncclCommGetAsyncError` gives, with the cause if it is a failure.
    pub(crate) fn async_error(&self) -> Result<Status> {
        match (self.phase(), self.ranks.get()) {
            (Phase::Failed, _) => Err(self.unready()),
            (Phase::Aborted, _) => Err(self.unready()),
            (Phase::Starting, _) => Ok(Status::InProgress),
            _ if self.under_way.load(Ordering::Acquire) > 0 => Ok(Status::InProgress),
            (Phase::Ready, Some(ranks)) => {
                ranks.device.check()?;
                Ok(Status::Success)
            }
            _ => Ok(Status::Success),
        }
    }

    /// Keeps the text of a failed call, for `ncclGetLastError`.
    pub(crate) fn keep_error(&self, text: &str) {
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
    }

    /// The text of the last failed call.
    pub(crate) fn error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
