//! Reads what the compiler and the tests said: which of the learner's functions is at fault, and where.

use std::collections::BTreeMap;
use std::path::Path;

use crate::course::Step;
use crate::exercise::{self, Exercise};
use crate::stub;

/// Number of lines shown of a failed test.
const SHOWN: usize = 25;

/// A function that the learner wrote: its number, its file, and its lines there.
#[derive(Debug, Clone)]
struct Written {
    number: u32,
    file: String,
    /// The file as the compiler names it: from the learner's workspace.
    path: String,
    first: usize,
    last: usize,
}

/// The functions that the learner wrote.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources(Vec<Written>);

/// A fault in one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The exercise.
    pub(crate) number: u32,
    /// `exercise 2 panics at src/by_hand.rs:36: index out of bounds`
    pub(crate) words: String,
}

impl Sources {
    /// The functions of `folder` that are no longer among the exercises `open`. Markers that the learner broke name none.
    pub(crate) fn read(step: &Step, folder: &Path, open: &[u32]) -> Sources {
        let all = exercise::of(step, folder).unwrap_or_default();
        let written = all.into_iter().filter(|e| !open.contains(&e.number)).filter_map(|e| {
            let text = std::fs::read_to_string(folder.join(&e.file)).ok()?;
            let line = |at: usize| 1 + text[..at].matches('\n').count();
            let (first, last) = (line(e.body.start), line(e.body.end));
            let file = e.file.display().to_string();
            Some(Written { number: e.number, path: format!("{}/{file}", step.folder()), file, first, last })
        });
        Sources(written.collect())
    }

    /// The function at `place`, as `07-allreduce-tcp/src/by_hand.rs:36:9:`, and the place from the milestone's folder.
    fn at<'a>(&'a self, place: &str) -> Option<(&'a Written, String)> {
        let mut parts = place.trim().trim_end_matches(':').split(':');
        let (file, line) = (parts.next()?, parts.next()?.parse().ok()?);
        let found = self.0.iter().find(|w| file == w.path && (w.first..=w.last).contains(&line))?;
        Some((found, format!("{}:{line}", found.file)))
    }

    /// The first panic in one of the functions.
    fn panic(&self, lines: &[&str]) -> Option<Fault> {
        lines.iter().enumerate().find_map(|(at, line)| {
            let (written, place) = self.at(line.split_once(" panicked at ")?.1)?;
            let message = lines.get(at + 1).map_or("", |l| l.trim());
            Some(Fault { number: written.number, words: says(written.number, "panics at", &place, message) })
        })
    }

    /// The first error of the compiler in one of the functions.
    pub(crate) fn error(&self, said: &str) -> Option<Fault> {
        let mut message = "";
        said.lines().find_map(|line| {
            if line.starts_with("error") {
                message = line.split_once(": ").map_or(line, |(_, message)| message);
            }
            let (written, place) = self.at(line.trim_start().strip_prefix("--> ")?)?;
            let words = says(written.number, "does not compile:", &place, message);
            (!message.is_empty()).then_some(Fault { number: written.number, words })
        })
    }
}

fn says(number: u32, what: &str, place: &str, message: &str) -> String {
    format!("exercise {number} {what} {place}: {message}")
}

/// The part of a report that the tests give.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    /// For the learner.
    pub(crate) text: String,
    /// Faults in what the learner wrote.
    pub(crate) faults: Vec<Fault>,
    /// Tests without a verdict, because they reached an exercise that is not written.
    pub(crate) waiting: Vec<String>,
}

/// Reads what test programs printed of the tests that `failed`. First come panics in functions that the learner wrote,
/// one line each; then other tests, by name if there is such a panic, else with their first lines; then the names of the
/// tests that reached an unwritten exercise.
pub(crate) fn read(stdout: &str, failed: &[String], sources: &Sources) -> Shown {
    let mut tests: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut inside = false;
    for line in stdout.lines() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----")) {
            inside = failed.iter().any(|f| f == name);
            if inside {
                tests.push((name, Vec::new()));
            }
        }
        inside &= line != "failures:" && line != "successes:";
        if let Some((_, lines)) = tests.last_mut().filter(|_| inside) {
            lines.push(line);
        }
    }
    let mut shown = Shown::default();
    let mut panics: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut unwritten: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, lines) in tests {
        if let Some(fault) = sources.panic(&lines) {
            panics.entry(fault.words.clone()).or_default().push(name);
            if !shown.faults.contains(&fault) {
                shown.faults.push(fault);
            }
            continue;
        }
        if let Some(exercise) = lines.iter().find_map(|l| stub::unwritten(l)) {
            unwritten.entry(exercise).or_default().push(name);
            shown.waiting.push(name.to_owned());
            continue;
        }
        others.push((name, lines));
    }
    for (words, names) in &panics {
        shown.text += &format!("{words}\n  in {}\n", names.join(", "));
    }
    for (name, lines) in others.iter().filter(|_| panics.is_empty()) {
        let lines = lines.iter().filter(|l| !l.is_empty() && !l.starts_with("note: run with `RUST_BACKTRACE"));
        for line in lines.clone().take(SHOWN) {
            shown.text += line;
            shown.text.push('\n');
        }
        if let more @ 1.. = lines.count().saturating_sub(SHOWN) {
            shown.text += &format!("… {more} more lines: `cargo test {name}` in that folder\n");
        }
        shown.text.push('\n');
    }
    if !panics.is_empty() && !others.is_empty() {
        let names: Vec<&str> = others.iter().map(|(name, _)| *name).collect();
        shown.text += &format!("These fail as well, perhaps for the same reason: {}\n", names.join(", "));
    }
    for (exercise, names) in unwritten {
        shown.text += &format!("{exercise} is not written yet, and these tests need it: {}\n", names.join(", "));
    }
    shown
}

/// Returns true if `test` is one of the exercise's own, which need no other exercise: a test of its file's module if it
/// is the only exercise there, else one that begins with the function's name.
pub fn is_own(exercises: &[Exercise], e: &Exercise, test: &str) -> bool {
    let mut module: Vec<&str> = e.file.iter().filter_map(|part| part.to_str()).collect();
    let stem = module.pop().and_then(|file| file.strip_suffix(".rs"));
    let (Some(&"src"), Some(stem)) = (module.first(), stem) else { return false };
    module.remove(0);
    if !["main", "lib", "mod"].contains(&stem) {
        module.push(stem);
    }
    let path: Vec<&str> = test.split("::").collect();
    let Some((name, path)) = path.split_last() else { return false };
    // `measure::tests::…`, but not `measure::other::tests::…`.
    let inside = path.strip_prefix(module.as_slice()).is_some_and(|rest| matches!(rest, [_]));
    let alone = !exercises.iter().any(|other| other.file == e.file && other.number != e.number);
    inside && (alone || name.strip_prefix(e.function.as_str()).is_some_and(|rest| rest.starts_with('_')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: &str = "
running 3 tests
test a::one ... ok
test two ... FAILED
test three ... ok

successes:

---- a::one stdout ----
hello

failures:

---- two stdout ----

thread 'two' panicked at src/lib.rs:1:
not yet implemented: exercise 2 of 07-allreduce-tcp: add.
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace


failures:
    two
";

    fn sources() -> Sources {
        let (file, path) = ("src/by_hand.rs".to_owned(), "07-x/src/by_hand.rs".to_owned());
        Sources(vec![Written { number: 2, file, path, first: 30, last: 40 }])
    }

    #[test]
    fn only_what_failed_is_shown() {
        let two = ["two".to_owned()];
        let shown = read(OUT, &two, &sources());
        assert_eq!(shown.text, "exercise 2 of 07-allreduce-tcp is not written yet, and these tests need it: two\n");
        assert_eq!(shown.waiting, two);
        let wrong = OUT.replace("not yet implemented: exercise 2 of 07-allreduce-tcp: add.", &"wrong\n".repeat(40));
        let text = read(&wrong, &two, &sources()).text;
        assert!(text.contains("panicked at") && !text.contains("hello") && !text.contains("BACKTRACE"), "{text}");
        assert!(text.ends_with("… 17 more lines: `cargo test two` in that folder\n\n"), "{text}");
    }

    #[test]
    fn a_panic_in_what_was_written_comes_before_what_is_not() {
        let both = OUT.replace(
            "\nthread 'two'",
            "\nthread '<unnamed>' (7) panicked at 07-x/src/by_hand.rs:36:9:\nindex 4\n\nthread 'two'",
        );
        let shown = read(&both, &["two".to_owned()], &sources());
        assert_eq!(shown.text, "exercise 2 panics at src/by_hand.rs:36: index 4\n  in two\n");
        assert_eq!((shown.faults[0].number, shown.waiting.len()), (2, 0));
        let elsewhere = both.replace("rs:36:9", "rs:41:9");
        assert!(read(&elsewhere, &["two".to_owned()], &sources()).faults.is_empty(), "a line of the tests");
    }

    #[test]
    fn errors_of_the_compiler_name_the_exercise() {
        let said = "warning: unused\n  --> 07-x/src/by_hand.rs:31:1\nerror[E0308]: mismatched types\n  --> 07-x/src/by_hand.rs:33:5\n";
        let fault = sources().error(said).unwrap();
        assert_eq!(fault.words, "exercise 2 does not compile: src/by_hand.rs:33: mismatched types");
        assert_eq!(sources().error("error: expected `;`\n --> 07-x/src/naive.rs:33:5\n"), None);
    }

    #[test]
    fn own_tests_are_found_by_module_and_name() {
        let text = "// EXERCISE 1 (How): one.\nfn f() {}\n// EXERCISE 2 (Why): two.\nfn g() {}\n";
        let two = exercise::parse(Path::new("src/a.rs"), text).unwrap();
        let own = |e: &Exercise, test| is_own(&two, e, test);
        assert!(own(&two[0], "a::tests::f_adds") && !own(&two[0], "a::tests::g_adds"));
        assert!(!own(&two[0], "a::tests::full") && !own(&two[0], "f_adds") && !own(&two[0], "b::tests::f_adds"));
        let one = &exercise::parse(Path::new("src/cpu/mod.rs"), "// EXERCISE 1 (How): one.\nfn f() {}\n").unwrap();
        assert!(is_own(one, &one[0], "cpu::tests::any") && !is_own(one, &one[0], "cpu::adam::tests::any"));
    }
}
