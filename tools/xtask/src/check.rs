//! Builds a learner's step, runs its tests, and reports the faults briefly, with the section to read.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use program_kit::process::{Outcome, run, run_shown, run_watched};

use crate::course::Step;
use crate::exercise::{self, Exercise, Needs};
use crate::faults::{self, Shown, Sources};
use crate::hint;
use crate::learn::{CONNECT_TIMEOUT, Learn};
use crate::stub;
use crate::verdict::{self, Verdict};
use crate::watch::{self, Look, Watch};

/// The longest time of a build: everything, from nothing, on a slow machine.
const BUILD_LIMIT: Duration = Duration::from_secs(3600);
/// The longest time of a test program in the virtual machine, whose emulated processor is slow.
const VM_LIMIT: Duration = Duration::from_secs(500);

/// Time between two looks at the running tests.
const TICK: Duration = Duration::from_millis(250);

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// Names of the tests that failed, and of those that did not end.
    pub failed: Vec<String>,
    /// Number of tests that passed.
    pub passed: usize,
    /// False when the learner's step does not compile: then no test ran.
    pub compiles: bool,
    /// A test program was ended because none of its tests did.
    pub endless: bool,
    /// The state of each exercise; none where one exercise alone is checked, or nothing was built.
    pub verdicts: Vec<Verdict>,
    /// Output of the compiler, the tests and the program, when something is wrong.
    pub output: String,
    /// Advice where to continue; empty when nothing is wrong.
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

/// Extent of a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scope {
    /// In the virtual machine, over the kernel's RDMA device.
    pub vm: bool,
    /// This exercise alone: its own tests, or all where it has none; other exercises may be unwritten.
    pub only: Option<u32>,
}

/// Checks the learner's step.
///
/// # Errors
/// It was not started; it has no such exercise; cargo or the machine cannot be started.
pub fn check(learn: &Learn, step: &Step, scope: Scope) -> Result<Report> {
    let Scope { vm, only } = scope;
    ensure!(learn.started(step), "{} was not started: `cargo xtask start {:02}`", step.folder(), step.number);
    ensure!(!vm || step.verbs, "{} has nothing that needs the virtual machine: leave --vm out", step.folder());
    learn.prepare()?;
    let exercises = exercise::of(step, &step.solution(&learn.root))?;
    let wanted = only.map(|number| exercise::find(step, &exercises, number)).transpose()?;
    let folder = learn.step(step);
    let open = stub::open(step, &folder, &exercises)?;
    let sources = Sources::read(step, &folder, &open);
    let mut report = Report::default();
    if let Some(e) = wanted.filter(|e| open.contains(&e.number)) {
        report.hint = pointer(learn, step, Some(e), &open, false);
        report.compiles = true;
        return Ok(report);
    }

    let programs = match build(&folder, vm)? {
        Ok(programs) => programs,
        Err(said) => {
            let fault = sources.error(&said);
            report.output = fault.as_ref().map_or(String::new(), |f| format!("{}\n\n", f.words)) + &said;
            let shown = Shown { faults: fault.into_iter().collect(), ..Shown::default() };
            report.hint = pointer(learn, step, chosen(&exercises, &open, &report, &shown), &open, false);
            return Ok(report);
        }
    };
    report.compiles = true;
    let (mut stdout, mut stderr, mut passed, mut not_run) = (String::new(), String::new(), Vec::new(), 0);
    let mut runs = selected(step, &programs, &exercises, wanted)?.into_iter();
    for (program, names) in runs.by_ref() {
        let (outcome, watch) = test(learn, step, program, vm, &names)?;
        passed.extend(results(&outcome.stdout, " ... ok"));
        let mut failed = results(&outcome.stdout, " ... FAILED");
        if outcome.late {
            let (running, waiting) = watch.running(&outcome.stdout);
            let seconds = if vm { VM_LIMIT } else { step.patience }.as_secs();
            report.output += &format!("stopped, still running after {seconds} s: {}\n", running.join(", "));
            not_run = waiting.len();
            report.endless = true;
            failed.extend(running);
        }
        if !outcome.success() && failed.is_empty() {
            failed.push(format!("the test program {}", program.display()));
            report.output += &format!("{}{}", outcome.stdout, outcome.stderr);
        }
        report.failed.extend(failed);
        stdout += &outcome.stdout;
        stderr += &outcome.stderr;
        if report.endless {
            break;
        }
    }
    if let more @ 1.. = not_run + runs.map(|(_, names)| names.len()).sum::<usize>() {
        report.output += &format!("not run: {more} other tests\n");
    }
    let shown = faults::read(&stdout, &report.failed, &sources);
    let text = stdout + &stderr;
    let skipped: BTreeSet<&str> = text.lines().map(str::trim).filter(|l| l.starts_with("SKIPPED")).collect();
    let lacks = !skipped.is_empty();
    report.output.insert_str(0, &shown.text);
    if only.is_none() {
        let whole = report.failed.is_empty() && open.is_empty();
        let ends = (whole, report.endless, lacks);
        report.verdicts = verdict::of(&exercises, &open, (&report.failed, &passed), &shown, ends);
    }
    // One exercise alone is not to blame for the others.
    report.failed.retain(|name| only.is_none() || !shown.waiting.contains(name));
    report.passed = passed.len();
    let these: Vec<Exercise> = wanted.map_or_else(|| exercises.clone(), |e| vec![e.clone()]);
    report.unchecked = unchecked(&these, &skipped);
    let todo = these.iter().find(|e| open.contains(&e.number) && !(lacks && e.needs.is_some()));
    if !report.failed.is_empty() || todo.is_some() || (wanted.is_some() && report.passed == 0) {
        let at = chosen(&exercises, &open, &report, &shown);
        report.hint = pointer(learn, step, wanted.filter(|_| shown.faults.is_empty()).or(at), &open, report.endless);
    }
    Ok(report)
}

/// The runs to make: programs with the names of tests. Those that belong to an exercise come first: they are short, and
/// say most. With one `wanted`, its own tests alone, if it has any.
fn selected<'a>(
    step: &Step,
    programs: &'a [PathBuf],
    exercises: &[Exercise],
    wanted: Option<&Exercise>,
) -> Result<Vec<(&'a Path, Vec<String>)>> {
    let skips: Vec<&str> = step.skip.iter().flat_map(|s| ["--skip", s]).collect();
    let (mut own, mut others) = (Vec::new(), Vec::new());
    for program in programs {
        let all = names(program, if wanted.is_some() { &[] } else { &skips })?;
        let is_own = |name: &String| match wanted {
            Some(e) => faults::is_own(exercises, e, name),
            None => exercises.iter().any(|e| faults::is_own(exercises, e, name)),
        };
        let (these, rest): (Vec<String>, Vec<String>) = all.into_iter().partition(is_own);
        own.push((program.as_path(), these));
        others.push((program.as_path(), rest));
    }
    for runs in [&mut own, &mut others] {
        runs.retain(|(_, names)| !names.is_empty());
    }
    if wanted.is_none() || own.is_empty() {
        own.append(&mut others);
    }
    Ok(own)
}

/// Builds the tests, with cargo's progress on the terminal. Returns the programs, or the compiler's text if it failed.
fn build(folder: &Path, vm: bool) -> Result<Result<Vec<PathBuf>, String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(&cargo);
    // The folder's own settings say where to build. A cargo that runs this program may hold the lock of another place.
    command
        .current_dir(folder)
        .env_remove("CARGO_TARGET_DIR")
        .args(["test", "--tests", "--no-run", "--message-format=json"])
        .args(vm.then_some("--features=verbs"));
    let outcome = run_shown(&mut command, BUILD_LIMIT)?;
    let messages = outcome.stdout.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    if !outcome.success() {
        let errors = messages.filter(|m| m["message"]["level"] == "error");
        let mut said: Vec<String> =
            errors.filter_map(|m| m["message"]["rendered"].as_str().map(str::to_owned)).collect();
        // The library and its tests are two programs with the same error.
        said.dedup();
        return Ok(Err(said.concat()));
    }
    let program = |message: serde_json::Value| {
        let test = message["profile"]["test"] == true;
        Some(PathBuf::from(message["executable"].as_str().filter(|_| test)?))
    };
    Ok(Ok(messages.filter_map(program).collect()))
}

/// Runs these tests of a program where cargo would. Names on the terminal those that take long, and ends the program
/// when none ends.
fn test(learn: &Learn, step: &Step, program: &Path, vm: bool, tests: &[String]) -> Result<(Outcome, Watch)> {
    let folder = learn.step(step);
    if !vm {
        let mut command = Command::new(program);
        command
            .current_dir(&folder)
            .env("CARGO_MANIFEST_DIR", &folder)
            .env("RUST_BACKTRACE", "0")
            .args(["--show-output", "--exact"])
            .args(tests);
        let (name, seconds) = CONNECT_TIMEOUT;
        if std::env::var_os(name).is_none() {
            command.env(name, seconds);
        }
        let mut watch = Watch::new(tests.to_vec(), watch::threads(), step.patience, Instant::now());
        let outcome = run_watched(&mut command, TICK, |stdout| match watch.look(stdout, Instant::now()) {
            Look::Wait => true,
            // Beside cargo's progress. Without a reader the tests go on.
            Look::Say(line) => {
                let _ = writeln!(std::io::stderr(), "{line}");
                true
            }
            Look::End => false,
        })?;
        return Ok((outcome, watch));
    }
    let watch = Watch::new(tests.to_vec(), 1, VM_LIMIT, Instant::now());
    let mut command = Command::new(learn.root.join("scripts/rxe-vm.sh"));
    command
        .env("RUST_BACKTRACE", "0")
        .args(["--pair", "--timeout", "400", "--mem", "2G", "--env", "TINYNCCL_TEST_VERBS=1", "--"])
        .args(["sh", "-c", "cd \"$0\" && exec \"$@\""])
        .arg(&folder)
        .arg(program)
        .args(["--show-output", "--test-threads=1", "--exact"])
        .args(tests);
    let outcome = run(&mut command, VM_LIMIT)?;
    ensure!(
        !outcome.stderr.contains("rxe-vm: cannot run here"),
        "the virtual machine cannot run here: {}",
        outcome.stderr.trim()
    );
    Ok((outcome, watch))
}

/// Names of the tests with this result.
fn results(stdout: &str, result: &str) -> Vec<String> {
    let names = stdout.lines().filter_map(|l| l.strip_prefix("test ")?.strip_suffix(result));
    names.map(str::to_owned).collect()
}

/// Names of the tests that a program would run with these arguments, in their order.
fn names(program: &Path, chosen: &[&str]) -> Result<Vec<String>> {
    let all = run(Command::new(program).arg("--list").args(chosen), Duration::from_secs(30))?.stdout;
    Ok(all.lines().filter_map(|l| l.strip_suffix(": test")).map(str::to_owned).collect())
}

/// The unchecked parts: exercises that need something missing here, and tests that were skipped.
fn unchecked(exercises: &[Exercise], skipped: &BTreeSet<&str>) -> Vec<String> {
    let mut lines = Vec::new();
    for needs in [Needs::Gpu, Needs::Torch] {
        let these = exercises.iter().filter(|e| e.needs == Some(needs) && !skipped.is_empty());
        let names: Vec<String> = these.map(|e| format!("exercise {} (`{}`)", e.number, e.function)).collect();
        let what = match names.as_slice() {
            [] => continue,
            [one] => format!("{one} needs {needs}"),
            all => format!("{} need {needs}", all.join(", ")),
        };
        let how = match needs {
            Needs::Gpu => "run the same on a machine with an NVIDIA GPU, its driver and NVRTC",
            Needs::Torch => "`scripts/setup.sh --python` as root installs them",
        };
        lines.push(format!("NOT CHECKED HERE: {what}: {how}"));
    }
    let covered = !lines.is_empty();
    lines.extend(skipped.iter().filter(|_| !covered).map(|l| (*l).to_owned()));
    lines
}

/// The exercise to look at: the written one at fault, the one whose own test failed, the one that the output names, the
/// one whose file a failed test belongs to, the first that is still open, or the first.
fn chosen<'a>(exercises: &'a [Exercise], open: &[u32], report: &Report, shown: &Shown) -> Option<&'a Exercise> {
    let Shown { faults, waiting, .. } = shown;
    let at_fault = faults.first().and_then(|f| exercises.iter().find(|e| e.number == f.number));
    let still = |e: &&Exercise| open.contains(&e.number);
    let own =
        |e: &&Exercise| report.failed.iter().any(|test| !waiting.contains(test) && faults::is_own(exercises, e, test));
    let named = exercises.iter().find(|e| report.output.contains(&format!("exercise {} of ", e.number)));
    let module = |e: &&Exercise| {
        let stem = e.file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let own = |f: &String| f.split("::").any(|part| part == stem);
        report.failed.iter().any(own) || report.output.contains(&format!("{}:", e.file.display()))
    };
    at_fault
        .or_else(|| exercises.iter().find(|e| own(e) && !still(e)))
        .or(named)
        .or_else(|| exercises.iter().find(|e| module(e) && still(e)))
        .or_else(|| exercises.iter().find(module))
        .or_else(|| exercises.iter().find(still))
        .or(exercises.first())
}

/// Names the exercise, its place, and what helps: for one that is written the README's hint, not its task again.
fn pointer(learn: &Learn, step: &Step, exercise: Option<&Exercise>, open: &[u32], endless: bool) -> String {
    let readme = format!("milestones/{}/README.md", step.folder());
    let Some(e) = exercise else { return format!("read {readme}") };
    let name = format!("exercise {} (`{}` in {})", e.number, e.function, learn.shown(&learn.step(step).join(&e.file)));
    let (number, k, section) = (step.number, e.number, &e.section);
    if open.contains(&e.number) {
        return format!(
            "{name} is still to be written. Its comment says what; read \"{section}\" in {readme}; \
             `cargo xtask hint {number:02} {k}` helps."
        );
    }
    let endless = if endless { " (an endless loop? a message that no rank sends or receives?)" } else { "" };
    let help = match hint::of(learn, step, e) {
        Ok(text) => text,
        Err(_) => format!("read \"{section}\" in {readme}"),
    };
    format!("{name} may be where to look{endless}.\n{help}\nOurs: `cargo xtask solution {number:02} {k}`.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::Fault;

    fn exercises() -> Vec<Exercise> {
        let text = "// EXERCISE 1 (How): one.\nfn f() {}\n// EXERCISE 2 (Why; needs GPU): two.\nfn g() {}\n";
        exercise::parse(Path::new("src/a.rs"), text).unwrap()
    }

    #[test]
    fn the_hint_follows_what_was_said() {
        let all = exercises();
        let report = |output: &str, failed: &[&str]| Report {
            output: output.to_owned(),
            failed: failed.iter().map(|f| (*f).to_owned()).collect(),
            ..Report::default()
        };
        let number = |report: &Report, open: &[u32]| chosen(&all, open, report, &Shown::default()).unwrap().number;
        assert_eq!(number(&report("exercise 2 of 07", &["b"]), &[1, 2]), 2);
        assert_eq!(number(&report("", &["b"]), &[2]), 2, "the first that is open");
        assert_eq!(number(&report("", &["a::tests::x"]), &[]), 1, "by the test's module");
        assert_eq!(number(&report("exercise 1 of 07", &["a::tests::g_adds"]), &[1]), 2, "its own test failed");
        let failed = report("exercise 1 of 07", &["a::tests::g_adds"]);
        let waits = Shown { waiting: vec!["a::tests::g_adds".to_owned()], ..Shown::default() };
        let one = chosen(&all, &[1], &failed, &waits).unwrap();
        assert_eq!(one.number, 1, "its own test failed for want of another exercise");
        let fault = Fault { number: 2, words: String::new() };
        let shown = Shown { faults: vec![fault], ..Shown::default() };
        let two = chosen(&all, &[1], &report("exercise 1 of 07", &["b"]), &shown).unwrap();
        assert_eq!(two.number, 2, "what was written comes before what was not");
        let learn = Learn::new(Path::new("/x"), "learn").unwrap();
        let step = Step::find("7").unwrap();
        let hint = pointer(&learn, &step, Some(&all[1]), &[2], false);
        assert_eq!(
            hint,
            "exercise 2 (`g` in learn/07-allreduce-tcp/src/a.rs) is still to be written. Its comment says what; read \"Why\" in milestones/07-allreduce-tcp/README.md; `cargo xtask hint 07 2` helps."
        );
        let learn = Learn::new(&crate::course::checkout(), "learn").unwrap();
        let hint = pointer(&learn, &step, Some(&all[1]), &[], true);
        assert!(
            hint.contains("may be where to look (an endless loop?") && hint.contains("The incoming part"),
            "{hint}"
        );
        assert!(!hint.contains("two."), "the task again: {hint}");
    }

    #[test]
    fn what_was_not_checked_is_said_with_a_way_to_check_it() {
        let (all, none) = (exercises(), BTreeSet::new());
        assert!(unchecked(&all, &none).is_empty());
        let lines = unchecked(&all, &BTreeSet::from(["SKIPPED: no GPU"]));
        assert!(lines[0].starts_with("NOT CHECKED HERE: exercise 2 (`g`) needs a GPU: "), "{lines:?}");
        assert_eq!(unchecked(&all[..1], &BTreeSet::from(["SKIPPED: mpirun"])), ["SKIPPED: mpirun"]);
    }
}
