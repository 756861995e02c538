//! Ranks that are threads, for the tests.

use std::panic::resume_unwind;
use std::time::Duration;

use tinynccl::{Comm, Config};

/// Longest wait for another rank. All are threads here, and what they do takes a moment.
const PATIENCE: Duration = Duration::from_secs(5);

/// The defaults, without long waits.
pub fn config() -> Config {
    let mut config = Config::default();
    (config.timeout, config.connect_timeout) = (PATIENCE, PATIENCE);
    config
}

/// The results of `rank` on each of `ranks` threads.
pub fn on_threads<T: Send>(ranks: usize, config: Config, rank: impl Fn(&Comm) -> T + Sync) -> Vec<T> {
    let comms = Comm::threads(ranks, config).unwrap();
    let rank = &rank;
    std::thread::scope(|scope| {
        // A rank that panics takes its communicator with it, so the others fail instead of waiting.
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm))).collect();
        // The panic of the thread is the test's: it was printed where it happened.
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}
