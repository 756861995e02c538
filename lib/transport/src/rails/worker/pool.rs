//! All threads of a process that read and write sockets: how many, how long they spin, and which one gets a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::rails::worker::activity::Activity;
use crate::rails::worker::thread::{Spins, Worker};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::Thread;

/// Time to spin while requests are open: a thread that sleeps is woken late, by 50 to 100 us in a virtual machine.
const BUSY_SPIN: Duration = Duration::from_millis(10);
/// Longest time to spin where threads share cores.
const SHORT_SPIN: Duration = Duration::from_micros(2);

/// A rank's other threads that spin: one that calls NCCL, and one that calls us. Another rank of the host has as many.
const OTHERS: usize = 2;
/// The most threads of a process.
const MOST: usize = 8;

/// Returns the numbers of threads of a process: steady ones, which spin, and bulk threads, which sleep between the long
/// messages that they alone take. Where none can spin all of them sleep, one for every two cores: one alone is slower
/// with long messages.
fn threads(cores: usize) -> (usize, usize) {
    let all = (cores / 2).clamp(1, MOST);
    match (cores / 2).saturating_sub(OTHERS).min(MOST) {
        0 => (all, 0),
        steady => (steady, all - steady),
    }
}

/// All threads of a process.
#[derive(Debug)]
pub(in crate::rails) struct Workers {
    all: Vec<(Arc<Worker>, Thread)>,
    /// Number of bulk threads, the last ones of `all`, which sleep between the long messages that they take.
    bulk: usize,
    /// Counters that choose the thread for the next stream: of steady and of bulk threads, each for streams that send
    /// and for those that receive.
    next: [[AtomicUsize; 2]; 2],
    activity: Arc<Activity>,
}

impl Workers {
    pub(in crate::rails) fn start(config: &Config) -> Result<Workers> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (steady, bulk) = if config.net_threads > 0 { (config.net_threads, 0) } else { threads(cores) };
        let few = config.spin.min(SHORT_SPIN);
        let few = Spins { idle: few, busy: few };
        let enough = cores >= 2 * (steady + OTHERS);
        let spins = if enough { Spins { idle: config.spin, busy: BUSY_SPIN } } else { few };
        let next = [steady, bulk].map(|threads| [0, threads / 2].map(AtomicUsize::new));
        // If one does not start, those before it end with this.
        let all = Vec::with_capacity(steady + bulk);
        let mut workers = Workers { all, bulk, next, activity: Arc::new(Activity::default()) };
        for index in 0..steady + bulk {
            let spins = if index < steady { spins } else { few };
            workers.all.push(Worker::start(index, spins, &workers.activity)?);
        }
        if !enough {
            workers.activity.set_sleepers(workers.all.iter().map(|(worker, _)| Arc::downgrade(worker)));
        }
        Ok(workers)
    }

    pub(in crate::rails) fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// Returns true if stream `stream` of `streams` is for long messages alone: the last ones are, in the share that
    /// bulk threads have of all.
    pub(in crate::rails) fn is_bulk(&self, stream: usize, streams: usize) -> bool {
        stream >= streams - streams * self.bulk / self.all.len()
    }

    /// Returns the thread for a new stream: each in turn, and those for receiving apart, because a rank often does only
    /// one of the two, or one after the other.
    pub(in crate::rails) fn next(&self, receives: bool, bulk: bool) -> Arc<Worker> {
        let (steady, bulk_threads) = self.all.split_at(self.all.len() - self.bulk);
        let threads = if bulk { bulk_threads } else { steady };
        let next = self.next[usize::from(bulk)][usize::from(receives)].fetch_add(1, Ordering::Relaxed);
        threads[next % threads.len()].0.clone()
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
    fn half_of_the_cores_have_threads_and_those_that_spin_come_first() {
        let of = |cores: [usize; 5]| cores.map(threads);
        assert_eq!(of([1, 2, 3, 4, 5]), [(1, 0), (1, 0), (1, 0), (2, 0), (2, 0)]);
        assert_eq!(of([6, 8, 12, 16, 192]), [(1, 2), (2, 2), (4, 2), (6, 2), (8, 0)]);
    }

    #[test]
    fn the_last_streams_are_on_bulk_threads() {
        let mut workers = Workers::start(&Config::default().with(|c| c.net_threads = 3)).unwrap();
        assert!((0..4).all(|stream| !workers.is_bulk(stream, 4)));
        workers.bulk = 2;
        assert_eq!([1, 2, 4].map(|streams| (0..streams).filter(|s| workers.is_bulk(*s, streams)).count()), [0, 1, 2]);
        assert!(!workers.is_bulk(1, 4) && workers.is_bulk(2, 4));
        let number = |bulk| {
            let next = workers.next(true, bulk);
            workers.all.iter().position(|(worker, _)| Arc::ptr_eq(worker, &next)).unwrap()
        };
        assert_eq!([number(false), number(false), number(true), number(true), number(true)], [0, 0, 1, 2, 1]);
    }
}
