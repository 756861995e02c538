//! What a rank does while no lane can go on: spin, yield, sleep; and when it stops waiting.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::Blocked;
use super::links::Links;
use crate::error::{Error, Result};
use crate::interrupt::asked_to_stop;
use crate::trace::Phase;
use crate::wire::Header;

/// The communicator as the executor sees it: who aborts it, and who knows what became of the others.
pub(crate) trait Supervisor {
    /// The communicator's failure, if it has failed already.
    fn failure(&self) -> Option<Error>;
    /// True when [`Supervisor::failure`] would give an error. Cheap: asked on every turn of a spin loop.
    fn has_failed(&self) -> bool;
    /// Fails with [`Supervisor::failure`], if there is one.
    fn alive(&self) -> Result<()> {
        if self.has_failed() { self.failure().map_or(Ok(()), Err) } else { Ok(()) }
    }
    /// Fails if ranks are known to have made different calls. Asked when a wait gets long.
    fn compare(&self) -> Result<()> {
        Ok(())
    }
    /// Descriptor that becomes readable when the doorbell rings.
    fn doorbell(&self) -> RawFd;
    /// Empties the doorbell.
    fn silence(&self);
    /// What `peer` had for us was found after a whole slice of sleep, and no bell rang: a wake-up was lost.
    fn woke_late(&self, peer: usize, slept: Duration);
    /// Publishes which rank we are waiting for (`None`: moving again).
    fn waiting_on(&self, peer: Option<usize>);
    /// The error to give when nothing moved for `waited` while waiting for `peers`.
    fn timed_out(&self, header: &Header, peers: &[usize], waited: Duration) -> Error;
    /// The error to give for a link's error: the first cause, when another rank's failure is behind it.
    fn explain(&self, header: &Header, error: Error) -> Error;
    /// Whether `peer` has said goodbye.
    fn has_left(&self, peer: usize) -> bool;
    /// The error to give when `peer`, which is awaited, has left.
    fn left(&self, header: &Header, peer: usize) -> Error;
    /// The error to give when the caller wants this thread's call to end ([`crate::interrupt`]).
    fn interrupted(&self, header: &Header) -> Error;
    /// The error for a message of another call.
    fn mismatch(&self, peer: usize, ours: Header, theirs: Header) -> Error;
}

/// How a wait goes on as it gets longer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitPolicy {
    /// Turns of the spin loop between two looks at the clock, each of which asks every link: a system call over TCP.
    pub(crate) turns: u32,
    /// Busy turns first.
    pub(crate) spin: Duration,
    /// Then turns that give the core away.
    pub(crate) yields: Duration,
    /// Then sleeping, until nothing has moved for this long.
    pub(crate) deadline: Duration,
}

/// Longest sleep before the abort flag and the peers are looked at again.
pub(super) const SLICE: Duration = Duration::from_millis(50);

/// So long a bell may take that rings for what was found when the slice was over.
const LATE: Duration = Duration::from_millis(1);
/// A wait as long as this may be for a rank that makes another call.
pub(crate) const DOUBT: Duration = Duration::from_millis(20);

/// Busy turns between two looks at the links that nobody waits for: over TCP each costs a system call, and the rank that is
/// awaited may need this very core.
const OTHERS: u32 = 8;

/// Where one run is in its waiting.
pub(super) struct Waiter<'a> {
    supervisor: &'a dyn Supervisor,
    policy: &'a WaitPolicy,
    turns: u32,
    /// Looks at the clock so far.
    looks: u32,
    since: Option<Instant>,
    announced: bool,
    phase: Phase,
    /// Bytes over all links when they were last looked at.
    bytes: u64,
}

impl<'a> Waiter<'a> {
    pub(super) fn new(supervisor: &'a dyn Supervisor, policy: &'a WaitPolicy) -> Self {
        Waiter { supervisor, policy, turns: 0, looks: 0, since: None, announced: false, phase: Phase::Spin, bytes: 0 }
    }

    /// What the last turn of waiting was.
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Something moved.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.turns = 0;
        if self.since.is_some() {
            self.since = None;
            self.phase = Phase::Spin;
            if std::mem::take(&mut self.announced) {
                self.supervisor.waiting_on(None);
            }
        }
    }

    /// One turn of waiting: returns soon, or fails.
    #[inline]
    pub(super) fn wait(&mut self, links: &mut Links, blocked: &Blocked<'_>) -> Result<()> {
        self.turns += 1;
        if self.turns < self.policy.turns {
            std::hint::spin_loop();
            return Ok(());
        }
        self.turns = 0;
        self.wait_slowly(links, blocked)
    }

    #[cold]
    fn wait_slowly(&mut self, links: &mut Links, blocked: &Blocked<'_>) -> Result<()> {
        self.supervisor.alive()?;
        self.looks = self.looks.wrapping_add(1);
        let moved = if self.phase == Phase::Sleep || self.looks.is_multiple_of(OTHERS) {
            links.progress().map_err(|e| self.supervisor.explain(blocked.header(), e))?
        } else {
            false
        };
        let bytes = links.bytes_moved();
        // A long message that is still coming in is progress, too.
        if std::mem::replace(&mut self.bytes, bytes) != bytes || moved {
            self.reset();
            return Ok(());
        }
        let now = Instant::now();
        let waited = now.duration_since(*self.since.get_or_insert(now));
        if waited < self.policy.spin {
            return Ok(());
        }
        if waited < self.policy.spin + self.policy.yields {
            self.phase = Phase::Yield;
            std::thread::yield_now();
            return Ok(());
        }
        let mut peers: Vec<usize> = Vec::new();
        blocked.links(|recv, send| peers.extend([recv, send].into_iter().flatten().map(|i| links.peer(i))));
        if peers.is_empty() {
            // All is done but for what they have to take.
            peers.extend(links.unflushed().map(|i| links.peer(i)));
        }
        peers.sort_unstable();
        peers.dedup();
        if !self.announced {
            self.announced = true;
            self.supervisor.waiting_on(peers.first().copied());
        }
        if waited >= DOUBT {
            self.supervisor.compare()?;
        }
        if waited >= self.policy.deadline {
            return Err(self.supervisor.timed_out(blocked.header(), &peers, waited));
        }
        if asked_to_stop() {
            return Err(self.supervisor.interrupted(blocked.header()));
        }
        if self.phase != Phase::Sleep {
            // Not before all links were looked at.
            self.phase = Phase::Sleep;
            return Ok(());
        }
        self.sleep(links, blocked, SLICE.min(self.policy.deadline - waited))
    }

    /// Sleeps until something that is waited for moves or the slice is over.
    fn sleep(&mut self, links: &mut Links, blocked: &Blocked<'_>, slice: Duration) -> Result<()> {
        let (mut receiving, mut sending) = (Vec::new(), Vec::new());
        blocked.links(|recv, send| {
            receiving.extend(recv);
            sending.extend(send);
        });
        // Links that only have committed messages left to push out, or a peer's to take in, count as well.
        sending.extend(links.unflushed());
        sleep_on(links, (&receiving, &sending), blocked.header(), self.supervisor, slice)
    }
}

/// Arms the links that are received from and sent to, looks once more, sleeps until something rings or the slice is over.
pub(super) fn sleep_on(
    links: &mut Links,
    (receiving, sending): (&[usize], &[usize]),
    header: &Header,
    supervisor: &dyn Supervisor,
    slice: Duration,
) -> Result<()> {
    let explain = |e| supervisor.explain(header, e);
    let mut ready = false;
    for &i in receiving {
        ready |= links.recvs[i].arm().map_err(explain)?;
    }
    for &i in sending {
        ready |= links.sends[i].arm().map_err(explain)?;
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
        slept(links, (receiving, sending), &fds, slice, supervisor).map_err(explain)
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
        links.sends[i].check_peer().map_err(explain)?;
    }
    Ok(())
}

/// Sleeps until one of `fds` wakes us or the slice is over. Where the slice is over and there is something all the same, the
/// peer that it came from, and how long we slept.
fn slept(
    links: &mut Links,
    (receiving, sending): (&[usize], &[usize]),
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
        if links.sends[i].arm()? {
            found = Some(links.peer(i));
        }
    }
    match found {
        // It may have come just now, and its bell is about to ring.
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
