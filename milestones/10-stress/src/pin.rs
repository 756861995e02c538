//! Keeps a rank on one core, so that the scheduler does not move it in the middle of a measurement.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Puts the calling thread on core `index` of those it may use, if there is one for each of `ranks`.
///
/// Threads that it starts afterwards inherit the core; those started before keep theirs. `None`: not pinned.
pub(crate) fn to_core(index: usize, ranks: usize) -> Option<usize> {
    let allowed = sched_getaffinity(None).ok()?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    if ranks > cores.len() {
        return None;
    }
    let core = *cores.get(index % cores.len())?;
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).ok().map(|()| core)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_where_there_are_cores_enough() {
        std::thread::spawn(|| {
            assert_eq!(to_core(0, CpuSet::MAX_CPU + 1), None);
            let core = to_core(0, 1).unwrap();
            let now = sched_getaffinity(None).unwrap();
            assert!(now.is_set(core));
            assert_eq!(now.count(), 1);
        })
        .join()
        .unwrap();
    }
}
