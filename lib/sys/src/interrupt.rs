//! A way out of a blocking call for programs whose signals are handled elsewhere: an interpreter that wants its Ctrl-C.
//!
//! A signal only wakes a wait; its handler decides whether it ends the call, and an interpreter runs handlers between
//! its own instructions. So a call made inside of [`watched`] asks, about every 50 ms and after each signal, and gives
//! [`Error::Aborted`](tinynccl_plan::Error::Aborted) on all ranks when the answer is yes: a collective that one rank
//! has left cannot be finished by the others.

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

/// Returns the check of this thread's call, for one that watches for more.
pub fn check() -> Option<Check> {
    CHECK.get()
}

/// Returns true if this thread's call is to end. Asked by waits that are about to sleep.
pub fn asked_to_stop() -> bool {
    CHECK.get().is_some_and(|check| check())
}
