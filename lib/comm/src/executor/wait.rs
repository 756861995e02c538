//! Waiting while no lane can advance: spin, yield, sleep, and give up.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::Blocked;
use super::links::Links;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;
use tinynccl_sys::backoff::{Backoff, Phase, SLICE};
use tinynccl_sys::interrupt::asked_to_stop;

/// The communicator as the executor sees it: the source of aborts, and of reports about other ranks.
pub trait Supervisor {
    /// The communicator's failure, if it has failed already.
    fn failure(&self) -> Option<Error>;
    /// True when [`Supervisor::failure`] would give an error. Cheap: called in every iteration of a spin loop.
    fn has_failed(&self) -> bool;
    /// Fails with [`Supervisor::failure`], if there is one.
    fn alive(&self) -> Result<()> {
        if self.has_failed() { self.failure().map_or(Ok(()), Err) } else { Ok(()) }
    }
    /// Fails if ranks are known to have made different calls. Called when a wait gets long.
    fn compare(&self) -> Result<()> {
        Ok(())
    }
    /// Descriptor that becomes readable when the doorbell rings.
    fn doorbell(&self) -> RawFd;
    /// Empties the doorbell.
    fn silence(&self);
    /// A message of `peer` was found after a whole slice of sleep without a ring: a wake-up was lost.
    fn woke_late(&self, peer: usize, slept: Duration);
    /// Publishes which rank we are waiting for (`None`: moving again).
    fn waiting_on(&self, peer: Option<usize>);
    /// The error to give when nothing moved for `waited` while waiting for `peers`.
    fn timed_out(&self, header: &Header, peers: &[usize], waited: Duration) -> Error;
    /// The error to give for a link's error: the first cause, when another rank's failure is behind it.
    fn explain(&self, header: &Header, error: Error) -> Error;
    /// True once `peer` has left in order.
    fn has_left(&self, peer: usize) -> bool;
    /// The error to give when `peer`, which is awaited, has left.
    fn left(&self, header: &Header, peer: usize) -> Error;
    /// The error to give when the caller wants this thread's call to end ([`tinynccl_sys::interrupt`]).
    fn interrupted(&self, header: &Header) -> Error;
    /// The error for a message of another call.
    fn mismatch(&self, peer: usize, ours: Header, theirs: Header) -> Error;
}

/// Phases of a wait, and their lengths.
#[derive(Debug, Clone, Copy)]
pub struct WaitPolicy {
    /// Iterations of the spin loop between two clock readings. At each reading every link is polled, a system call over
    /// TCP.
    pub(crate) turns: u32,
    /// Lengths of spinning and yielding.
    pub backoff: Backoff,
    /// Time without any movement after which the wait fails. After the yields it sleeps.
    pub(crate) deadline: Duration,
}

/// Longest delay of the ring for a message that was found at the end of a slice.
const LATE: Duration = Duration::from_millis(1);
/// A wait as long as this may be for a rank that makes a different call.
const DOUBT: Duration = Duration::from_millis(20);

/// Busy iterations between two polls of the links that no lane waits for: over TCP each poll costs a system call, and
/// the awaited rank may need this core.
const OTHERS: u32 = 8;

/// A wait, apart from what it waits for.
pub struct Waiter<'a> {
    supervisor: &'a dyn Supervisor,
    policy: &'a WaitPolicy,
    turns: u32,
    since: Option<Instant>,
    announced: bool,
}

impl<'a> Waiter<'a> {
    pub(crate) fn new(supervisor: &'a dyn Supervisor, policy: &'a WaitPolicy) -> Self {
        Waiter { supervisor, policy, turns: 0, since: None, announced: false }
    }

    /// Something moved.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.turns = 0;
        if self.since.is_some() {
            self.since = None;
            if std::mem::take(&mut self.announced) {
                self.supervisor.waiting_on(None);
            }
        }
    }

    /// True when the clock is to be read; else one iteration is over.
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        self.turns += 1;
        if self.turns < self.policy.turns {
            std::hint::spin_loop();
            return false;
        }
        self.turns = 0;
        true
    }

    /// Spends an iteration; returns the phase, and the time without movement.
    pub(crate) fn pause(&mut self) -> (Phase, Duration) {
        let now = Instant::now();
        let waited = now.duration_since(*self.since.get_or_insert(now));
        (self.policy.backoff.pause(waited), waited)
    }

    /// A wait gets long: publishes the awaited rank, and compares the calls.
    pub(crate) fn announce(&mut self, peer: Option<usize>, waited: Duration) -> Result<()> {
        if !self.announced {
            self.announced = true;
            self.supervisor.waiting_on(peer);
        }
        if waited >= DOUBT { self.supervisor.compare() } else { Ok(()) }
    }

    /// Longest sleep of a call that has waited for `peers` in vain; fails at the deadline, and when it is to end.
    pub(crate) fn slice(&self, header: &Header, peers: &[usize], waited: Duration) -> Result<Duration> {
        if waited >= self.policy.deadline {
            return Err(self.supervisor.timed_out(header, peers, waited));
        }
        if asked_to_stop() {
            return Err(self.supervisor.interrupted(header));
        }
        Ok(SLICE.min(self.policy.deadline - waited))
    }
}

/// The wait of a run for its links.
pub(super) struct LinkWaiter<'a> {
    waiter: Waiter<'a>,
    /// Clock readings so far.
    looks: u32,
    phase: Phase,
    /// Bytes over all links at the last check.
    bytes: u64,
}

impl<'a> LinkWaiter<'a> {
    pub(super) fn new(supervisor: &'a dyn Supervisor, policy: &'a WaitPolicy) -> Self {
        LinkWaiter { waiter: Waiter::new(supervisor, policy), looks: 0, phase: Phase::Spin, bytes: 0 }
    }

    /// The kind of the last iteration.
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Something moved.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.waiter.reset();
        self.phase = Phase::Spin;
    }

    /// Waits for one iteration: returns soon, or fails.
    #[inline]
    pub(super) fn wait(&mut self, links: &mut Links, blocked: &Blocked<'_>) -> Result<()> {
        if self.waiter.is_due() { self.wait_slowly(links, blocked) } else { Ok(()) }
    }

    #[cold]
    fn wait_slowly(&mut self, links: &mut Links, blocked: &Blocked<'_>) -> Result<()> {
        let supervisor = self.waiter.supervisor;
        supervisor.alive()?;
        self.looks = self.looks.wrapping_add(1);
        let moved = if self.phase == Phase::Sleep || self.looks.is_multiple_of(OTHERS) {
            links.progress().map_err(|e| supervisor.explain(blocked.header(), e))?
        } else {
            false
        };
        let bytes = links.bytes_moved();
        // A long message that is still arriving is progress, too.
        if std::mem::replace(&mut self.bytes, bytes) != bytes || moved {
            self.reset();
            return Ok(());
        }
        let (phase, waited) = self.waiter.pause();
        if phase != Phase::Sleep {
            self.phase = phase;
            return Ok(());
        }
        let mut peers: Vec<usize> = Vec::new();
        blocked.links(|recv, send| peers.extend([recv, send].into_iter().flatten().map(|i| links.peer(i))));
        if peers.is_empty() {
            // Only the peers' receives remain.
            peers.extend(links.unflushed().map(|i| links.peer(i)));
        }
        peers.sort_unstable();
        peers.dedup();
        self.waiter.announce(peers.first().copied(), waited)?;
        let slice = self.waiter.slice(blocked.header(), &peers, waited)?;
        // Not before all links were checked.
        if std::mem::replace(&mut self.phase, Phase::Sleep) != Phase::Sleep {
            return Ok(());
        }
        self.sleep(links, blocked, slice)
    }

    /// Sleeps until an awaited link moves or the slice is over.
    fn sleep(&mut self, links: &mut Links, blocked: &Blocked<'_>, slice: Duration) -> Result<()> {
        let (mut receiving, mut sending) = (Vec::new(), Vec::new());
        blocked.links(|recv, send| {
            receiving.extend(recv);
            sending.extend(send);
        });
        // Links with only committed messages to send, or a peer's messages to receive, count as well.
        sending.extend(links.unflushed());
        sleep_on(links, (&receiving, &sending), blocked.header(), self.waiter.supervisor, slice)
    }
}

/// Arms the links in both directions, polls once more, and sleeps until the doorbell rings or the slice is over.
pub(super) fn sleep_on(
    links: &mut Links,
    (receiving, sending): (&[usize], &[usize]),
    header: &Header,
    supervisor: &dyn Supervisor,
    slice: Duration,
) -> Result<()> {
    let explain = |e| supervisor.explain(header, e);
    let flushing: Vec<usize> = links.unflushed().collect();
    let mut ready = false;
    for &i in receiving {
        ready |= links.recvs[i].arm().map_err(explain)?;
    }
    for &i in sending {
        let armed = links.sends[i].arm();
        ready |= unless_flushed(links, &flushing, i, armed, true).map_err(explain)?;
    }
    let outcome = if ready || supervisor.has_failed() {
        Ok(None)
    } else {
        let interests = (receiving.iter().map(|&i| links.recvs[i].interest()))
            .chain(sending.iter().map(|&i| links.sends[i].interest()));
        let mut fds = vec![(supervisor.doorbell(), PollFlags::IN)];
        for interest in interests {
            let Some(fd) = interest.fd else { continue };
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.readable);
            flags.set(PollFlags::OUT, interest.writable);
            match fds.iter_mut().find(|(other, _)| *other == fd) {
                Some((_, existing)) => *existing |= flags,
                None => fds.push((fd, flags)),
            }
        }
        slept(links, (receiving, sending), &flushing, &fds, slice, supervisor).map_err(explain)
    };
    for &i in receiving {
        links.recvs[i].disarm();
    }
    for &i in sending {
        links.sends[i].disarm();
    }
    supervisor.silence();
    if let Some((peer, slept)) = outcome? {
        supervisor.woke_late(peer, slept);
    }
    for &i in receiving {
        links.recvs[i].check_peer().map_err(explain)?;
    }
    for &i in sending {
        let checked = links.sends[i].check_peer();
        unless_flushed(links, &flushing, i, checked, ()).map_err(explain)?;
    }
    Ok(())
}

/// The outcome of a look at a sending link; `flushed`, when it is the loss of a peer that has taken everything since.
/// Such a peer may have left in order. If a lane has more to send to it, the link gives the error again.
fn unless_flushed<T>(links: &Links, flushing: &[usize], i: usize, outcome: Result<T>, flushed: T) -> Result<T> {
    match outcome {
        Err(Error::PeerLost { .. }) if flushing.contains(&i) && links.sends[i].is_flushed() => Ok(flushed),
        outcome => outcome,
    }
}

/// Sleeps until one of `fds` wakes us or the slice is over. If the slice is over and a message has arrived all the
/// same, returns its sender and the time slept.
fn slept(
    links: &mut Links,
    (receiving, sending): (&[usize], &[usize]),
    flushing: &[usize],
    fds: &[(RawFd, PollFlags)],
    slice: Duration,
    supervisor: &dyn Supervisor,
) -> Result<Option<(usize, Duration)>> {
    let since = Instant::now();
    if poll(fds, slice)? || supervisor.has_failed() {
        return Ok(None);
    }
    let mut found = None;
    for &i in receiving {
        if links.recvs[i].arm()? {
            found = Some(links.peer(i));
        }
    }
    for &i in sending {
        let armed = links.sends[i].arm();
        if unless_flushed(links, flushing, i, armed, true)? {
            found = Some(links.peer(i));
        }
    }
    match found {
        // It may have arrived just now, with its ring still to come.
        Some(peer) if !poll(fds, LATE)? => Ok(Some((peer, since.elapsed()))),
        _ => Ok(None),
    }
}

/// `poll(2)`: true when it was woken; an interrupted call counts as a wake-up.
fn poll(fds: &[(RawFd, PollFlags)], timeout: Duration) -> Result<bool> {
    let mut set: Vec<PollFd<'_>> = fds
        .iter()
        // SAFETY: the descriptors belong to the doorbell and to links which outlive this call.
        .map(|&(fd, flags)| PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, flags))
        .collect();
    let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
    match rustix::event::poll(&mut set, Some(&timeout)) {
        Ok(0) => Ok(false),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(true),
        Err(e) => Err(Error::errno("poll", "while waiting for links", e)),
    }
}
