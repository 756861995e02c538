//! The state of a communicator: one rank's membership.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tinynccl::cuda::DeviceComm;
use tinynccl::{Comm, Error};

use crate::abi::Status;
use crate::config::Options;
use crate::fault::{Fault, Result};
use crate::last_error;
use crate::scaled::Operators;
use crate::settings;
use crate::windows::Windows;

/// Stage in the life of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// In rendezvous with the other ranks.
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

/// Member table of a communicator, the same on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Roster {
    /// Random, the same on all ranks, and unknown to others.
    pub(crate) token: [u8; 32],
    /// Addresses of the acceptor of each rank's process, by rank.
    pub(crate) doors: Vec<Vec<SocketAddr>>,
}

/// Parts of a communicator that has started.
#[derive(Debug)]
pub(crate) struct Ranks {
    /// Communicator for calls. Dropped first: its teardown needs the other ranks within reach.
    pub(crate) device: Arc<DeviceComm>,
    /// Communicator of the hosts, for splits and exchanges.
    pub(crate) comm: Comm,
    /// Member table, for a rendezvous without the communicator.
    pub(crate) roster: Roster,
}

/// An operation of a communicator in the background.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Member>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One rank of a communicator.
#[derive(Debug)]
pub(crate) struct Member {
    /// Name for people: `commName` of the configuration, or the beginning of the token.
    name: OnceLock<String>,
    /// CUDA's number of the rank's GPU.
    ordinal: usize,
    options: Options,
    /// Rank and size; of a split they are known when it is done.
    place: OnceLock<(usize, usize)>,
    operators: Operators,
    /// Dropped before what they are registered with.
    windows: Windows,
    ranks: OnceLock<Ranks>,
    phase: AtomicU8,
    /// Operations of the communicator that run in the background.
    under_way: AtomicU32,
    /// Shrinks and grows so far: all ranks make them in the same order.
    meetings: AtomicU64,
    /// True from `ncclCommGetUniqueId` until the grow with that id.
    pub(crate) grows: AtomicBool,
    /// Ends the start, wherever it waits.
    stop: AtomicBool,
    /// The loss of a rank has been logged, and not reported.
    lost: AtomicBool,
    fault: Mutex<Option<Fault>>,
    last_error: Mutex<Option<String>>,
}

impl Member {
    /// A communicator whose rendezvous is to come; `place` is rank and size, if known.
    pub(crate) fn starting(options: Options, ordinal: usize, place: Option<(usize, usize)>) -> Member {
        Member {
            name: options.name.clone().map(OnceLock::from).unwrap_or_default(),
            ordinal,
            options,
            place: place.map(OnceLock::from).unwrap_or_default(),
            ranks: OnceLock::new(),
            phase: AtomicU8::new(Phase::Starting as u8),
            under_way: AtomicU32::new(0),
            meetings: AtomicU64::new(0),
            grows: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            fault: Mutex::new(None),
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

    /// The name, for people: the same on all ranks.
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

    /// Ends the start: takes the ranks and becomes ready, or fails with the error of the rendezvous.
    pub(crate) fn started(&self, outcome: Result<Ranks>) -> Result<()> {
        let ranks = outcome.inspect_err(|fault| self.fail(fault.clone()))?;
        let _ = self.place.set((ranks.comm.rank(), ranks.comm.size()));
        let device = ranks.device.clone();
        let _ = self.ranks.set(ranks);
        let ready =
            self.phase.compare_exchange(Phase::Starting as u8, Phase::Ready as u8, Ordering::AcqRel, Ordering::Acquire);
        if ready.is_err() {
            // Aborted meanwhile.
            device.abort();
            return Err(self.unready());
        }
        Ok(())
    }

    /// Keeps the first error; one that has not started fails for good.
    pub(crate) fn fail(&self, fault: Fault) {
        self.keep_error(&fault.text);
        last_error::anywhere(&fault.text);
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fault);
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

    /// Returns true once [`Member::stop`] was called.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Counts an operation in the background, until the returned value is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> UnderWay {
        self.under_way.fetch_add(1, Ordering::AcqRel);
        UnderWay(self.clone())
    }

    /// The number of the next shrink or grow.
    pub(crate) fn next_meeting(&self) -> u64 {
        self.meetings.fetch_add(1, Ordering::Relaxed)
    }

    /// Its parts in any phase; `None` before it has started.
    pub(crate) fn any_ranks(&self) -> Option<&Ranks> {
        self.ranks.get()
    }

    /// Its parts, to make other communicators from it: also after a revoke.
    ///
    /// # Errors
    /// As [`Member::ranks`].
    pub(crate) fn parent(&self) -> Result<&Ranks> {
        match (self.phase(), self.ranks.get()) {
            (Phase::Revoked, Some(ranks)) => Ok(ranks),
            _ => self.ranks(),
        }
    }

    /// Its parts, to make calls.
    ///
    /// # Errors
    /// `ncclInvalidArgument` while it is not ready, `ncclInvalidUsage` after revoke or finalize, its own error after a
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
        let name = self.name();
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

    /// The first error that it failed with, if any.
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
                match ranks.device.check_calls() {
                    Err(error) if self.awaits_abort(&ranks.device, &error) => return Ok(Status::Success),
                    checked => checked?,
                }
                // Of what was done in the background.
                self.fault().map_or(Ok(Status::Success), Err)
            }
            // Its last calls may have failed.
            (Phase::Finalized, _) => self.fault().map_or(Ok(Status::Success), Err),
            _ => Ok(Status::Success),
        }
    }

    /// True while the failure of another rank stays unreported, because the program will abort the communicator.
    fn awaits_abort(&self, device: &DeviceComm, error: &Error) -> bool {
        let remote = matches!(error, Error::PeerLost { .. } | Error::Aborted { .. });
        let within = |delay| device.failure_age().is_some_and(|age| age < delay);
        let awaits = remote && !self.is_blocking() && settings::abort_delay().is_some_and(within);
        if awaits && !self.lost.swap(true, Ordering::Relaxed) {
            log::warn!(
                "communicator {}: {error}; calls wait until the program aborts it (TORCH_NCCL_NONBLOCKING_TIMEOUT is set)",
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
    pub(crate) fn error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
