//! The state of each exercise after a check of the whole milestone: a line with a mark.

use std::fmt;

use crate::exercise::Exercise;
use crate::faults::{self, Shown};

/// State of one exercise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Its own tests passed, or the whole milestone did.
    Passed,
    /// One of its own tests failed.
    Failed,
    /// Its function panicked.
    Panics,
    /// Its own tests have not ended, or not begun.
    NotRun,
    /// Not run: this machine lacks something that its tests need.
    Unchecked,
    /// It is still the stub.
    NotWritten,
    /// It has no test that needs no other exercise.
    Shared,
}

/// An exercise and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Number of the exercise.
    pub number: u32,
    /// Name of its function.
    pub function: String,
    /// State of it.
    pub state: State,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, words) = match self.state {
            State::Passed => ('✓', "passed"),
            State::Failed => ('✗', "failed"),
            State::Panics => ('✗', "panics"),
            State::NotRun => ('-', "not tested: the tests were stopped before"),
            State::Unchecked => ('-', "written, and not checked here"),
            State::NotWritten => ('-', "not written yet"),
            State::Shared => ('-', "written; its tests need other exercises, too"),
        };
        write!(f, "  {mark} exercise {} (`{}`): {words}", self.number, self.function)
    }
}

/// The verdicts on all `exercises`: `open` are not written; `failed`, `passed` and `shown` tell of the tests.
/// `whole`: all of the milestone's tests passed. `stopped`: they were ended early. `lacks`: some were left out for want
/// of a device.
pub(crate) fn of(
    exercises: &[Exercise],
    open: &[u32],
    (failed, passed): (&[String], &[String]),
    shown: &Shown,
    (whole, stopped, lacks): (bool, bool, bool),
) -> Vec<Verdict> {
    let state = |e: &Exercise| {
        let own = |test: &&String| faults::is_own(exercises, e, test);
        if open.contains(&e.number) {
            State::NotWritten
        } else if shown.faults.iter().any(|f| f.number == e.number) {
            State::Panics
        } else if failed.iter().filter(own).any(|test| !shown.waiting.contains(test)) {
            State::Failed
        } else if lacks && e.needs.is_some() {
            State::Unchecked
        } else if whole || (passed.iter().any(|test| own(&test)) && !failed.iter().any(|test| own(&test))) {
            State::Passed
        } else if stopped {
            State::NotRun
        } else {
            State::Shared
        }
    };
    exercises.iter().map(|e| Verdict { number: e.number, function: e.function.clone(), state: state(e) }).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::exercise;

    #[test]
    fn each_exercise_has_its_own_verdict() {
        let text = ["f", "g", "h", "i"].map(|f| format!("fn {f}() {{}}\n"));
        let text: String = text.iter().zip(1..).map(|(f, n)| format!("// EXERCISE {n} (How): it.\n{f}")).collect();
        let all = exercise::parse(Path::new("src/a.rs"), &text).unwrap();
        let tests = |names: &[&str]| names.iter().map(|n| format!("a::tests::{n}")).collect::<Vec<_>>();
        let (failed, passed) = (tests(&["g_adds", "h_adds"]), tests(&["f_adds"]));
        let shown = Shown { waiting: tests(&["h_adds"]), ..Shown::default() };
        let states = |stopped| {
            let all = of(&all, &[4], (&failed, &passed), &shown, (false, stopped, false));
            all.iter().map(|v| v.state).collect::<Vec<_>>()
        };
        assert_eq!(states(false), [State::Passed, State::Failed, State::Shared, State::NotWritten]);
        assert_eq!(states(true)[2], State::NotRun);
        let all_passed = of(&all, &[], (&[], &passed), &Shown::default(), (true, false, true));
        assert!(all_passed.iter().all(|v| v.state == State::Passed));
        assert_eq!(all_passed[1].to_string(), "  ✓ exercise 2 (`g`): passed");
    }
}
