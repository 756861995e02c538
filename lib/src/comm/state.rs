//! What a communicator's threads share: identity, first failure, doorbell, published progress.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::attached::Attached;
use super::control::{Control, Notice, PeerHealth, Progress};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::executor::Supervisor;
use crate::fork::Origin;
use crate::trace::{self, Sink, Span, Tracer};
use crate::transport::Doorbell;
use crate::wire::{Collective, Header};

/// Why a peer that left in good order is missed.
const LEFT: &str = "it closed its communicator and left";

/// How long a link's error waits for the control plane to name the rank behind it, or to say that the peer has left.
const ROOT_CAUSE_GRACE: Duration = Duration::from_millis(1500);

/// Communicators of a rank that are looked at when it is late in one.
const MOST_COMMUNICATORS: usize = 32;

/// Locks, also after a panic of another holder: the data behind our locks is valid at every point.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shared state of one communicator in one process.
pub(crate) struct State {
    pub(crate) id: u32,
    pub(crate) rank: usize,
    /// World rank by communicator rank.
    pub(crate) members: Vec<usize>,
    pub(crate) config: Config,
    pub(crate) control: Arc<dyn Control>,
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) progress: Arc<Progress>,
    /// Where this communicator's events go, if anywhere.
    pub(crate) trace: Option<Arc<Tracer>>,
    /// Sleeps that their slice ended and no wake-up, though there was something.
    late_wakes: AtomicU64,
    /// The rank's process. In a child of it nothing here may be used.
    pub(crate) origin: Origin,
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    failure_set: Condvar,
    /// Told of the failure.
    attached: Mutex<Vec<Weak<dyn Attached>>>,
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
        let first = members.first().copied().unwrap_or(0);
        let state = Arc::new(State {
            id,
            rank,
            trace: sink.map(|sink| Tracer::new(sink, id, members.clone())),
            members,
            config,
            doorbell: Doorbell::new()?,
            progress: control.track(id, first),
            control,
            late_wakes: AtomicU64::new(0),
            origin: Origin::here(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            failure_set: Condvar::new(),
            attached: Mutex::default(),
        });
        // Weak: the control plane outlives the communicator.
        let weak = Arc::downgrade(&state);
        state.control.subscribe(Box::new(move |notice| {
            if let Some(state) = weak.upgrade() {
                state.notice(notice);
            }
        }));
        Ok(state)
    }

    /// How many wake-ups were lost.
    pub(crate) fn late_wakes(&self) -> u64 {
        self.late_wakes.load(Ordering::Relaxed)
    }

    /// Names something that the members do together. Communicators without a common rank may have the same number.
    pub(crate) fn key(&self, what: &str) -> String {
        format!("{what}-{}-{}", self.id, self.members.first().copied().unwrap_or(0))
    }

    /// Waits for a failure, at most for `limit`.
    pub(super) fn wait_for_failure(&self, limit: Duration) -> Option<Error> {
        let slot = lock(&self.failure);
        let (slot, _) = self
            .failure_set
            .wait_timeout_while(slot, limit, |slot| slot.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        slot.clone()
    }

    pub(super) fn member(&self, world: usize) -> Option<usize> {
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
            // Who holds the lock has not begun to wait, and would not hear.
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
        self.fail(error);
    }

    /// Records the first failure, wakes every waiter of this process and tells what is attached. Returns the first failure.
    pub(crate) fn fail(&self, error: Error) -> Error {
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

    /// Tells `one` of the failure, at once if there is one already.
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

    /// As [`State::fail`], and tells the other ranks.
    pub(crate) fn fail_everywhere(&self, error: Error) -> Error {
        let reason = error.to_string();
        let already = self.has_failed();
        let first = self.fail(error);
        if !already {
            self.control.abort(self.id, &reason);
        }
        first
    }

    /// Fails with `error`. A peer that is lost is often the second victim: the control plane has a moment to name the first. A
    /// rank that gives up says why before it says goodbye.
    pub(super) fn first_cause(&self, mut error: Error) -> Error {
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
    pub(crate) fn check(&self, op: impl FnOnce() -> String) -> Result<()> {
        if self.origin.is_here() && !self.has_failed() { Ok(()) } else { self.refuse(op()) }
    }

    #[cold]
    fn refuse(&self, op: String) -> Result<()> {
        // First: a lock may be held for ever in a child.
        self.origin.check(|| op.clone(), self.rank)?;
        match self.failure() {
            Some(error) => Err(error.for_later_call(op, self.rank)),
            None => Ok(()),
        }
    }

    /// Why a link is not to be waited for any longer.
    pub(crate) fn stopped(&self) -> Option<Error> {
        self.failure().or_else(|| crate::interrupt::asked_to_stop().then(|| self.stop("opening a link".to_owned())))
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

    /// As the store does not answer: the rank that runs it, unless it has left.
    fn without_store(&self, peers: &[usize], error: &Error) -> (Vec<usize>, String) {
        let host = self.control.store_host();
        if let Some(host) = host.filter(|&host| self.control.has_left(host)) {
            let detail = format!(
                "nothing came from it; what became of it is not known, as the rendezvous store has ended with rank {host} of the \
                 world, which has left"
            );
            return (peers.to_vec(), detail);
        }
        let host = host.and_then(|h| self.member(h));
        let missing = host.map_or_else(|| peers.to_vec(), |h| vec![h]);
        (missing, format!("the rendezvous store does not answer ({error}): is that rank stopped?"))
    }

    /// The ranks that are gone or give no sign of life, and what is known of them. One that has left in good order is
    /// missed if it is one of `peers`, which we wait for.
    fn absent(&self, health: &[PeerHealth], peers: &[usize]) -> Option<(Vec<usize>, String)> {
        let of = |rank: usize| health.get(self.members[rank]);
        let others = || (0..self.members.len()).filter(|&r| r != self.rank);
        let lost = |&r: &usize| of(r).is_some_and(|h| h.gone.is_some()) && (peers.contains(&r) || !self.has_left(r));
        let gone: Vec<usize> = others().filter(lost).collect();
        if !gone.is_empty() {
            let why = of(gone[0]).and_then(|h| h.gone.clone()).unwrap_or_default();
            return Some((gone, format!("gone: {why}")));
        }
        let limit = self.control.silence_limit();
        let silent: Vec<usize> =
            others().filter(|&r| of(r).is_some_and(|h| h.gone.is_none() && h.silent_for > limit)).collect();
        if !silent.is_empty() {
            let age = of(silent[0]).map(|h| h.silent_for).unwrap_or_default();
            return Some((silent, format!("no heartbeat for {age:.1?}: is the process stopped, or its host down?")));
        }
        None
    }

    /// The ranks that are absent, where the store or its silence says so. Takes two seconds at most.
    pub(crate) fn find_absent(&self, peers: &[usize]) -> Option<(Vec<usize>, String)> {
        match self.control.health(self.id) {
            Ok(health) => self.absent(&health, peers),
            Err(error) => Some(self.without_store(peers, &error)),
        }
    }

    /// The call of another communicator that one of `ranks` is in.
    fn elsewhere(&self, ranks: &[usize]) -> Option<String> {
        let next = self.control.ids().load(Ordering::Relaxed);
        (0..next).filter(|&comm| comm != self.id).take(MOST_COMMUNICATORS).find_map(|comm| {
            let health = self.control.health(comm).ok()?;
            ranks.iter().find_map(|&rank| {
                let progress = health.get(self.members[rank])?.progress.filter(|p| p.seq_started > p.seq_done)?;
                let call = self.op(&progress.call?.header(comm));
                Some(format!(
                    "rank {rank} is in {call} of communicator {comm}, we are in one of communicator {}: ranks that share several \
                     communicators must use them in the same order",
                    self.id
                ))
            })
        })
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

    /// The error for a call that waits for what the ranks tell each other before its first byte.
    pub(crate) fn not_all_came(&self, error: Error) -> Error {
        let error = self.of_members(error);
        let Error::Timeout { rank, waited, missing, detail, .. } = error else { return self.fail_everywhere(error) };
        let call = self.progress.snapshot().call.map(|call| self.op(&call.header(self.id)));
        let op = format!("{} of communicator {}", call.unwrap_or_else(|| "a call".to_owned()), self.id);
        let (missing, detail) = match self.find_absent(&missing) {
            Some(absent) => absent,
            None => {
                let elsewhere = self.elsewhere(&missing);
                (missing, elsewhere.unwrap_or(detail))
            }
        };
        self.fail_everywhere(Error::Timeout { op, rank, waited, missing, detail })
    }

    /// The ranks that keep us waiting, and what is known of them.
    fn diagnose(&self, header: &Header, peers: &[usize]) -> (Vec<usize>, String) {
        let health = match self.control.health(self.id) {
            Ok(health) => health,
            Err(error) => return self.without_store(peers, &error),
        };
        if let Some(absent) = self.absent(&health, peers) {
            return absent;
        }
        let of = |rank: usize| health.get(self.members[rank]);
        let others = || (0..self.members.len()).filter(|&r| r != self.rank);
        let limit = self.control.silence_limit();
        if header.collective != Collective::SendRecv as u8 {
            // What a rank that has left has done may not be known any more.
            let is_late = |r: usize, h: &PeerHealth| match h.progress {
                Some(_) => self.is_behind(h),
                None => !self.has_left(r),
            };
            let late: Vec<usize> = others().filter(|&r| of(r).is_some_and(|h| is_late(r, h))).collect();
            if let Some(&first) = late.first() {
                let detail = match late.iter().find(|&&r| self.has_left(r)) {
                    Some(rank) => format!("rank {rank}: {LEFT} without having made this call"),
                    None => self.elsewhere(&late).unwrap_or_else(|| {
                        let last = of(first).and_then(|h| h.progress?.call).map_or_else(
                            || "it has made none".to_owned(),
                            |call| format!("the last one of rank {first} is {}", call.header(self.id)),
                        );
                        format!(
                            "alive, but has not made this call ({last}): is it still computing, or on another path?"
                        )
                    }),
                };
                return (late, detail);
            }
        }
        // Of those that wait for a message: another one is in a collective that we are to make.
        let waits_for = |rank: usize| {
            let progress = of(rank)?.progress.filter(|p| p.seq_started == p.seq_done)?;
            self.member(progress.waiting_on?)
        };
        if header.collective == Collective::SendRecv as u8
            && let Some(circle) = circle(self.rank, peers, self.members.len(), waits_for)
        {
            let names: Vec<String> =
                circle.iter().skip(1).map(|rank| format!("rank {rank}, which waits for ")).collect();
            let detail = format!(
                "rank {ours} waits for {}rank {ours}: messages that cross belong into one group, or into send_recv",
                names.concat(),
                ours = self.rank
            );
            return (peers.to_vec(), detail);
        }
        // A relay that is no member of this communicator.
        for path in self.control.paths() {
            let ours = |&&peer: &&usize| {
                path.ends.contains(&self.members[self.rank]) && path.ends.contains(&self.members[peer])
            };
            let Some(&peer) = peers.iter().find(ours) else { continue };
            let state = |relay: &usize| {
                let health = health.get(*relay)?;
                let gone = health.gone.clone().map(|why| format!("rank {relay} of the world is gone: {why}"));
                let silent =
                    || (health.silent_for > limit).then(|| format!("no heartbeat from rank {relay} of the world"));
                gone.or_else(silent)
            };
            if let Some(why) = path.through.iter().find_map(state) {
                return (vec![peer], format!("{path}; {why}"));
            }
        }
        let theirs = peers.iter().find_map(|&rank| Some((rank, of(rank)?.progress?.call?.header(self.id))));
        let theirs =
            theirs.map_or_else(String::new, |(rank, call)| format!("; the last collective of rank {rank} is {call}"));
        let ours = Header { algorithm: Header::NO_ALGORITHM, ..*header };
        (
            peers.to_vec(),
            format!("alive, but nothing came from it: compare the calls of both ranks; we are in {ours}{theirs}"),
        )
    }
}

impl Supervisor for State {
    fn compare(&self) -> Result<()> {
        self.compare_calls()
    }

    fn failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
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

/// Ranks that wait for each other, from `rank` over one of `peers` back to `rank`.
fn circle(rank: usize, peers: &[usize], size: usize, waits_for: impl Fn(usize) -> Option<usize>) -> Option<Vec<usize>> {
    peers.iter().find_map(|&peer| {
        let mut circle = vec![rank, peer];
        while circle.len() <= size {
            match waits_for(*circle.last()?)? {
                next if next == rank => return Some(circle),
                next => circle.push(next),
            }
        }
        None
    })
}

impl Attached for State {
    fn failed(&self, error: &Error) {
        self.fail(error.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::circle;

    #[test]
    fn a_circle_leads_back_to_us_and_nothing_else_is_one() {
        let of = |waits: &'static [Option<usize>]| move |rank: usize| waits[rank];
        assert_eq!(circle(1, &[0], 2, of(&[Some(1), Some(0)])), Some(vec![1, 0]));
        assert_eq!(circle(0, &[2, 1], 3, of(&[Some(1), Some(2), Some(0)])), Some(vec![0, 2]));
        assert_eq!(circle(0, &[1], 3, of(&[Some(1), Some(2), Some(0)])), Some(vec![0, 1, 2]));
        assert_eq!(circle(0, &[1], 3, of(&[Some(1), None, Some(0)])), None, "rank 1 is at work");
        // A circle of others, and us behind it.
        assert_eq!(circle(0, &[1], 3, of(&[Some(1), Some(2), Some(1)])), None);
    }
}
