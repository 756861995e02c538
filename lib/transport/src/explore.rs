//! Scenarios under the model checker loom.
//!
//! loom runs a scenario in every order of its steps (or in all with a bounded number of preemptions, where that would
//! be too many), and lets every load return every value that the orderings allow. It fails a scenario when an assertion
//! does, when plain memory (payloads, headers) is read and written without an order between, and when all threads
//! sleep, which is what a lost wake-up comes to. What fences, memory, the doorbell and futexes stand for: see `sync`.
//!
//! Scenarios also run with one step of the protocol weakened, and must fail then: that shows that they would notice.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tinynccl_sys::sync::{Step, forget, weaken};

/// Runs a scenario with at most `preemptions` in each of its orders (`None`: all orders). Returns their number.
fn explore(preemptions: Option<usize>, scenario: impl Fn() + Sync + Send + 'static) -> usize {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let mut builder = loom::model::Builder::new();
    // LOOM_MAX_PREEMPTIONS, when set, overrules.
    builder.preemption_bound = builder.preemption_bound.or(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        forget();
        scenario();
    });
    runs.load(Ordering::Relaxed)
}

/// The scenario fails with these steps weakened, and loom or an assertion says why.
pub fn must_fail(
    name: &str,
    preemptions: Option<usize>,
    steps: &'static [Step],
    scenario: impl Fn() + Sync + Send + Copy + 'static,
) {
    let outcome = catch_unwind(AssertUnwindSafe(|| weaken(steps, || explore(preemptions, scenario))));
    let why = match outcome {
        Ok(runs) => panic!("{name} without {steps:?}: not noticed in {runs} executions"),
        Err(why) => why.downcast_ref::<String>().cloned().or(why.downcast_ref::<&str>().map(|s| s.to_string())),
    };
    let why = why.unwrap_or_default();
    println!(
        "{name} without {steps:?} fails: {}",
        why.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or_default()
    );
}

/// The scenario holds with these steps weakened.
pub fn must_hold(
    name: &str,
    preemptions: Option<usize>,
    steps: &'static [Step],
    scenario: impl Fn() + Sync + Send + Copy + 'static,
) {
    let runs = weaken(steps, || explore(preemptions, scenario));
    println!("{name} without {steps:?} holds in {runs} executions");
}
