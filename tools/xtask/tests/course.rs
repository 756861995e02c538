//! Checks the required parts of every milestone, without building anything.

use std::collections::BTreeSet;
use std::process::Command;

use xtask::course::{self, STEPS, Step};
use xtask::exercise::{self, Exercise};
use xtask::faults::is_own;
use xtask::readme::section;
use xtask::{files, predict, stub};

/// The sections of a README, in this order; others may stand between them.
const SECTIONS: [&str; 12] = [
    "What you will learn",
    "Predict first",
    "Run",
    "Expected output",
    "How it works",
    xtask::library::SECTION,
    "Do it yourself",
    "Exercises",
    "Interview questions",
    "Common issues",
    "What is not real",
    "Next",
];

fn readme(step: &Step) -> String {
    std::fs::read_to_string(step.solution(&course::checkout()).join("README.md")).unwrap()
}

fn exercises(step: &Step) -> Vec<Exercise> {
    exercise::of(step, &step.solution(&course::checkout())).unwrap()
}

#[test]
fn the_steps_are_the_folders() {
    let mut folders: Vec<String> = std::fs::read_dir(course::checkout().join("milestones"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    folders.sort();
    assert_eq!(folders, STEPS.map(|s| s.folder()));
}

#[test]
fn the_status_counts_the_exercises() {
    let count: usize = STEPS.iter().map(|step| exercises(step).len()).sum();
    let status = std::fs::read_to_string(course::checkout().join("docs/STATUS.md")).unwrap();
    let claim = format!("\n| {count} exercises: ");
    assert!(status.contains(&claim), "docs/STATUS.md does not say that there are {count} exercises");
}

/// Rust's exercises whose tests need another exercise, too: `check NN K` then waits for that one.
const SHARED: [(u8, u32); 12] =
    [(2, 3), (4, 2), (4, 3), (5, 3), (5, 4), (8, 1), (8, 2), (10, 3), (11, 1), (12, 1), (13, 3), (16, 3)];

#[test]
fn exercises_have_tests_of_their_own() {
    let mut all_shared = Vec::new();
    for step in &STEPS {
        let folder = step.solution(&course::checkout());
        // `a/b.rs` and `a/b_tests.rs` have the tests `a::b::tests::…`.
        let mut tests = Vec::new();
        for file in files::list(&folder).unwrap() {
            let Some(text) = files::read(&folder.join(&file)).unwrap() else { continue };
            let path = file.with_extension("");
            let path = path.to_str().unwrap().trim_end_matches("/tests").trim_end_matches("_tests").to_owned();
            let path = path.trim_start_matches("src/").replace('/', "::");
            let path = path.trim_end_matches("::mod").to_owned();
            let path = if ["main", "lib"].contains(&path.as_str()) { String::new() } else { path + "::" };
            let functions = text.split("#[test]").skip(1).filter_map(|t| t.split_once("fn ")?.1.split_once('('));
            tests.extend(functions.map(|(name, _)| format!("{path}tests::{name}")));
        }
        let all = exercises(step);
        let without = all.iter().filter(|e| e.needs.is_none() && !tests.iter().any(|t| is_own(&all, e, t)));
        all_shared.extend(without.map(|e| (step.number, e.number)));
    }
    assert_eq!(all_shared, SHARED);
}

#[test]
fn every_readme_has_one_shape() {
    for step in &STEPS {
        let (text, name) = (readme(step), step.folder());
        assert!(text.starts_with(&format!("# Milestone {:02}: ", step.number)), "{name}: title");
        let mut fenced = false;
        let headings = text.lines().filter(|line| {
            fenced ^= line.starts_with("```");
            !fenced && line.starts_with("## ")
        });
        let known: Vec<&str> = headings.map(|h| &h[3..]).filter(|h| SECTIONS.contains(h)).collect();
        assert_eq!(known, SECTIONS, "{name}: sections and their order");
        let learn = section(&text, "What you will learn").unwrap();
        assert!(learn.contains("**Time:** ") && learn.contains("**Prerequisites:** "), "{name}: time, prerequisites");
        assert!(!course::time(&course::checkout(), step).unwrap().is_empty(), "{name}: time");
        assert!(section(&text, "Run").unwrap().contains(&format!("-p {}", step.name)), "{name}: how to run it");
        let output = section(&text, "Expected output").unwrap();
        assert!(output.matches("```").count() >= 2, "{name}: expected output");
        if let Err(error) = predict::questions(&text) {
            panic!("{name}: {error:#}");
        }
    }
}

/// Bold in an answer is for the numbers that predictions are compared with.
#[test]
fn what_is_bold_in_an_answer_is_compared() {
    let mut compared = 0;
    for step in &STEPS {
        for question in predict::questions(&readme(step)).unwrap() {
            let bold = question.answer.split("**").skip(1).step_by(2).count();
            let numbers = question.numbers();
            assert_eq!(numbers.len(), bold, "{} question {}: {numbers:?}", step.folder(), question.number);
            compared += bold;
        }
    }
    assert!(compared >= 20, "{compared} numbers");
}

#[test]
fn every_readme_says_how_to_do_it_yourself() {
    for step in &STEPS {
        let (text, name) = (readme(step), step.folder());
        let part = section(&text, "Do it yourself").unwrap();
        for command in ["start", "check"] {
            let command = format!("cargo xtask {command} {:02}", step.number);
            assert!(part.contains(&command), "{name}: {command}");
        }
        assert!(!step.verbs || part.contains(&format!("cargo xtask check {:02} --vm", step.number)), "{name}: --vm");
        for e in exercises(step) {
            let line = format!("\n{}. [`{}`](", e.number, e.function);
            assert!(part.contains(&line), "{name}: no line {line:?}");
            let file = format!("]({})", e.file.display());
            assert!(part.contains(&file), "{name}: exercise {} is in {file}", e.number);
        }
        assert_eq!(part.matches("<details>").count(), exercises(step).len(), "{name}: a hint for each exercise");
    }
}

#[test]
fn every_milestone_has_exercises_that_its_readme_explains() {
    for step in &STEPS {
        let (text, name) = (readme(step), step.folder());
        let all = exercises(step);
        assert!((1..=6).contains(&all.len()), "{name} has {} exercises", all.len());
        assert!(all.iter().any(|e| e.needs.is_none()), "{name}: nothing can be checked on a machine without devices");
        for e in all {
            assert!(section(&text, &e.section).is_some(), "{name}: no section '{}'", e.section);
            assert!(e.text.ends_with('.') && e.text.len() < 300, "{name}: {}", e.text);
        }
    }
}

#[test]
fn every_stub_becomes_the_solution_again() {
    for step in &STEPS {
        let folder = step.solution(&course::checkout());
        let mut tags = 0;
        for file in files::list(&folder).unwrap() {
            let Some(text) = files::read(&folder.join(&file)).unwrap() else { continue };
            let stub = stub::strip(step, &file, &text).unwrap();
            tags += stub.matches("exercise ").filter(|_| stub != text).count();
            // Whatever was taken out, the rest parses and the places are found again.
            assert_eq!(stub::fill(&file, &stub, &text, |_| true).unwrap(), text, "{}", file.display());
            assert_eq!(stub::fill(&file, &stub, &text, |_| false).unwrap(), stub, "{}", file.display());
        }
        assert!(tags >= exercises(step).len(), "{}", step.folder());
    }
}

#[test]
fn every_milestone_has_a_chapter() {
    for step in &STEPS {
        let chapter = course::checkout().join(format!("docs/book/src/milestones/{}.md", step.folder()));
        let text = std::fs::read_to_string(&chapter).unwrap_or_else(|e| panic!("{}: {e}", chapter.display()));
        // The README is the text; a chapter shows all of it, with its picture, the core of the code and NCCL's way.
        let parts: Vec<&str> = text.lines().filter(|line| line.starts_with("{{#readme ")).collect();
        let cuts = ["", "What you will learn", "How it works", "Do it yourself", ""];
        let all: Vec<String> = cuts.windows(2).map(|cut| format!("{{{{#readme {}..{}}}}}", cut[0], cut[1])).collect();
        assert_eq!(parts, all, "{}", chapter.display());
        assert!(
            text.contains(&format!("{{{{#figure {:02} ", step.number)),
            "{}: an opening picture",
            chapter.display()
        );
    }
}

/// Each builds and reads alone: what several share is in the library or in `tools`.
#[test]
fn no_milestone_depends_on_another() {
    let is_milestone = |line: &str| STEPS.iter().any(|other| line.starts_with(&format!("{} v", other.name)));
    for step in &STEPS {
        let all = built_from(step.name);
        let others: Vec<&String> =
            all.iter().filter(|l| is_milestone(l) && !l.starts_with(&format!("{} v", step.name))).collect();
        assert!(others.is_empty(), "{} depends on {others:?}", step.folder());
    }
}

/// `name version [features]` of all that `package` is built from.
fn built_from(package: &str) -> BTreeSet<String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let arguments = ["tree", "--locked", "--edges", "normal,build", "--prefix", "none", "--format", "{p} [{f}]"];
    let output = command.current_dir(course::checkout()).args(arguments).args(["--package", package]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|l| l.trim_end_matches(" (*)").to_owned()).collect()
}

/// A program that asks for another feature of what the library is built from makes cargo build the library again:
/// minutes. Without CUDA only the topmost crate is another one.
#[test]
fn the_library_is_built_once_for_all_programs() {
    let name = |line: &str| line.split(" [").next().unwrap_or_default().to_owned();
    let names: BTreeSet<String> = built_from("tinynccl").iter().map(|l| name(l)).collect();
    let first = built_from("lib-hello");
    let programs = STEPS.map(|s| s.name).into_iter().chain(["labs", "tinynccl-cli"]);
    for program in programs {
        let all = built_from(program);
        if all.iter().any(|l| l.starts_with("tinynccl v")) {
            let top = format!("tinynccl v{} ", env!("CARGO_PKG_VERSION"));
            let without_cuda = !all.iter().any(|l| l.starts_with("cudarc "));
            let other = all.difference(&first).filter(|l| names.contains(&name(l)));
            let other: Vec<&String> = other.filter(|l| !(without_cuda && l.starts_with(&top))).collect();
            assert!(other.is_empty(), "{program} wants other features than lib-hello: {other:?}");
        }
    }
}
