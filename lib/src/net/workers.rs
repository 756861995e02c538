//! All threads of a process that read and write sockets: how many, how long they spin, and which one gets a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::request::Activity;
use super::worker::{Spins, Worker};
use crate::config::Config;
use crate::error::Result;
use crate::threads::Thread;

/// Spinning while requests are open: a thread that sleeps is woken late, by 50 to 100 us in a virtual machine.
const BUSY_SPIN: Duration = Duration::from_millis(10);
/// Spinning where threads share cores.
const SHORT_SPIN: Duration = Duration::from_micros(2);

/// A rank's other threads that spin: one that calls NCCL, and one that calls us. Another rank of the host has as many.
const OTHERS: usize = 2;

/// How many a process has: as many as can spin, or two that sleep, as one is slower with long messages.
fn threads(cores: usize) -> usize {
    (cores / 2).saturating_sub(OTHERS).clamp(2, 8).min(cores / 2).max(1)
}

/// All threads of a process.
#[derive(Debug)]
pub(super) struct Workers {
    all: Vec<(Arc<Worker>, Thread)>,
    /// The thread that gets the next stream, and the next one that only receives.
    next: [AtomicUsize; 2],
    activity: Arc<Activity>,
}

impl Workers {
    pub(super) fn start(config: &Config) -> Result<Workers> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = if config.net_threads > 0 { config.net_threads } else { threads(cores) };
        let few = config.spin.min(SHORT_SPIN);
        let enough = cores >= 2 * (count + OTHERS);
        let (idle, busy) = if enough { (config.spin, BUSY_SPIN) } else { (few, few) };
        let spins = Spins { idle, busy };
        let (next, activity) = ([0, count / 2].map(AtomicUsize::new), Arc::new(Activity::default()));
        // If one does not start, those before it end with this.
        let mut workers = Workers { all: Vec::with_capacity(count), next, activity };
        for index in 0..count {
            workers.all.push(Worker::start(index, spins, &workers.activity)?);
        }
        if !enough {
            workers.activity.attend_to(workers.all.iter().map(|(worker, _)| Arc::downgrade(worker)));
        }
        Ok(workers)
    }

    pub(super) fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// The thread for a new stream: each in turn, and those that receive apart, because a rank often does only one of
    /// the two, or one after the other.
    pub(super) fn next(&self, receives: bool) -> Arc<Worker> {
        let next = self.next[usize::from(receives)].fetch_add(1, Ordering::Relaxed) % self.all.len();
        self.all[next].0.clone()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.all.iter().for_each(|(worker, _)| worker.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_cores_have_two_threads_and_many_have_eight() {
        assert_eq!([1, 2, 3, 4, 6, 8, 10, 16, 20, 192].map(threads), [1, 1, 1, 2, 2, 2, 3, 6, 8, 8]);
    }
}
