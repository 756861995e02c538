//! One rank's state of a communicator.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tinynccl::Comm;
use tinynccl::cuda::DeviceComm;

use super::operators::Operators;
use super::registered::Windows;
use crate::abi::Status;
use crate::abi::config::Options;
use crate::abi::error::{Error, Result};
use crate::abi::last_error;
use crate::env::settings;

/// Stage in the life of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// In rendezvous with the other ranks.
    Starting,
    /// Takes calls.
    Ready,
    /// It could not start, or a call has failed for good: [`Communicator::failure`].
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

/// Table of a communicator's ranks, the same on all of them.
#[derive(Debug, Clone)]
pub(crate) struct Roster {
    /// Random, the same on all ranks, and unknown to others.
    pub(crate) token: [u8; 32],
    /// Addresses of the listener of each rank's process, by rank.
    pub(crate) listeners: Vec<Vec<SocketAddr>>,
}

/// Parts of a communicator that has started.
#[derive(Debug)]
pub(crate) struct Connected {
    /// Communicator for calls. Dropped first: its teardown needs the other ranks within reach.
    pub(crate) device: Arc<DeviceComm>,
    /// Communicator of the hosts, for splits and exchanges.
    pub(crate) host: Comm,
    /// Table of the ranks, for a rendezvous without the communicator.
    pub(crate) roster: Roster,
}

/// An operation of a communicator in the background.
#[derive(Debug)]
pub(crate) struct Pending(Arc<Communicator>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One rank of a communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    /// Name in logs and errors: `commName` of the configuration, or the beginning of the token.
    name: OnceLock<String>,
    /// CUDA's number of the rank's GPU.
    ordinal: usize,
    options: Options,
    /// Rank and size; of a split they are known when it is done.
    rank_and_size: OnceLock<(usize, usize)>,
    operators: Operators,
    /// Dropped before what they are registered with.
    windows: Windows,
    connected: OnceLock<Connected>,
    phase: AtomicU8,
    /// Operations of the communicator that run in the background.
    pending: AtomicU32,
    /// Communicators made from this one by shrink and grow: all ranks make them in the same order.
    derived: AtomicU64,
    /// True from `ncclCommGetUniqueId` until the grow with that id.
    pub(crate) has_grow_id: AtomicBool,
    /// Ends the start, wherever it waits.
    stop: AtomicBool,
    /// True once the loss of a rank has been logged, and not reported.
    loss_logged: AtomicBool,
    failure: Mutex<Option<Error>>,
    last_error: Mutex<Option<String>>,
}

impl Communicator {
    /// Makes a communicator before its rendezvous; `rank_and_size` if they are known.
    pub(crate) fn starting(options: Options, ordinal: usize, rank_and_size: Option<(usize, usize)>) -> Communicator {
        Communicator {
            name: options.name.clone().map(OnceLock::from).unwrap_or_default(),
            ordinal,
            options,
            rank_and_size: rank_and_size.map(OnceLock::from).unwrap_or_default(),
            connected: OnceLock::new(),
            phase: AtomicU8::new(Phase::Starting as u8),
            pending: AtomicU32::new(0),
            derived: AtomicU64::new(0),
            has_grow_id: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            loss_logged: AtomicBool::new(false),
            failure: Mutex::new(None),
            last_error: Mutex::new(None),
            operators: Operators::default(),
            windows: Windows::default(),
        }
    }

    /// The custom operators of the communicator.
    pub(crate) fn operators(&self) -> &Operators {
        &self.operators
    }

    /// Its registered buffers.
    pub(crate) fn windows(&self) -> &Windows {
        &self.windows
    }

    /// The current phase.
    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Acquire))]
    }

    /// Returns the name in logs and errors, the same on all ranks.
    pub(crate) fn name(&self) -> &str {
        self.name.get().map_or("(starting)", String::as_str)
    }

    /// Names the communicator after its token, unless the configuration has given a name.
    pub(crate) fn identify(&self, token: &[u8; 32]) {
        let [a, b, c, d, ..] = token;
        let _ = self.name.set(format!("{a:02x}{b:02x}{c:02x}{d:02x}"));
    }

    /// CUDA's number of the rank's GPU.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns true if calls return only when they are done.
    pub(crate) fn is_blocking(&self) -> bool {
        self.options.blocking
    }

    /// The options of its configuration.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Ends the start: becomes ready with these parts, or fails with the error of the rendezvous.
    pub(crate) fn started(&self, outcome: Result<Connected>) -> Result<()> {
        let connected = outcome.inspect_err(|error| self.fail(error.clone()))?;
        let _ = self.rank_and_size.set((connected.host.rank(), connected.host.size()));
        let device = connected.device.clone();
        let _ = self.connected.set(connected);
        let ready =
            self.phase.compare_exchange(Phase::Starting as u8, Phase::Ready as u8, Ordering::AcqRel, Ordering::Acquire);
        if ready.is_err() {
            // Aborted meanwhile.
            device.abort();
            return Err(self.not_ready());
        }
        Ok(())
    }

    /// Keeps the first error; one that has not started fails for good.
    pub(crate) fn fail(&self, error: Error) {
        self.keep_error(&error.text);
        last_error::anywhere(&error.text);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        let starting = Phase::Starting as u8;
        let _ = self.phase.compare_exchange(starting, Phase::Failed as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Sets the phase, unless it is already a later one: what ends in the background undoes no abort.
    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
    }

    /// Ends its start as soon as possible.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Returns true once [`Communicator::stop`] was called.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Counts an operation in the background, until the returned value is dropped.
    pub(crate) fn begin_operation(self: &Arc<Self>) -> Pending {
        self.pending.fetch_add(1, Ordering::AcqRel);
        Pending(self.clone())
    }

    /// The number of the next shrink or grow.
    pub(crate) fn next_derived(&self) -> u64 {
        self.derived.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns its parts in any phase; `None` before it has started.
    pub(crate) fn connected(&self) -> Option<&Connected> {
        self.connected.get()
    }

    /// Returns its parts, to make other communicators from it: also after a revoke.
    ///
    /// # Errors
    /// As [`Communicator::ready`].
    pub(crate) fn parent(&self) -> Result<&Connected> {
        match (self.phase(), self.connected.get()) {
            (Phase::Revoked, Some(connected)) => Ok(connected),
            _ => self.ready(),
        }
    }

    /// Returns its parts, to make calls.
    ///
    /// # Errors
    /// `ncclInvalidArgument` while it is not ready, `ncclInvalidUsage` after revoke or finalize, its own error after a
    /// failure.
    #[inline]
    pub(crate) fn ready(&self) -> Result<&Connected> {
        match (self.phase(), self.connected.get()) {
            (Phase::Ready, Some(connected)) if self.pending.load(Ordering::Acquire) == 0 => Ok(connected),
            _ => Err(self.not_ready()),
        }
    }

    #[cold]
    fn not_ready(&self) -> Error {
        let name = self.name();
        match self.phase() {
            Phase::Starting | Phase::Ready => Error::argument(format!(
                "communicator {name} is not ready: call ncclCommGetAsyncError until it gives another status than \
                 ncclInProgress"
            )),
            Phase::Failed => self.failure().unwrap_or_else(|| Error::internal("failed without a cause")),
            Phase::Revoked => {
                Error::usage(format!("communicator {name} has been revoked: split, shrink or destroy it"))
            }
            Phase::Finalized => Error::usage(format!("communicator {name} has been finalized: destroy it")),
            Phase::Aborted => Error::argument(format!("communicator {name} has been aborted: make a new one")),
        }
    }

    /// The device communicator, to make calls. Errors as [`Communicator::ready`].
    #[inline]
    pub(crate) fn device(&self) -> Result<&Arc<DeviceComm>> {
        self.ready().map(|ready| &ready.device)
    }

    /// Rank and size, once they are known.
    pub(crate) fn rank_and_size(&self) -> Result<(usize, usize)> {
        self.rank_and_size.get().copied().ok_or_else(|| self.not_ready())
    }

    /// Our rank.
    pub(crate) fn rank(&self) -> Result<usize> {
        self.rank_and_size().map(|(rank, _)| rank)
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> Result<usize> {
        self.rank_and_size().map(|(_, size)| size)
    }

    /// The first error that it failed with, if any.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The status that `ncclCommGetAsyncError` gives, with the cause if it is a failure.
    pub(crate) fn async_error(&self) -> Result<Status> {
        match (self.phase(), self.connected.get()) {
            (Phase::Failed, _) => Err(self.not_ready()),
            (Phase::Aborted, _) => Err(self.not_ready()),
            (Phase::Starting, _) => Ok(Status::InProgress),
            _ if self.pending.load(Ordering::Acquire) > 0 => Ok(Status::InProgress),
            (Phase::Ready, Some(connected)) => {
                match connected.device.check_calls() {
                    Err(error) if self.awaits_abort(&connected.device, &error) => return Ok(Status::Success),
                    checked => checked?,
                }
                // Of what was done in the background.
                self.failure().map_or(Ok(Status::Success), Err)
            }
            // Its last calls may have failed.
            (Phase::Finalized, _) => self.failure().map_or(Ok(Status::Success), Err),
            _ => Ok(Status::Success),
        }
    }

    /// True while the failure of another rank stays unreported, because the program will abort the communicator.
    fn awaits_abort(&self, device: &DeviceComm, error: &tinynccl::Error) -> bool {
        let remote = matches!(error, tinynccl::Error::PeerLost { .. } | tinynccl::Error::Aborted { .. });
        let within = |delay| device.failure_age().is_some_and(|age| age < delay);
        let awaits = remote && !self.is_blocking() && settings::abort_delay().is_some_and(within);
        if awaits && !self.loss_logged.swap(true, Ordering::Relaxed) {
            log::warn!(
                "communicator {}: {error}; calls wait until the program aborts it (TORCH_NCCL_NONBLOCKING_TIMEOUT is \
                 set)",
                self.name()
            );
        }
        awaits
    }

    /// Keeps the text of a failed call, for `ncclGetLastError`.
    pub(crate) fn keep_error(&self, text: &str) {
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
    }

    /// The text of the last failed call.
    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
