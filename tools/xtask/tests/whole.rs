//! The whole course as a learner would go through it: each stub compiles and fails its check, each exercise alone makes
//! it fail, and with all bodies put back it passes. The first attempts of the book's chapter "Six exercises, solved"
//! fail with what it shows. scripts/learn-tests.sh runs this and says how long it takes.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use xtask::body::{self, Language};
use xtask::check::{Report, Scope, check};
use xtask::course::{STEPS, Step, checkout};
use xtask::exercise::{self, Exercise};
use xtask::learn::Learn;
use xtask::{new, stub};

/// Lines that the book shows of a test that failed.
const SHOWN: usize = 3;

/// Puts the bodies of the exercises that `wanted` names into the learner's stub, and takes the others out.
fn write(learn: &Learn, step: &Step, exercises: &[Exercise], wanted: impl Fn(u32) -> bool) {
    for e in exercises {
        let path = learn.step(step).join(&e.file);
        let solution = std::fs::read_to_string(step.solution(&learn.root).join(&e.file)).unwrap();
        let stub = stub::strip(step, &e.file, &solution).unwrap();
        let text = stub::fill(&e.file, &stub, &solution, &wanted).unwrap();
        // A file that stays as it is is not built again.
        if std::fs::read_to_string(&path).unwrap() != text {
            std::fs::write(path, text).unwrap();
        }
    }
}

/// A check, with its time.
fn timed(learn: &Learn, step: &Step, what: &str) -> Report {
    let start = Instant::now();
    let report = check(learn, step, Scope::default()).unwrap();
    let (folder, seconds) = (step.folder(), start.elapsed().as_secs_f64());
    let outcome = if report.ok() { "passed" } else { "failed" };
    println!("{folder}, {what}: {outcome} in {seconds:.1} s, {} ok, {} not", report.passed, report.failed.len());
    report
}

fn walk(learn: &Learn, step: &Step, each: bool) {
    let exercises = exercise::of(step, &step.solution(&learn.root)).unwrap();
    learn.start(step).unwrap();

    let report = timed(learn, step, "stub");
    assert!(report.compiles, "{}: {}", step.folder(), report.output);
    assert!(!report.ok() && !report.failed.is_empty(), "{}: the stub passes its check: {report:?}", step.folder());
    assert!(report.hint.starts_with("exercise "), "{}", report.hint);

    for e in exercises.iter().filter(|_| each) {
        write(learn, step, &exercises, |number| number != e.number);
        let report = timed(learn, step, &format!("without `{}`", e.function));
        let lacking = report.unchecked.iter().any(|line| line.contains(&format!("`{}`", e.function)));
        assert!(lacking || !report.failed.is_empty(), "{}: nothing tests `{}`", step.folder(), e.function);
        assert!(lacking || report.hint.starts_with(&format!("exercise {} ", e.number)), "{}", report.hint);
    }

    for e in &exercises {
        let shown = checkout().join(format!("docs/book/solved/{:02}-{}", step.number, e.number));
        if shown.with_extension("rs").is_file() {
            attempt(learn, step, &exercises, e, &shown);
        }
    }

    write(learn, step, &exercises, |_| true);
    let report = timed(learn, step, "solution");
    assert!(report.ok(), "{}: {}\n{}", step.folder(), report.hint, report.output);
    for line in report.unchecked {
        println!("{line}");
    }
}

/// Checks a first attempt at one exercise, with ours of the others, against what the book shows of it. `LEARN_BLESS`
/// writes that anew.
fn attempt(learn: &Learn, step: &Step, exercises: &[Exercise], e: &Exercise, shown: &Path) {
    write(learn, step, exercises, |_| true);
    let path = learn.step(step).join(&e.file);
    let mut text = std::fs::read_to_string(&path).unwrap();
    let theirs = std::fs::read_to_string(shown.with_extension("rs")).unwrap();
    let (function, body) = body::find(Language::Rust, &theirs, 0).unwrap();
    assert_eq!(function, e.function, "{}", shown.display());
    text.replace_range(e.body.clone(), &theirs[body]);
    std::fs::write(&path, text).unwrap();
    let report = check(learn, step, Scope { only: Some(e.number), ..Scope::default() }).unwrap();
    assert!(report.compiles && !report.ok(), "{}: {}", shown.display(), report.output);
    let kept = shown.with_extension("txt");
    if std::env::var_os("LEARN_BLESS").is_some() {
        let lines = report.output.lines().filter(|line| !line.is_empty()).take(SHOWN);
        std::fs::write(&kept, lines.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    }
    // Tests run at once, so any of those that fail may come first.
    let masked = |line: &str| line.replace(|c: char| c.is_ascii_digit(), "");
    let all: Vec<String> = report.output.lines().map(masked).collect();
    for line in std::fs::read_to_string(&kept).unwrap().lines() {
        assert!(all.contains(&masked(line)), "{}: {line:?} is not in\n{}", kept.display(), report.output);
    }
    println!("{}, exercise {}: fails as in the book", step.folder(), e.number);
}

#[test]
#[ignore = "builds the library anew: run scripts/learn-tests.sh"]
fn a_new_program_prints_what_xtask_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = new::make(&checkout(), &folder.path().join("mine")).unwrap();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap());
    let output = cargo.current_dir(&path).env_remove("CARGO_TARGET_DIR").args(["run", "-q"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), new::PRINTS);
}

#[test]
#[ignore = "builds sixteen packages several times: run scripts/learn-tests.sh"]
fn every_stub_fails_and_every_solution_passes() {
    let learn = Learn::new(&checkout(), "learn-test-whole").unwrap();
    // One at a time in a checkout: the folder's name is part of what cargo keeps, so another name would build it all
    // again.
    std::fs::create_dir_all(checkout().join("target")).unwrap();
    let lock = std::fs::File::create(checkout().join("target/learn-test-whole.lock")).unwrap();
    lock.lock().unwrap();
    if learn.folder.exists() {
        std::fs::remove_dir_all(&learn.folder).unwrap();
    }
    let each = std::env::var_os("LEARN_EACH").is_some();
    let wanted = std::env::var("LEARN_STEPS").unwrap_or_default();
    let wanted: Vec<Step> = wanted.split_whitespace().map(|text| Step::find(text).unwrap()).collect();
    for step in STEPS.iter().filter(|s| wanted.is_empty() || wanted.contains(s)) {
        walk(&learn, step, each);
    }
    std::fs::remove_dir_all(&learn.folder).unwrap();
}
