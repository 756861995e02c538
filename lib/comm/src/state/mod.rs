//! State that a communicator's threads share: identity, first failure, doorbell, published progress.

pub(crate) mod control;
mod diagnose;
pub(crate) mod failure;
pub(crate) mod home;
pub(crate) mod numbers;
mod settle;
pub(crate) mod shown;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, OnceLock, PoisonError, Weak};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::executor::Supervisor;
use crate::trace::{self, Sink, Span, Tracer};
use control::{Control, Notice, Progress, exchange};
use failure::{Attached, Recorder};
use shown::Shown;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Collective, Header};
use tinynccl_sys::config::Config;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;
use tinynccl_transport::Doorbell;
use tinynccl_transport::mapping::Mapping;

/// The error text for a peer that left in order but is still waited for.
const LEFT: &str = "it closed its communicator and left";

/// Longest wait of a link's error for the control plane to name the failed rank, or to report that the peer has left.
const ROOT_CAUSE_GRACE: Duration = Duration::from_millis(1500);

/// Shared state of one communicator in one process.
pub struct State {
    /// Number of the communicator, equal on all ranks: 0 is the world.
    pub id: u32,
    pub(crate) rank: usize,
    /// World rank by communicator rank.
    pub members: Vec<usize>,
    pub(crate) config: Config,
    pub(crate) control: Arc<dyn Control>,
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) progress: Arc<Progress>,
    /// Recorder of this communicator's events; `None` if they are not traced.
    pub trace: Option<Arc<Tracer>>,
    pub(crate) shown: Shown,
    /// Sleeps that lasted their whole slice although a message had arrived.
    late_wakes: AtomicU64,
    /// The rank's process. In a child of it nothing here may be used.
    pub origin: Origin,
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    failure_set: Condvar,
    /// Notified of the failure.
    attached: Mutex<Vec<Weak<dyn Attached>>>,
    recorder: OnceLock<Recorder>,
    recorded: Once,
}

impl State {
    pub(crate) fn new(
        id: u32,
        rank: usize,
        members: Vec<usize>,
        config: Config,
        control: Arc<dyn Control>,
        sink: Option<Arc<Sink>>,
    ) -> Result<Arc<State>> {
        let progress = control.track(id);
        progress.ranks.store(members.len() as u32, Ordering::Relaxed);
        let state = Arc::new(State {
            id,
            rank,
            trace: sink.map(|sink| Tracer::new(sink, id, members.clone())),
            members,
            config,
            shown: Shown::default(),
            doorbell: Doorbell::new()?,
            progress,
            control,
            late_wakes: AtomicU64::new(0),
            origin: Origin::here(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            failure_set: Condvar::new(),
            attached: Mutex::default(),
            recorder: OnceLock::new(),
            recorded: Once::new(),
        });
        // Weak: the control plane outlives the communicator.
        let weak = Arc::downgrade(&state);
        let hear = move |notice: &Notice| {
            if let Some(state) = weak.upgrade() {
                state.notice(notice);
            }
        };
        state.control.subscribe(id, Box::new(hear));
        Ok(state)
    }

    /// Wake-ups lost so far.
    pub(crate) fn late_wakes(&self) -> u64 {
        self.late_wakes.load(Ordering::Relaxed)
    }

    /// Names something that the members do together.
    pub(crate) fn key(&self, what: &str) -> String {
        format!("{what}-{}", self.id)
    }

    /// Every member's value, by rank; once per `what`. A failure of the communicator ends the wait.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(&self, what: &str, value: &T) -> Result<Vec<T>> {
        let _meets = self.shown.meets(what);
        let values = exchange(&*self.control, &self.key(what), &self.members, value, &|| self.has_failed());
        values.map_err(|error| self.exchange_failed(what, error))
    }

    /// Memory that all members, ranks of this host, map, as [`control::Sharing::share`].
    pub(crate) fn share(&self, key: &str, bytes: usize) -> Result<Option<Arc<Mapping>>> {
        self.control.share(key, &self.members, bytes, &|| self.has_failed())
    }

    /// The error of an exchange. The communicator's own failure says more than that it ended the wait.
    pub(crate) fn exchange_failed(&self, what: &str, error: Error) -> Error {
        self.check(|| what.to_owned()).err().unwrap_or_else(|| self.of_members(error))
    }

    /// Waits for a failure, at most for `limit`.
    pub(crate) fn wait_for_failure(&self, limit: Duration) -> Option<Error> {
        let slot = lock(&self.failure);
        let (slot, _) = self
            .failure_set
            .wait_timeout_while(slot, limit, |slot| slot.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        slot.clone()
    }

    pub(crate) fn member(&self, world: usize) -> Option<usize> {
        self.members.iter().position(|&m| m == world)
    }

    fn notice(&self, notice: &Notice) {
        let error = match notice {
            Notice::Lost { rank, detail } => match self.member(*rank) {
                Some(peer) => Error::PeerLost {
                    op: "communicator".to_owned(),
                    rank: self.rank,
                    peer,
                    address: "reported by the rendezvous store".to_owned(),
                    detail: detail.clone(),
                },
                None => return,
            },
            Notice::Abort { from, comm, reason } if *comm == self.id => match self.member(*from) {
                Some(peer) => Error::Aborted {
                    op: "communicator".to_owned(),
                    rank: self.rank,
                    reason: format!("rank {peer}: {reason}"),
                },
                None => return,
            },
            Notice::Abort { .. } => return,
            // A thread that holds the lock has not begun to wait and would miss the notification.
            Notice::Left => {
                drop(lock(&self.failure));
                return self.failure_set.notify_all();
            }
            Notice::Disagree(disagreement) => match self.mismatch_of(disagreement) {
                Some(error) => error,
                None => return,
            },
            Notice::StoreLost { detail } => match self.control.store_host().and_then(|host| self.member(host)) {
                Some(peer) => Error::PeerLost {
                    op: "communicator".to_owned(),
                    rank: self.rank,
                    peer,
                    address: "host of the rendezvous store".to_owned(),
                    detail: detail.clone(),
                },
                None => Error::Bootstrap { address: "rendezvous store".to_owned(), detail: detail.clone() },
            },
        };
        self.hear(error);
    }

    /// [`State::set_failure`] in a thread that must not wait for the record: it carries the heartbeats, or another
    /// rank's call.
    fn hear(&self, error: Error) {
        self.set_failure(error);
        if let Some(recorder) = self.recorder.get() {
            (recorder.wake)();
        }
    }

    /// [`State::set_failure`], and writes the record.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let first = self.set_failure(error);
        self.record();
        first
    }

    /// Notes the first failure, wakes every waiter of this process and notifies attached components. Returns the
    /// first failure.
    fn set_failure(&self, error: Error) -> Error {
        let mut slot = lock(&self.failure);
        let first = slot.get_or_insert(error).clone();
        self.failed.store(true, Ordering::Release);
        let attached = std::mem::take(&mut *lock(&self.attached));
        drop(slot);
        self.failure_set.notify_all();
        self.doorbell.ring();
        for one in attached.iter().filter_map(Weak::upgrade) {
            one.failed(&first);
        }
        first
    }

    /// Notifies `one` of the failure, at once if there is one already.
    pub(crate) fn attach(&self, one: Weak<dyn Attached>) {
        let slot = lock(&self.failure);
        let Some(error) = slot.clone() else {
            let mut attached = lock(&self.attached);
            attached.retain(|other| other.strong_count() > 0);
            return attached.push(one);
        };
        drop(slot);
        if let Some(one) = one.upgrade() {
            one.failed(&error);
        }
    }

    /// As [`State::fail`], and notifies the other ranks.
    pub fn fail_everywhere(&self, error: Error) -> Error {
        let reason = error.to_string();
        let already = self.has_failed();
        let first = self.set_failure(error);
        if !already {
            self.control.abort(self.id, &reason);
        }
        self.record();
        first
    }

    /// Fails with `error`. A lost peer is often a consequence of an earlier failure, so the control plane gets a moment
    /// to name the first failed rank. A rank that fails reports the reason before its goodbye.
    pub(crate) fn first_cause(&self, mut error: Error) -> Error {
        if let Error::PeerLost { peer, detail, .. } = &mut error {
            let unknown = |slot: &mut Option<Error>| slot.is_none() && !self.has_left(*peer);
            let slot = lock(&self.failure);
            let waited = self.failure_set.wait_timeout_while(slot, ROOT_CAUSE_GRACE, unknown);
            let (slot, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some(first) = slot.clone() {
                return first;
            }
            if self.has_left(*peer) {
                *detail = LEFT.to_owned();
            }
        }
        self.fail_everywhere(error)
    }

    /// Why `op` cannot be done: the failure, if there is one, or that this is a child of the rank's process.
    #[inline]
    pub fn check(&self, op: impl FnOnce() -> String) -> Result<()> {
        if self.origin.is_here() && !self.has_failed() { Ok(()) } else { self.refuse(op()) }
    }

    #[cold]
    fn refuse(&self, op: String) -> Result<()> {
        // First: a lock may be held forever in a child.
        self.origin.check(|| op.clone(), self.rank)?;
        match self.failure() {
            Some(error) => Err(error.for_later_call(op, self.rank)),
            None => Ok(()),
        }
    }

    /// The error that ends the wait for a link.
    pub(crate) fn stopped(&self) -> Option<Error> {
        self.failure()
            .or_else(|| tinynccl_sys::interrupt::asked_to_stop().then(|| self.stop("opening a link".to_owned())))
    }

    fn stop(&self, op: String) -> Error {
        let reason = format!("rank {}: interrupted", self.rank);
        self.fail_everywhere(Error::Aborted { op, rank: self.rank, reason })
    }

    fn op(&self, header: &Header) -> String {
        match Collective::from_code(header.collective) {
            Some(c) => format!("{c} #{}", header.seq),
            None => format!("call #{}", header.seq),
        }
    }

    /// An error of the control plane, which counts in the world's ranks, in ours.
    pub(crate) fn of_members(&self, error: Error) -> Error {
        let rank = self.rank;
        match error {
            Error::PeerLost { op, peer, address, detail, .. } => match self.member(peer) {
                Some(peer) => Error::PeerLost { op, rank, peer, address, detail },
                None => Error::Bootstrap { address, detail: format!("rank {peer} of the world is lost: {detail}") },
            },
            Error::Timeout { op, waited, missing, detail, .. } => {
                let missing = missing.iter().filter_map(|&world| self.member(world)).collect();
                Error::Timeout { op, rank, waited, missing, detail }
            }
            other => other,
        }
    }
}

impl Supervisor for State {
    fn compare(&self) -> Result<()> {
        self.compare_calls()
    }

    fn failure(&self) -> Option<Error> {
        let failure = self.first_failure();
        if failure.is_some() {
            self.record();
        }
        failure
    }

    #[inline]
    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn doorbell(&self) -> RawFd {
        self.doorbell.fd()
    }

    fn silence(&self) {
        self.doorbell.drain();
    }

    fn woke_late(&self, peer: usize, slept: Duration) {
        if self.late_wakes.fetch_add(1, Ordering::Relaxed) == 0 {
            log::warn!(
                "rank {}: what rank {peer} sent was found after {slept:.1?} of sleep without a wake-up; later ones are only counted \
                 (Comm::census, late_wakes)",
                self.rank
            );
        }
        if let Some(trace) = &self.trace {
            trace.span(trace::now().saturating_sub(slept.as_nanos() as u64), Span::LateWake { peer: peer as u32 });
        }
    }

    fn waiting_on(&self, peer: Option<usize>) {
        self.progress.wait_on(peer.map(|p| self.members[p]));
    }

    fn timed_out(&self, header: &Header, peers: &[usize], waited: Duration) -> Error {
        let (missing, detail) = self.diagnose(header, peers);
        if let Some(error) = self.failure() {
            return error;
        }
        self.fail_everywhere(Error::Timeout { op: self.op(header), rank: self.rank, waited, missing, detail })
    }

    fn explain(&self, header: &Header, error: Error) -> Error {
        let Error::PeerLost { peer, address, detail, .. } = error else {
            return self.fail_everywhere(error);
        };
        let peer = self.member(peer).unwrap_or(peer);
        self.first_cause(Error::PeerLost { op: self.op(header), rank: self.rank, peer, address, detail })
    }

    fn has_left(&self, peer: usize) -> bool {
        self.control.has_left(self.members[peer])
    }

    fn left(&self, header: &Header, peer: usize) -> Error {
        self.fail_everywhere(Error::PeerLost {
            op: self.op(header),
            rank: self.rank,
            peer,
            address: "shared memory".to_owned(),
            detail: LEFT.to_owned(),
        })
    }

    fn interrupted(&self, header: &Header) -> Error {
        self.stop(self.op(header))
    }

    fn mismatch(&self, peer: usize, ours: Header, theirs: Header) -> Error {
        // The first call that differs may be one before.
        let earlier = ours.seq != theirs.seq || ours.is_same_call(&theirs);
        let collectives = [ours, theirs].iter().all(|call| call.collective != Collective::SendRecv as u8);
        if earlier
            && collectives
            && let Some(error) = self.find_mismatch()
        {
            return error;
        }
        self.fail_everywhere(Error::Mismatch { rank: self.rank, peer, ours: Box::new(ours), theirs: Box::new(theirs) })
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // In a forked child a lock may be held forever.
        if self.origin.is_here() {
            self.control.forget(self.id, &self.members);
        }
    }
}

impl Attached for State {
    fn failed(&self, error: &Error) {
        self.hear(error.clone());
    }
}
