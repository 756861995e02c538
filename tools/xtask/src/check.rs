//! Builds a learner's step, runs its tests, and reports the faults briefly, with the section to read.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use program_kit::process::{Outcome, run};

use crate::course::Step;
use crate::exercise::{self, Exercise, Needs};
use crate::learn::Learn;
use crate::stub;

/// Number of lines shown of a failed test.
const SHOWN: usize = 25;
/// The longest time of a build: everything, from nothing, on a slow machine.
const BUILD_LIMIT: Duration = Duration::from_secs(3600);

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// Names of the tests that failed, and of those that did not end.
    pub failed: Vec<String>,
    /// How many passed.
    pub passed: usize,
    /// Output of the compiler, the tests and the program, when something is wrong.
    pub output: String,
    /// Where to continue, when something is wrong.
    pub hint: String,
    /// Parts that were not checked here, and how to check them.
    pub unchecked: Vec<String>,
}

impl Report {
    /// True when nothing is wrong.
    pub fn ok(&self) -> bool {
        self.hint.is_empty()
    }
}

/// Checks the learner's step; `vm`: with RDMA, in the virtual machine.
///
/// # Errors
/// It was not started; cargo or the machine cannot be started.
pub fn check(learn: &Learn, step: &Step, vm: bool) -> Result<Report> {
    ensure!(learn.started(step), "{} was not started: `cargo xtask start {:02}`", step.folder(), step.number);
    ensure!(!vm || step.verbs, "{} has nothing that needs the virtual machine: leave --vm out", step.folder());
    learn.prepare()?;
    let exercises = exercise::of(step, &step.solution(&learn.root))?;
    let folder = learn.step(step);
    let open = stub::open(step, &folder, &exercises)?;
    let mut report = Report::default();

    let (build, programs) = build(&folder, vm)?;
    if !build.success() {
        report.output = build.stderr;
        report.hint =
            format!("it does not compile; {}", pointer(learn, step, chosen(&exercises, &open, &report), &open));
        return Ok(report);
    }
    let mut text = String::new();
    for program in &programs {
        let outcome = test(learn, step, program, vm)?;
        report.passed += outcome.stdout.lines().filter(|l| l.starts_with("test ") && l.ends_with(" ... ok")).count();
        let mut failed = failures(&outcome.stdout);
        if outcome.late {
            let hanging = unfinished(program, &outcome.stdout)?;
            report.output += &format!("still running after {} s: {}\n", step.limit.as_secs(), hanging.join(", "));
            failed.extend(hanging);
        }
        report.output += &shown(&outcome, &failed);
        if !outcome.success() && failed.is_empty() {
            failed.push(format!("the test program {}", program.display()));
        }
        report.failed.extend(failed);
        text += &outcome.stdout;
        text += &outcome.stderr;
    }
    let skipped: BTreeSet<&str> = text.lines().map(str::trim).filter(|l| l.starts_with("SKIPPED")).collect();
    let lacks = |needs: Needs| if needs == Needs::Rdma { !vm } else { !skipped.is_empty() };
    report.unchecked = unchecked(step, &exercises, &skipped, vm, lacks);
    let todo = exercises.iter().find(|e| open.contains(&e.number) && !e.needs.is_some_and(lacks));
    if !report.failed.is_empty() || todo.is_some() {
        report.hint = pointer(learn, step, chosen(&exercises, &open, &report), &open);
    }
    Ok(report)
}

/// Builds the tests. Returns what cargo said, and the programs.
fn build(folder: &Path, vm: bool) -> Result<(Outcome, Vec<PathBuf>)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(&cargo);
    // The folder's own settings say where to build. A cargo that runs this program may hold the lock of another place.
    command
        .current_dir(folder)
        .env_remove("CARGO_TARGET_DIR")
        .args(["test", "--tests", "--no-run", "--quiet", "--message-format=json-render-diagnostics"])
        .args(vm.then_some("--features=verbs"));
    let outcome = run(&mut command, BUILD_LIMIT)?;
    let programs = outcome.stdout.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let test = message["profile"]["test"] == true;
        Some(PathBuf::from(message["executable"].as_str().filter(|_| test)?))
    });
    let programs = programs.collect();
    Ok((outcome, programs))
}

/// Runs one test program where cargo would.
fn test(learn: &Learn, step: &Step, program: &Path, vm: bool) -> Result<Outcome> {
    let folder = learn.step(step);
    let skips = step.skip.iter().flat_map(|s| ["--skip", s]);
    if !vm {
        let mut command = Command::new(program);
        command
            .current_dir(&folder)
            .env("CARGO_MANIFEST_DIR", &folder)
            .env("RUST_BACKTRACE", "0")
            .arg("--show-output")
            .args(skips);
        return run(&mut command, step.limit);
    }
    let mut command = Command::new(learn.root.join("scripts/rxe-vm.sh"));
    command
        .env("RUST_BACKTRACE", "0")
        .args(["--pair", "--timeout", "400", "--mem", "2G", "--env", "TINYNCCL_TEST_VERBS=1", "--"])
        .args(["sh", "-c", "cd \"$0\" && exec \"$@\""])
        .arg(&folder)
        .arg(program)
        .args(["--show-output", "--test-threads=1"])
        .args(skips);
    let outcome = run(&mut command, step.limit + Duration::from_secs(200))?;
    ensure!(
        !outcome.stderr.contains("rxe-vm: cannot run here"),
        "the virtual machine cannot run here: {}",
        outcome.stderr.trim()
    );
    Ok(outcome)
}

/// Names of the tests that failed.
fn failures(stdout: &str) -> Vec<String> {
    let names = stdout.lines().filter_map(|l| l.strip_prefix("test ")?.strip_suffix(" ... FAILED"));
    names.map(str::to_owned).collect()
}

/// Names of the tests that had not ended when the program was.
fn unfinished(program: &Path, stdout: &str) -> Result<Vec<String>> {
    let all = run(Command::new(program).arg("--list"), Duration::from_secs(30))?.stdout;
    let names = all.lines().filter_map(|l| l.strip_suffix(": test"));
    let ended = |name: &&str| !stdout.lines().any(|l| l.starts_with(&format!("test {name} ... ")));
    Ok(names.filter(ended).map(str::to_owned).collect())
}

/// What a test program printed of the tests that failed, or all when it names none. A test that met an exercise which
/// is not written yet is one name in a list; of the others the first lines are shown.
fn shown(outcome: &Outcome, failed: &[String]) -> String {
    if outcome.success() {
        return String::new();
    }
    let mut tests: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut inside = false;
    for line in outcome.stdout.lines() {
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
    let mut unwritten: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut text = String::new();
    for (name, lines) in tests {
        if let Some(exercise) = lines.iter().find_map(|l| stub::unwritten(l)) {
            unwritten.entry(exercise).or_default().push(name);
            continue;
        }
        let lines = lines.iter().filter(|l| !l.is_empty() && !l.starts_with("note: run with `RUST_BACKTRACE"));
        for line in lines.clone().take(SHOWN) {
            text += line;
            text.push('\n');
        }
        if let more @ 1.. = lines.count().saturating_sub(SHOWN) {
            text += &format!("… {more} more lines: `cargo test {name}` in that folder\n");
        }
        text.push('\n');
    }
    for (exercise, names) in unwritten {
        text += &format!("{exercise} is not written yet, and these tests need it: {}\n", names.join(", "));
    }
    if text.is_empty() { format!("{}{}", outcome.stdout, outcome.stderr) } else { text }
}

/// The unchecked parts: exercises that need something missing here, and tests that were skipped.
fn unchecked(
    step: &Step,
    exercises: &[Exercise],
    skipped: &BTreeSet<&str>,
    vm: bool,
    lacks: impl Fn(Needs) -> bool,
) -> Vec<String> {
    let mut lines = Vec::new();
    for needs in [Needs::Rdma, Needs::Gpu, Needs::Torch] {
        let these: Vec<&Exercise> = exercises.iter().filter(|e| e.needs == Some(needs) && lacks(needs)).collect();
        let whole = needs == Needs::Rdma && step.verbs && !vm;
        if these.is_empty() && !whole {
            continue;
        }
        let names: Vec<String> = these.iter().map(|e| format!("exercise {} (`{}`)", e.number, e.function)).collect();
        let what = match names.as_slice() {
            [] => "the tests over RDMA".to_owned(),
            [one] => format!("{one} needs {needs}"),
            all => format!("{} need {needs}", all.join(", ")),
        };
        let how = match needs {
            Needs::Rdma => {
                format!("`cargo xtask check {:02} --vm`, once `scripts/setup.sh --verbs` has run as root", step.number)
            }
            Needs::Gpu => "run the same on a machine with an NVIDIA GPU, its driver and NVRTC".to_owned(),
            Needs::Torch => "`scripts/setup.sh --python` as root installs them".to_owned(),
        };
        lines.push(format!("NOT CHECKED HERE: {what}: {how}"));
    }
    let covered = !lines.is_empty();
    lines.extend(skipped.iter().filter(|_| !covered).map(|l| (*l).to_owned()));
    lines
}

/// The exercise to look at: the one that the output names, the one whose file a failed test belongs to, the first that
/// is still open, or the first.
fn chosen<'a>(exercises: &'a [Exercise], open: &[u32], report: &Report) -> Option<&'a Exercise> {
    let named = exercises.iter().find(|e| report.output.contains(&format!("exercise {} of ", e.number)));
    let module = |e: &&Exercise| {
        let stem = e.file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let own = |f: &String| f.split("::").any(|part| part == stem);
        report.failed.iter().any(own) || report.output.contains(&format!("{}:", e.file.display()))
    };
    let still = |e: &&Exercise| open.contains(&e.number);
    named
        .or_else(|| exercises.iter().find(|e| module(e) && still(e)))
        .or_else(|| exercises.iter().find(module))
        .or_else(|| exercises.iter().find(still))
        .or(exercises.first())
}

/// One line: which exercise, where, what to write, which section of which README.
fn pointer(learn: &Learn, step: &Step, exercise: Option<&Exercise>, open: &[u32]) -> String {
    let readme = format!("milestones/{}/README.md", step.folder());
    let Some(e) = exercise else { return format!("read {readme}") };
    let state = if open.contains(&e.number) { "is still to be written" } else { "may be where to look" };
    format!(
        "exercise {} (`{}` in {}) {state}: {} Read \"{}\" in {readme}.",
        e.number,
        e.function,
        learn.shown(&learn.step(step).join(&e.file)),
        e.text,
        e.section
    )
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

    fn exercises() -> Vec<Exercise> {
        let text = "// EXERCISE 1 (How): one.\nfn f() {}\n// EXERCISE 2 (Why; needs GPU): two.\nfn g() {}\n";
        exercise::parse(Path::new("src/a.rs"), text).unwrap()
    }

    #[test]
    fn only_what_failed_is_shown() {
        assert_eq!(failures(OUT), ["two"]);
        let outcome = Outcome { code: Some(101), stdout: OUT.to_owned(), ..Outcome::default() };
        let text = shown(&outcome, &failures(OUT));
        assert_eq!(text, "exercise 2 of 07-allreduce-tcp is not written yet, and these tests need it: two\n");
        let wrong = OUT.replace("not yet implemented: exercise 2 of 07-allreduce-tcp: add.", &"wrong\n".repeat(40));
        let outcome = Outcome { stdout: wrong, ..outcome };
        let text = shown(&outcome, &failures(OUT));
        assert!(text.contains("panicked at") && !text.contains("hello") && !text.contains("BACKTRACE"), "{text}");
        assert!(text.ends_with("… 17 more lines: `cargo test two` in that folder\n\n"), "{text}");
        assert_eq!(shown(&Outcome { code: Some(0), ..outcome }, &[]), "");
    }

    #[test]
    fn the_hint_follows_what_was_said() {
        let all = exercises();
        let report = |output: &str, failed: &[&str]| Report {
            output: output.to_owned(),
            failed: failed.iter().map(|f| (*f).to_owned()).collect(),
            ..Report::default()
        };
        let number = |report: &Report, open: &[u32]| chosen(&all, open, report).unwrap().number;
        assert_eq!(number(&report("exercise 2 of 07", &["b"]), &[1, 2]), 2);
        assert_eq!(number(&report("", &["b"]), &[2]), 2, "the first that is open");
        assert_eq!(number(&report("", &["a::tests::x"]), &[]), 1, "by the test's module");
        let learn = Learn::new(Path::new("/x"), "learn").unwrap();
        let step = Step::find("7").unwrap();
        let hint = pointer(&learn, &step, Some(&all[1]), &[2]);
        assert_eq!(
            hint,
            "exercise 2 (`g` in learn/07-allreduce-tcp/src/a.rs) is still to be written: two. Read \"Why\" in milestones/07-allreduce-tcp/README.md."
        );
    }

    #[test]
    fn what_was_not_checked_is_said_with_a_way_to_check_it() {
        let step = Step::find("5").unwrap();
        let lines = unchecked(&step, &exercises(), &BTreeSet::new(), false, |n| n == Needs::Rdma);
        assert_eq!(lines.len(), 1);
        assert!(
            lines[0].starts_with("NOT CHECKED HERE: the tests over RDMA: `cargo xtask check 05 --vm`"),
            "{lines:?}"
        );
        let lines = unchecked(&step, &exercises(), &BTreeSet::from(["SKIPPED: no GPU"]), true, |n| n == Needs::Gpu);
        assert!(lines[0].starts_with("NOT CHECKED HERE: exercise 2 (`g`) needs a GPU: "), "{lines:?}");
        assert_eq!(
            unchecked(&step, &exercises(), &BTreeSet::from(["SKIPPED: mpirun"]), true, |_| false),
            ["SKIPPED: mpirun"]
        );
    }
}
