//! Pins a rank to one core, so that the scheduler does not move it during a measurement.

use program_kit::machine;

/// Pins the calling thread to core `index`, modulo their number, of the cores that it may use. `None`: not pinned.
pub(crate) fn to_core(index: usize) -> Option<usize> {
    let cores = machine::cores().ok()?;
    let core = *cores.get(index % cores.len().max(1))?;
    machine::pin(core).ok().map(|()| core)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_also_with_more_ranks_than_cores() {
        for index in [0, 1 << 20] {
            std::thread::spawn(move || {
                let core = to_core(index).unwrap();
                assert_eq!(machine::cores().unwrap(), [core]);
            })
            .join()
            .unwrap();
        }
    }
}
