//! Completion queues and the channels that wake threads that wait for them (InfiniBand specification, 10.8).

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::completion::{Status, Wc};
use super::event::{Affected, EventKind, Events};
use super::mailbox::Mailbox;
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::sync::lock;

/// Channel by which completion queues notify that they have completions.
#[derive(Debug)]
pub struct CompChannel {
    mailbox: Mailbox<u64>,
}

impl CompChannel {
    /// A channel without queues.
    ///
    /// # Errors
    /// The system's error where it has no descriptor left.
    pub fn new() -> Result<Arc<CompChannel>> {
        Ok(Arc::new(CompChannel { mailbox: Mailbox::new()? }))
    }

    /// The descriptor to wait for: readable while an event is there.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.mailbox.fd()
    }

    /// The cookie of a queue that notified. Waits for one, unless the descriptor was set non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` where there is none and the descriptor does not block.
    pub fn get_event(&self) -> Result<u64> {
        self.mailbox.pop()
    }

    /// Drops the events of the queue with this cookie, which goes.
    fn forget(&self, cookie: u64) {
        self.mailbox.retain(|c| *c != cookie);
    }
}

/// Engine that moves packets. A program that polls an empty queue drives progress inline through it.
pub(crate) trait Drive: Send + Sync {
    /// Takes what waits in the sockets, if no other thread does.
    fn drive(&self);

    /// Records that a queue notifies from now on, or no more: its program may sleep while it does.
    fn armed(&self, armed: bool);
}

/// Completion that the next event needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    Not,
    Solicited,
    Any,
}

#[derive(Debug)]
struct Inner {
    entries: VecDeque<Wc>,
    capacity: usize,
    armed: Armed,
}

/// A completion queue.
pub struct Cq {
    inner: Mutex<Inner>,
    /// Entries, read before the lock is taken: polling an empty queue is one load.
    len: AtomicUsize,
    cookie: u64,
    channel: Option<Arc<CompChannel>>,
    events: Option<Arc<Events>>,
    /// Weak: a queue that outlives its RDMA device keeps none of its sockets.
    driver: Option<Weak<dyn Drive>>,
    /// True once the queue had no room for a completion.
    overrun: AtomicBool,
    ignores_overrun: AtomicBool,
    origin: Origin,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("len", &self.len).field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl Cq {
    pub(crate) fn new(
        capacity: usize,
        cookie: u64,
        channel: Option<Arc<CompChannel>>,
        events: Option<Arc<Events>>,
        driver: Option<Weak<dyn Drive>>,
    ) -> Arc<Cq> {
        let entries = VecDeque::with_capacity(capacity.min(1024));
        let inner = Mutex::new(Inner { entries, capacity, armed: Armed::Not });
        Arc::new(Cq {
            inner,
            len: AtomicUsize::new(0),
            cookie,
            channel,
            events,
            driver,
            overrun: AtomicBool::new(false),
            ignores_overrun: AtomicBool::new(false),
            origin: Origin::here(),
        })
    }

    /// The cookie that the program gave when it created the queue.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// The channel that it was made with.
    #[must_use]
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// Completions that it holds at most.
    #[must_use]
    pub fn capacity(&self) -> usize {
        lock(&self.inner).capacity
    }

    /// Changes how many completions the queue holds.
    ///
    /// # Errors
    /// `EINVAL` for none, for fewer than wait in it, and for more than in [`crate::LIMITS`].
    pub fn resize(&self, capacity: usize) -> Result<()> {
        self.origin.check()?;
        if capacity > crate::LIMITS.completions as usize {
            return Err(Error::invalid(format!(
                "a completion queue holds 1 to {} completions",
                crate::LIMITS.completions
            )));
        }
        let mut inner = lock(&self.inner);
        let waiting = inner.entries.len();
        if capacity == 0 || capacity < waiting {
            return Err(Error::invalid(format!("{capacity} entries for a queue in which {waiting} completions wait")));
        }
        inner.capacity = capacity;
        Ok(())
    }

    /// Fails with `EINVAL` in a child of the process that made the queue.
    ///
    /// # Errors
    /// See above.
    pub fn check_here(&self) -> Result<()> {
        self.origin.check()
    }

    /// Makes completions that find no room be lost without an event.
    pub fn ignore_overrun(&self) {
        self.ignores_overrun.store(true, Ordering::Relaxed);
    }

    /// Returns true once the queue had no room for a completion: the queue pairs that complete into it end.
    pub(crate) fn has_overrun(&self) -> bool {
        self.overrun.load(Ordering::Relaxed)
    }

    /// Returns true if there is no completion, also after a look at the sockets.
    fn is_empty(&self) -> bool {
        let empty = || self.len.load(Ordering::Acquire) == 0;
        if !self.origin.is_here() {
            return true;
        }
        let Some(driver) = self.driver.as_ref().and_then(Weak::upgrade) else { return empty() };
        if empty() {
            driver.drive();
        }
        empty()
    }

    /// Takes completions out, the oldest first; returns how many are in the front of `into`. In a forked child none.
    pub fn poll(&self, into: &mut [Wc]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut inner = lock(&self.inner);
        let n = inner.entries.len().min(into.len());
        for (place, wc) in into.iter_mut().zip(inner.entries.drain(..n)) {
            *place = wc;
        }
        self.len.store(inner.entries.len(), Ordering::Release);
        n
    }

    /// The oldest completion.
    pub fn poll_one(&self) -> Option<Wc> {
        if self.is_empty() {
            return None;
        }
        let mut inner = lock(&self.inner);
        let wc = inner.entries.pop_front();
        self.len.store(inner.entries.len(), Ordering::Release);
        wc
    }

    /// Asks for one event on the channel at the next completion, or the next solicited or failed one. Completions that
    /// are there already give none: poll again after this. Does nothing in a forked child.
    pub fn req_notify(&self, solicited_only: bool) {
        if !self.origin.is_here() {
            return;
        }
        let mut inner = lock(&self.inner);
        let before = inner.armed;
        if !solicited_only {
            inner.armed = Armed::Any;
        } else if before == Armed::Not {
            inner.armed = Armed::Solicited;
        }
        drop(inner);
        if before == Armed::Not {
            self.tell(true);
        }
    }

    /// Notifies the driver whether the queue notifies.
    fn tell(&self, armed: bool) {
        if let Some(driver) = self.driver.as_ref().and_then(Weak::upgrade) {
            driver.armed(armed);
        }
    }

    /// Puts a completion in. One that does not fit is lost: the program is notified once, and the queue pairs that
    /// complete into the queue end (C10-9, "CQ overrun").
    pub(crate) fn push(&self, wc: Wc, solicited: bool) {
        let mut inner = lock(&self.inner);
        if inner.entries.len() >= inner.capacity {
            drop(inner);
            if !self.ignores_overrun.load(Ordering::Relaxed) && !self.overrun.swap(true, Ordering::Relaxed) {
                log::error!("a completion queue overran: more completions than it was made for");
                if let Some(events) = &self.events {
                    events.report(EventKind::CqError, Affected::Cq(self.cookie));
                }
            }
            return;
        }
        inner.entries.push_back(wc);
        self.len.store(inner.entries.len(), Ordering::Release);
        let fires = match inner.armed {
            Armed::Not => false,
            Armed::Solicited => solicited || wc.status != Status::Success,
            Armed::Any => true,
        };
        if fires {
            inner.armed = Armed::Not;
            drop(inner);
            self.tell(false);
            if let Some(channel) = &self.channel {
                channel.mailbox.push(self.cookie);
            }
        }
    }

    /// Takes out the completions of a queue pair that goes.
    pub(crate) fn forget(&self, qpn: u32) {
        let mut inner = lock(&self.inner);
        inner.entries.retain(|wc| wc.qpn != qpn);
        self.len.store(inner.entries.len(), Ordering::Release);
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        // No one can take what they name any more.
        if let Some(channel) = &self.channel {
            channel.forget(self.cookie);
        }
        if let Some(events) = &self.events {
            events.forget(Affected::Cq(self.cookie));
        }
        if lock(&self.inner).armed != Armed::Not {
            self.tell(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::completion::WcOpcode;
    use super::*;

    fn wc(id: u64, status: Status) -> Wc {
        Wc { id, status, opcode: WcOpcode::Recv, qpn: 1, ..Wc::EMPTY }
    }

    fn pending(channel: &CompChannel) -> bool {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(channel.fd(), rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).expect("poll") == 1
    }

    #[test]
    fn an_armed_queue_notifies_once() {
        let channel = CompChannel::new().expect("eventfd");
        let cq = Cq::new(10, 7, Some(channel.clone()), None, None);
        cq.push(wc(0, Status::Success), false);
        assert!(!pending(&channel), "not armed");
        cq.req_notify(true);
        cq.push(wc(1, Status::Success), false);
        assert!(!pending(&channel), "not solicited");
        cq.push(wc(2, Status::Success), true);
        cq.push(wc(3, Status::Success), true);
        assert_eq!(channel.get_event(), Ok(7));
        assert!(!pending(&channel), "one event for one request");
        cq.req_notify(true);
        cq.push(wc(4, Status::Flushed), false);
        assert_eq!(channel.get_event(), Ok(7), "an error counts as solicited");
        cq.req_notify(true);
        cq.req_notify(false);
        cq.req_notify(true);
        cq.push(wc(5, Status::Success), false);
        assert_eq!(channel.get_event(), Ok(7), "a request for any is not taken back");
    }

    #[test]
    fn an_overrun_is_reported_once() {
        let events = Arc::new(Events::new().expect("eventfd"));
        let cq = Cq::new(1, 9, None, Some(events.clone()), None);
        for id in 0..3 {
            cq.push(wc(id, Status::Success), false);
            assert_eq!(cq.has_overrun(), id > 0);
        }
        assert_eq!(events.pop().map(|e| (e.kind, e.affected)), Ok((EventKind::CqError, Affected::Cq(9))));
        assert_eq!(cq.poll_one().map(|wc| wc.id), Some(0));
        assert_eq!(cq.poll_one(), None);
        rustix::fs::fcntl_setfl(events.fd(), rustix::fs::OFlags::NONBLOCK).expect("set");
        assert!(events.pop().is_err(), "once");
    }

    #[test]
    fn events_go_with_their_queue() {
        let (channel, events) = (CompChannel::new().expect("eventfd"), Arc::new(Events::new().expect("eventfd")));
        let queue = |cookie| Cq::new(1, cookie, Some(channel.clone()), Some(events.clone()), None);
        let (goes, stays) = (queue(1), queue(2));
        for cq in [&goes, &stays] {
            cq.req_notify(false);
            (0..2).for_each(|id| cq.push(wc(id, Status::Success), false));
        }
        drop(goes);
        assert_eq!(channel.get_event(), Ok(2));
        assert!(!pending(&channel), "nothing is left of the other's");
        assert_eq!(events.pop().map(|e| e.affected), Ok(Affected::Cq(2)));
        drop(stays);
        rustix::fs::fcntl_setfl(events.fd(), rustix::fs::OFlags::NONBLOCK).expect("set");
        assert!(events.pop().is_err());
    }
}
