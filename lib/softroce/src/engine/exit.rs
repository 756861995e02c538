//! Acknowledgements that wait go out before a process ends that keeps its queue pairs, as those returning from `main` do.
//!
//! A peer whose last message was received but not acknowledged would repeat it to a process that is gone, and fail.
//! `exit(3)` calls the hook of this file. It takes no lock that it has to wait for, but tries for a while: whatever the
//! thread that ends the process holds, the process ends.

use std::sync::{Arc, Once, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::cell::{Cell, Sides};
use super::{Engine, Engines, Shared};

/// Longest delay of the process's end.
const LONGEST: Duration = Duration::from_millis(50);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_micros(50);

/// Calls the hook when the process ends. Once, however often this is called.
pub(super) fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the hook is a function without captures that does not unwind.
        if unsafe { libc::atexit(hook) } != 0 {
            log::info!("no room for another function at exit: acknowledgements may be lost at the process's end");
        }
    });
}

extern "C" fn hook() {
    // A child of `fork` has none of its parent's: it sends nothing in its parent's name.
    let Some(own) = Engines::get() else { return };
    let until = Instant::now() + LONGEST;
    let engines = || match own.all.try_lock() {
        Ok(engines) => Some(engines),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    let Some(engines) = attempt(until, engines) else { return };
    let all: Vec<Arc<Engine>> = engines.values().filter_map(Weak::upgrade).collect();
    drop(engines);
    for engine in &all {
        engine.shared.finish(until);
    }
    // The last owner of an engine would wait for its thread.
    all.into_iter().for_each(std::mem::forget);
}

/// Calls `f` until it gives something, or the time is over.
fn attempt<T>(until: Instant, f: impl Fn() -> Option<T>) -> Option<T> {
    loop {
        let result = f();
        if result.is_some() || Instant::now() >= until {
            return result;
        }
        std::thread::sleep(PAUSE);
    }
}

impl Shared {
    /// Sends what waits, in this thread: it is running, and the engine's may not be soon.
    fn finish(&self, until: Instant) {
        let cells = || self.cells.try_read().ok().map(|cells| cells.iter().flatten().cloned().collect());
        let Some(mut left) = attempt::<Vec<Arc<Cell>>>(until, cells) else { return };
        // Not the thread's buffers, which are gone or in use.
        let mut sides = Sides::default();
        loop {
            if let Ok(table) = self.memory.try_read() {
                left.retain(|cell| !cell.finish(self, &table, &mut sides));
            }
            if left.is_empty() || Instant::now() >= until {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}
