//! Asynchronous calls: a queue, one progress thread, and waiting threads that run their own call.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;

/// Interval at which the progress thread looks for calls left to their waiters. It takes those that it sees twice.
const DOZE: Duration = Duration::from_millis(1);
/// [`DOZE`]s in a row without a new call left to its waiter, after which the progress thread sleeps until it is woken.
const DOZES: u32 = 50;

/// Work to do after a call has ended and the next one may begin.
pub type After = Option<Box<dyn FnOnce()>>;

/// A queued call. It learns whether it runs in the background, on the progress thread, and drops its [`InFlight`] when
/// the call is over, before it notifies its waiter.
pub(super) type Job = Box<dyn FnOnce(bool, InFlight<'_>) -> After + Send>;

/// A call that counts as in flight until this is dropped, which is before its outcome is reported: a caller that has
/// the outcome finds the call no longer counted.
pub(crate) struct InFlight<'a>(&'a Queue);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Calls in the order they were made; one runs at a time.
pub(crate) struct Queue {
    /// A forked child has no progress thread, and locks that may be held forever.
    origin: Origin,
    rank: usize,
    /// Calls that are not over.
    in_flight: AtomicUsize,
    /// Waiting and running jobs: the waiter of one that is over may not have been notified yet. Changed under the lock;
    /// read without it by blocking calls.
    pending: AtomicUsize,
    jobs: Mutex<Jobs>,
    /// For the progress thread.
    changed: Condvar,
    /// For [`Queue::drain`].
    drained: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// Jobs begun so far: the number of the first one in `waiting`.
    begun: u64,
    /// A job is running, on any thread.
    running: bool,
    /// The progress thread begins jobs before this number; a later one is left to its waiter for now.
    due: u64,
    /// Jobs so far that could be left to their waiters.
    left: u64,
    /// The progress thread sleeps and has not been woken.
    asleep: bool,
    draining: usize,
    closed: bool,
    thread: Option<JoinHandle<()>>,
}

impl Jobs {
    /// The number of the next job that is made.
    fn next(&self) -> u64 {
        self.begun + self.waiting.len() as u64
    }

    fn begin(&mut self) -> Option<Job> {
        if self.running {
            return None;
        }
        let job = self.waiting.pop_front()?;
        self.begun += 1;
        self.running = true;
        Some(job)
    }
}

/// The place of a call in its communicator's queue.
pub struct Queued {
    queue: Arc<Queue>,
    number: u64,
}

impl Queued {
    /// Runs the calls up to this one in this thread, unless one is running elsewhere. Use it before a wait: handing a
    /// short call to another thread and its result back takes longer than the call.
    ///
    /// # Errors
    /// In a forked child of the process that made the call, where the call never ends.
    pub fn help(&self) -> Result<()> {
        let queue = &self.queue;
        queue.origin.check(|| "wait".to_owned(), queue.rank)?;
        let mut jobs = lock(&queue.jobs);
        while jobs.begun <= self.number
            && let Some(job) = jobs.begin()
        {
            drop(jobs);
            jobs = queue.carry_out(job, false);
        }
        Ok(())
    }

    /// Begins the call in the background, if it was left to its waiter and has not begun.
    pub fn start(&self) {
        if !self.queue.origin.is_here() {
            return;
        }
        let mut jobs = lock(&self.queue.jobs);
        if jobs.begun <= self.number {
            jobs.due = jobs.due.max(self.number + 1);
            self.queue.changed.notify_all();
        }
    }
}

impl Queue {
    pub(crate) fn new(rank: usize) -> Arc<Queue> {
        let (jobs, changed, drained) = (Mutex::default(), Condvar::new(), Condvar::new());
        let [in_flight, pending] = [0, 0].map(AtomicUsize::new);
        Arc::new(Queue { origin: Origin::here(), rank, in_flight, pending, jobs, changed, drained })
    }

    /// Appends a job; the first one starts the progress thread. With `leave` and an empty queue it may stay queued for
    /// up to two [`DOZE`]s, so that its waiter can run it.
    pub(crate) fn push(self: &Arc<Self>, name: impl FnOnce() -> String, leave: bool, job: Job) -> Result<Queued> {
        let mut jobs = lock(&self.jobs);
        if jobs.closed {
            return Err(Error::invalid("asynchronous call", "the communicator is closed"));
        }
        if jobs.thread.is_none() {
            let queue = self.clone();
            let thread = std::thread::Builder::new()
                .name(name())
                .spawn(move || queue.serve())
                .map_err(|e| Error::io("asynchronous call", "starting the progress thread", &e))?;
            jobs.thread = Some(thread);
        }
        let left = leave && !jobs.running && jobs.waiting.is_empty();
        jobs.left += u64::from(left);
        // A running progress thread looks by itself.
        let wake = std::mem::take(&mut jobs.asleep) || !left;
        let number = jobs.next();
        if !left {
            jobs.due = number + 1;
        }
        jobs.waiting.push_back(job);
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        self.pending.fetch_add(1, Ordering::AcqRel);
        drop(jobs);
        if wake {
            self.changed.notify_all();
        }
        Ok(Queued { queue: self.clone(), number })
    }

    fn serve(&self) {
        let mut jobs = lock(&self.jobs);
        let (mut left, mut dozes) = (0, DOZES);
        loop {
            if jobs.begun < jobs.due
                && let Some(job) = jobs.begin()
            {
                drop(jobs);
                jobs = self.carry_out(job, true);
                continue;
            }
            if jobs.closed && !jobs.running {
                return;
            }
            if jobs.left != left {
                (left, dozes) = (jobs.left, 0);
            }
            if dozes < DOZES {
                dozes += 1;
                let seen = jobs.next();
                let (after, doze) = self.changed.wait_timeout(jobs, DOZE).unwrap_or_else(PoisonError::into_inner);
                jobs = after;
                if doze.timed_out() {
                    jobs.due = jobs.due.max(seen);
                }
            } else {
                jobs.asleep = true;
                jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                jobs.asleep = false;
            }
        }
    }

    /// Runs a job that has begun, ends it, and does the remaining work. A panic of the caller's buffers goes on in the
    /// thread that waits; on the progress thread it was reported, and the later calls run all the same.
    fn carry_out(&self, job: Job, background: bool) -> MutexGuard<'_, Jobs> {
        let outcome = catch_unwind(AssertUnwindSafe(|| job(background, InFlight(self))));
        let mut jobs = lock(&self.jobs);
        jobs.running = false;
        self.pending.fetch_sub(1, Ordering::AcqRel);
        if jobs.draining > 0 {
            self.drained.notify_all();
        }
        // The progress thread finds the next job by itself.
        if !background && (jobs.begun < jobs.due || jobs.closed) {
            self.changed.notify_all();
        }
        let after = match outcome {
            Ok(Some(after)) => after,
            Err(panic) if !background => {
                drop(jobs);
                resume_unwind(panic)
            }
            Ok(None) | Err(_) => return jobs,
        };
        drop(jobs);
        after();
        lock(&self.jobs)
    }

    /// True when every call is over.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) == 0
    }

    /// True when no job is waiting or running: [`Queue::drain`] would return at once.
    #[inline]
    pub(crate) fn is_drained(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Waits until every job made so far is complete: a blocking call comes after them.
    pub(crate) fn drain(&self) {
        if self.is_drained() || !self.origin.is_here() {
            return;
        }
        let mut jobs = lock(&self.jobs);
        jobs.due = jobs.next();
        self.changed.notify_all();
        jobs.draining += 1;
        while !self.is_drained() {
            jobs = self.drained.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
        jobs.draining -= 1;
    }

    /// Completes what is waiting and ends the thread.
    pub(crate) fn close(&self) {
        let thread = {
            let mut jobs = lock(&self.jobs);
            jobs.closed = true;
            jobs.due = jobs.next();
            jobs.thread.take()
        };
        self.changed.notify_all();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic in a job has been reported by its own thread; there is nothing to add here.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::ThreadId;

    use super::*;

    type Answer = (usize, bool, ThreadId);

    /// A queue, a function that appends a job which records the thread that ran it, and the records.
    fn queue() -> (Arc<Queue>, impl Fn(usize, bool) -> Queued, std::sync::mpsc::Receiver<Answer>) {
        let queue = Queue::new(0);
        let (sender, receiver) = channel();
        let of = queue.clone();
        let push = move |number, leave| {
            let sender = sender.clone();
            let job = move |background, _: InFlight<'_>| -> After {
                sender.send((number, background, std::thread::current().id())).unwrap();
                None
            };
            of.push(|| "test".to_owned(), leave, Box::new(job)).unwrap()
        };
        (queue, push, receiver)
    }

    #[test]
    fn who_waits_for_the_next_call_may_carry_it_out() {
        let (queue, push, answers) = queue();
        let me = std::thread::current().id();
        let mut helped = 0;
        // The progress thread may come first, in any round: then it is its call, and help does nothing.
        for round in 0..1000 {
            push(round, true).help().unwrap();
            let (number, background, thread) = answers.recv().unwrap();
            assert_eq!((number, background), (round, thread != me));
            helped += usize::from(!background);
        }
        assert!(helped > 0, "never in 1000 rounds");
        queue.close();
    }

    #[test]
    fn calls_left_to_waiters_that_never_come_run_all_the_same_and_in_order() {
        let (queue, push, answers) = queue();
        let me = std::thread::current().id();
        for number in 0..200 {
            let queued = push(number, number % 3 != 0);
            match number % 5 {
                0 => queued.start(),
                1 => queued.help().unwrap(),
                2 => queue.drain(),
                _ => {}
            }
        }
        for number in 0..200 {
            let (got, background, thread) = answers.recv().unwrap();
            assert_eq!((got, background), (number, thread != me));
        }
        queue.close();
    }

    #[test]
    fn a_call_waits_for_the_one_that_a_waiter_carries_out() {
        let queue = Queue::new(0);
        let (entered, inside) = channel();
        let (go, gate) = channel::<()>();
        let (sender, order) = channel();
        let first = sender.clone();
        // Helped or not, the second one comes after the first.
        let job = move |_, _: InFlight<'_>| -> After {
            entered.send(()).unwrap();
            gate.recv().unwrap();
            first.send(1).unwrap();
            None
        };
        let queued = queue.push(|| "test".to_owned(), true, Box::new(job)).unwrap();
        let helper = std::thread::spawn(move || queued.help());
        inside.recv().unwrap();
        let second = queue
            .push(
                || "test".to_owned(),
                true,
                Box::new(move |_, _| {
                    sender.send(2).unwrap();
                    None
                }),
            )
            .unwrap();
        second.help().unwrap();
        assert!(!queue.is_drained() && order.try_recv().is_err());
        go.send(()).unwrap();
        queue.drain();
        helper.join().unwrap().unwrap();
        assert_eq!(order.iter().collect::<Vec<_>>(), [1, 2]);
        queue.close();
        assert!(queue.push(|| "test".to_owned(), false, Box::new(|_, _| None)).is_err());
    }

    #[test]
    fn who_knows_that_a_call_is_over_finds_nothing_in_flight() {
        let queue = Queue::new(0);
        let (sender, told) = channel();
        for round in 0..2000 {
            let sender = sender.clone();
            let job = move |_, in_flight: InFlight<'_>| -> After {
                drop(in_flight);
                sender.send(()).unwrap();
                // The notified thread goes on while this one still ends the job.
                std::thread::yield_now();
                None
            };
            let queued = queue.push(|| "test".to_owned(), false, Box::new(job)).unwrap();
            if round % 2 == 0 {
                queued.help().unwrap();
            }
            told.recv().unwrap();
            assert!(queue.is_idle(), "round {round}");
            queue.drain();
            assert!(queue.is_drained() && queue.is_idle());
        }
        queue.close();
    }

    #[test]
    fn a_panic_in_a_call_ends_that_call_alone() {
        let queue = Queue::new(0);
        let job = |_, _: InFlight<'_>| -> After { std::panic::resume_unwind(Box::new("of the caller's buffers")) };
        drop(queue.push(|| "test".to_owned(), false, Box::new(job)).unwrap());
        queue.drain();
        let (sender, told) = channel();
        let job = move |background, _: InFlight<'_>| -> After {
            sender.send(background).unwrap();
            None
        };
        drop(queue.push(|| "test".to_owned(), false, Box::new(job)).unwrap());
        assert!(told.recv().unwrap() && told.recv().is_err());
        queue.close();
    }

    #[test]
    fn what_comes_after_a_call_may_make_calls_and_wait_for_them() {
        let queue = Queue::new(0);
        let (sender, order) = channel();
        let of = queue.clone();
        // On whichever thread: the one that waits executes the inner calls.
        let job = move |_, _: InFlight<'_>| -> After {
            sender.send(1).unwrap();
            Some(Box::new(move || {
                let queued = [2, 3].map(|number| {
                    let sender = sender.clone();
                    let job = move |_, _: InFlight<'_>| -> After {
                        sender.send(number).unwrap();
                        None
                    };
                    of.push(|| "test".to_owned(), false, Box::new(job)).unwrap()
                });
                queued[1].help().unwrap();
                sender.send(4).unwrap();
            }))
        };
        drop(queue.push(|| "test".to_owned(), false, Box::new(job)).unwrap());
        assert_eq!(order.iter().collect::<Vec<_>>(), [1, 2, 3, 4]);
        queue.close();
    }
}
