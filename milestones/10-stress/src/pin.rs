//! Pins a rank to one core, so that the scheduler does not move it during a measurement.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins the calling thread to core `index`, modulo their number, of the cores that it may use.
///
/// Threads that it starts afterwards inherit the core; threads started before keep theirs. `None`: not pinned.
pub(crate) fn to_core(index: usize) -> Option<usize> {
    let allowed = sched_getaffinity(None).ok()?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let core = *cores.get(index % cores.len().max(1))?;
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).ok().map(|()| core)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_also_with_more_ranks_than_cores() {
        for index in [0, CpuSet::MAX_CPU + 1] {
            std::thread::spawn(move || {
                let core = to_core(index).unwrap();
                let now = sched_getaffinity(None).unwrap();
                assert!(now.is_set(core));
                assert_eq!(now.count(), 1);
            })
            .join()
            .unwrap();
        }
    }
}
