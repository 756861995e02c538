//! The tests of a running test program: those that have ended, those that run, and an end for one that hangs.

use std::time::{Duration, Instant};

/// Time without an end of any test after which the running ones are named. They are named again after twice as long.
const FIRST: Duration = Duration::from_secs(2);

/// A view of one test program, from what it has printed so far.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Its tests, in the order in which it starts them.
    names: Vec<String>,
    /// Number of tests that it runs at once.
    threads: usize,
    /// Longest time without an end of any test.
    patience: Duration,
    ended: usize,
    since: Instant,
    next: Duration,
}

/// Action to take now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Nothing.
    Wait,
    /// Show this line.
    Say(String),
    /// End the program.
    End,
}

impl Watch {
    /// A watch over a program that begins now.
    pub(crate) fn new(names: Vec<String>, threads: usize, patience: Duration, now: Instant) -> Watch {
        Watch { names, threads, patience, ended: 0, since: now, next: FIRST }
    }

    /// Looks at the standard output so far.
    pub(crate) fn look(&mut self, stdout: &str, now: Instant) -> Look {
        let ended = self.names.iter().filter(|name| has_ended(stdout, name)).count();
        if ended > self.ended {
            (self.ended, self.since, self.next) = (ended, now, FIRST);
        }
        let waited = now.saturating_duration_since(self.since);
        if waited >= self.patience {
            return Look::End;
        }
        if waited < self.next {
            return Look::Wait;
        }
        self.next *= 2;
        let running = self.running(stdout).0.join(", ");
        match running.is_empty() {
            true => Look::Wait,
            false => Look::Say(format!("still running: {running} ({} s)", waited.as_secs())),
        }
    }

    /// The tests that run, and those that have not begun.
    pub(crate) fn running(&self, stdout: &str) -> (Vec<String>, Vec<String>) {
        let mut open: Vec<String> = self.names.iter().filter(|name| !has_ended(stdout, name)).cloned().collect();
        // The test harness begins the next one of its list when one ends.
        let waiting = open.split_off(open.len().min(self.threads));
        (open, waiting)
    }
}

fn has_ended(stdout: &str, name: &str) -> bool {
    stdout.lines().any(|l| l.strip_prefix("test ").and_then(|l| l.strip_prefix(name)).is_some_and(ends))
}

/// Returns true if the rest of a test's line has its result. With one thread the line is begun before the test is.
fn ends(rest: &str) -> bool {
    rest.split_once(" ... ").is_some_and(|(between, result)| {
        (between.is_empty() || between.starts_with(" - ")) && !result.trim().is_empty()
    })
}

/// Returns the number of tests that a program runs at once: `RUST_TEST_THREADS`, else the number of cores.
pub(crate) fn threads() -> usize {
    let set = std::env::var("RUST_TEST_THREADS").ok().and_then(|text| text.parse().ok());
    set.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn running_tests_are_named_soon_and_ended_when_none_ends() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut watch = Watch::new(names("a b::c b::cd e"), 2, Duration::from_secs(20), begin);
        let said = |text: &str| Look::Say(text.to_owned());
        assert_eq!(watch.look("", at(1)), Look::Wait);
        assert_eq!(watch.look("", at(2)), said("still running: a, b::c (2 s)"));
        assert_eq!(watch.look("", at(3)), Look::Wait, "once");
        // A test that ends gives the others time.
        let out = "running 4 tests\ntest b::cd ... ok\n";
        assert_eq!(watch.look(out, at(12)), Look::Wait);
        let out = "running 4 tests\ntest b::c ... ok\ntest b::cd ... ignored\ntest e ... FAILED\n";
        assert_eq!(watch.look(out, at(19)), Look::Wait);
        assert_eq!(watch.look(out, at(21)), said("still running: a (2 s)"));
        assert_eq!(watch.look(out, at(23)), said("still running: a (4 s)"));
        assert_eq!(watch.look(out, at(29)), said("still running: a (10 s)"));
        assert_eq!(watch.look(out, at(34)), Look::Wait);
        assert_eq!(watch.look(out, at(39)), Look::End);
        assert_eq!(watch.running(out), (names("a"), Vec::new()));
        assert_eq!(watch.running(""), (names("a b::c"), names("b::cd e")));
    }

    #[test]
    fn a_line_that_is_begun_is_no_end() {
        assert!(!has_ended("test a ... ", "a") && !has_ended("test a::b ... ok", "a"));
        assert!(has_ended("test a ... ok", "a") && has_ended("test a - should panic ... ok", "a"));
    }
}
