//! The whole course as a learner would go through it: each stub compiles and fails its check, each exercise alone makes
//! it fail, and with all bodies put back it passes. scripts/learn-tests.sh runs this and says how long it takes.

use std::time::Instant;

use xtask::check::{Report, Scope, check};
use xtask::course::{STEPS, Step, checkout};
use xtask::exercise::{self, Exercise};
use xtask::learn::Learn;
use xtask::stub;

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

    write(learn, step, &exercises, |_| true);
    let report = timed(learn, step, "solution");
    assert!(report.ok(), "{}: {}\n{}", step.folder(), report.hint, report.output);
    for line in report.unchecked {
        println!("{line}");
    }
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
