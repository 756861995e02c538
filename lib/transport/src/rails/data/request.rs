//! Requests: sends and receives that are posted and not done yet.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::fence;
use crate::rails::worker::activity::Activity;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;

/// Receives that one request may group.
pub const MAX_GROUP: usize = 8;
/// Requests of a connection at once.
pub const MAX_REQUESTS: usize = 256;
/// The longest message for which a thread that tests a request drives progress inline. During a longer one NCCL's
/// thread copies to and from GPUs instead.
const SHORT: usize = 8 << 10;

/// The error of a call in a forked child.
#[cold]
pub(in crate::rails) fn wrong_process(op: &str) -> Error {
    let here = std::process::id();
    Error::invalid(
        op,
        format!(
            "process {here} was forked from the one that has the connection: make the call there, or run a new program here"
        ),
    )
}

/// Wakes an owner that sleeps until a request is done or the connection fails. Owners that poll have none.
#[derive(Debug)]
pub(in crate::rails) struct Alarm {
    bell: Mutex<Arc<Doorbell>>,
    armed: AtomicBool,
}

impl Alarm {
    /// Arms the alarm: the next completion rings it. Check for completions after this.
    pub(in crate::rails) fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        fence::of_sleeper();
    }

    pub(in crate::rails) fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
    }

    /// Moves the alarm to the bell of another thread, which waits from now on.
    pub(in crate::rails) fn move_to(&self, bell: Arc<Doorbell>) {
        *lock(&self.bell) = bell;
    }

    fn ring(&self) {
        fence::of_waker();
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::AcqRel) {
            lock(&self.bell).ring();
        }
    }
}

/// State shared by the requests of a connection: its failure, if any; its alarm, which rings for that and for requests;
/// and whether its last message was long.
#[derive(Debug)]
pub(in crate::rails) struct Status {
    origin: Origin,
    failed: AtomicBool,
    error: OnceLock<Error>,
    alarm: OnceLock<Alarm>,
    long: AtomicBool,
}

impl Status {
    fn new() -> Status {
        let (failed, long) = (AtomicBool::new(false), AtomicBool::new(false));
        Status { origin: Origin::here(), failed, error: OnceLock::new(), alarm: OnceLock::new(), long }
    }

    /// True, or an error in a forked child, which has no part in what its parent's threads do.
    fn is_here(&self) -> Result<bool> {
        if self.origin.is_here() { Ok(true) } else { Err(wrong_process("test")) }
    }

    /// Fails the connection with `error`; true the first time.
    pub(in crate::rails) fn fail(&self, error: Error) -> bool {
        let first = self.error.set(error).is_ok();
        self.failed.store(true, Ordering::Release);
        self.ring();
        first
    }

    /// Returns the connection's alarm; `bell` is used the first time.
    pub(in crate::rails) fn alarm(&self, bell: &Arc<Doorbell>) -> &Alarm {
        self.alarm.get_or_init(|| Alarm { bell: Mutex::new(bell.clone()), armed: AtomicBool::new(false) })
    }

    #[inline]
    fn ring(&self) {
        if let Some(alarm) = self.alarm.get() {
            alarm.ring();
        }
    }

    #[inline]
    pub(in crate::rails) fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { self.get().map_or(Ok(()), Err) } else { Ok(()) }
    }

    #[cold]
    fn get(&self) -> Option<Error> {
        self.error.get().cloned()
    }
}

/// A posted send, or up to [`MAX_GROUP`] receives that were posted together.
#[derive(Debug)]
pub struct Request {
    busy: AtomicBool,
    /// Bytes of a send, or receives of a group, that are not done yet; 0 once the request is done.
    open: AtomicUsize,
    count: AtomicUsize,
    sizes: [AtomicUsize; MAX_GROUP],
    status: Arc<Status>,
    activity: Arc<Activity>,
}

impl Request {
    /// The lengths that were sent or received, once all of it is done; then the request belongs to the connection
    /// again, and must not be tested any more.
    ///
    /// # Errors
    /// The error of the connection, if it failed before that.
    #[inline]
    pub fn test(&self, sizes: &mut [usize; MAX_GROUP]) -> Result<Option<usize>> {
        if !self.is_done() && self.status.is_here()? && !self.status.long.load(Ordering::Relaxed) {
            self.activity.drive_sleepers();
        }
        // The connection's state first: what came before its end is done by then.
        let status = if self.is_done() { Ok(()) } else { self.status.check() };
        if !self.is_done() {
            return status.map(|()| None);
        }
        let count = self.count.load(Ordering::Relaxed);
        sizes.iter_mut().zip(&self.sizes).take(count).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
        self.busy.store(false, Ordering::Release);
        Ok(Some(count))
    }

    /// Returns true once the request is done. Unlike after [`Request::test`], the request stays the caller's.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Counts `amount` of what was open as done. What was written before is seen by any thread that then finds the
    /// request done.
    pub(in crate::rails) fn finish(&self, amount: usize) {
        if self.open.fetch_sub(amount, Ordering::AcqRel) == amount {
            self.activity.end(1);
            self.status.ring();
        }
    }

    /// Sets the length of a received message of the group, which is done with that.
    pub(in crate::rails) fn received(&self, index: usize, len: usize) {
        if let Some(size) = self.sizes.get(index) {
            size.store(len, Ordering::Relaxed);
        }
        self.finish(1);
    }
}

/// The requests of a connection.
#[derive(Debug)]
pub(in crate::rails) struct Requests {
    all: Box<[Request]>,
    next: AtomicUsize,
    status: Arc<Status>,
    activity: Arc<Activity>,
}

impl Requests {
    pub(in crate::rails) fn new(activity: &Arc<Activity>) -> Requests {
        let status = Arc::new(Status::new());
        let one = |_| Request {
            busy: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            sizes: Default::default(),
            status: status.clone(),
            activity: activity.clone(),
        };
        let all = (0..MAX_REQUESTS).map(one).collect();
        Requests { all, next: AtomicUsize::new(0), status, activity: activity.clone() }
    }

    pub(in crate::rails) fn status(&self) -> &Status {
        &self.status
    }

    /// Notes that a message of `len` bytes is sent, or begins to come.
    pub(in crate::rails) fn begins(&self, len: usize) {
        let long = len > SHORT;
        if self.status.long.load(Ordering::Relaxed) != long && !self.status.long.swap(long, Ordering::Relaxed) {
            // From now on without an owner's help.
            self.activity.wake_sleepers();
        }
    }

    /// Takes a free request, with `open` to come and `count` lengths of `size`; `None` if all are in use.
    pub(in crate::rails) fn take(&self, open: usize, count: usize, size: usize) -> Option<usize> {
        let start = self.next.load(Ordering::Relaxed);
        let free = (0..MAX_REQUESTS).map(|i| (start + i) % MAX_REQUESTS).find(|&slot| {
            self.all.get(slot).is_some_and(|r| !r.busy.load(Ordering::Acquire) && !r.busy.swap(true, Ordering::AcqRel))
        })?;
        self.next.store((free + 1) % MAX_REQUESTS, Ordering::Relaxed);
        let request = self.all.get(free)?;
        request.count.store(count, Ordering::Relaxed);
        request.sizes.iter().take(count).for_each(|s| s.store(size, Ordering::Relaxed));
        self.activity.begin();
        request.open.store(open, Ordering::Release);
        Some(free)
    }

    /// Stops counting the open requests, as the connection is closed and no thread serves it any more: they are never
    /// done.
    pub(in crate::rails) fn abandon(&self) {
        let open = self.all.iter().filter(|r| !r.is_done()).count();
        self.activity.end(open);
    }

    /// Returns true while any request of the connection is open.
    pub(in crate::rails) fn any(&self) -> bool {
        self.all.iter().any(|request| !request.is_done())
    }

    pub(in crate::rails) fn get(&self, slot: usize) -> Option<&Request> {
        self.all.get(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last bytes and the end of the connection come while its owner tests the request.
    #[test]
    fn a_request_that_was_done_before_the_connection_ended_is_done() {
        for round in 0..2_000 {
            let requests = Requests::new(&Arc::default());
            let slot = requests.take(2, 1, 0).unwrap();
            let request = requests.get(slot).unwrap();
            let ends = || {
                request.finish(1);
                request.received(0, 7);
                assert!(requests.status().fail(Error::invalid("receive", "the peer closed it")));
            };
            std::thread::scope(|scope| {
                scope.spawn(ends);
                let mut sizes = [0; MAX_GROUP];
                let done = loop {
                    match request.test(&mut sizes) {
                        Ok(None) => std::hint::spin_loop(),
                        other => break other,
                    }
                };
                assert_eq!((done.ok().flatten(), sizes[0]), (Some(1), 7), "round {round}");
            });
        }
    }
}
