//! A way out of a blocking call for programs whose signals are handled elsewhere: an interpreter that wants its Ctrl-C.
//!
//! A signal only wakes a wait; its handler decides whether it ends the call, and an interpreter runs handlers between
//! its own instructions. So a call made inside of [`watched`] asks, about every 50 ms and after each signal, and gives
//! [`Error::Aborted`](crate::Error::Aborted) on all ranks when the answer is yes: a collective that one rank has left
//! cannot be finished by the others.

use std::cell::Cell;

/// True when the running call is to end.
pub type Check = fn() -> bool;

thread_local! {
    static CHECK: Cell<Option<Check>> = const { Cell::new(None) };
}

/// Runs `call`, whose waits in this thread ask `check`.
pub fn watched<R>(check: Check, call: impl FnOnce() -> R) -> R {
    /// Puts back what was there before, also when the call unwinds.
    struct Restore(Option<Check>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CHECK.set(self.0);
        }
    }
    let _restore = Restore(CHECK.replace(Some(check)));
    call()
}

/// The check of this thread's call, for one that watches for more.
pub(crate) fn check() -> Option<Check> {
    CHECK.get()
}

/// Returns true if this thread's call is to end. Asked by waits that are about to sleep.
pub(crate) fn asked_to_stop() -> bool {
    CHECK.get().is_some_and(|check| check())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use crate::{Comm, Config, Error};

    #[test]
    fn a_wait_ends_when_asked_on_all_ranks() {
        static STOP: AtomicBool = AtomicBool::new(false);
        for count in [1, 1 << 20] {
            STOP.store(false, Ordering::Release);
            let config = Config { timeout: Duration::from_secs(60), ..Config::default() };
            let mut comms = Comm::threads(2, config).unwrap();
            let (other, waiting) = (comms.pop().unwrap(), comms.pop().unwrap());
            let thread = std::thread::spawn(move || {
                let mut data = vec![0f32; count];
                waiting.barrier().unwrap();
                let outcome =
                    super::watched(|| STOP.load(Ordering::Acquire), || waiting.broadcast_in_place(&mut data, 1));
                assert!(!super::asked_to_stop(), "the check ends with the call");
                outcome
            });
            other.barrier().unwrap();
            STOP.store(true, Ordering::Release);
            let error = thread.join().unwrap().unwrap_err();
            assert!(matches!(&error, Error::Aborted { op, .. } if op.starts_with("broadcast")), "{error}");
            let error = other.barrier().unwrap_err();
            assert!(error.to_string().contains("rank 0: interrupted"), "{error}");
        }
    }
}
