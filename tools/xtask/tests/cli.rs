//! The commands as a learner types them, on the milestone that is built fastest.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use assert_cmd::assert::Assert;
use xtask::check::{Scope, check};
use xtask::course::{Step, checkout};
use xtask::learn::Learn;
use xtask::stub;

/// A learner's folder of this test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Folder(checkout().join(name));
        folder.remove();
        folder
    }

    fn remove(&self) {
        if self.0.exists() {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn xtask(&self, line: &str) -> Assert {
        let mut command = assert_cmd::cargo::cargo_bin_cmd!("xtask");
        command.env("TINYNCCL_LEARN", self.0.file_name().unwrap()).args(line.split(' ')).assert()
    }

    fn says(&self, line: &str) -> String {
        text(self.xtask(line).success().get_output().stdout.clone())
    }

    fn refuses(&self, line: &str) -> String {
        text(self.xtask(line).failure().get_output().stderr.clone())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.remove();
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn from_start_to_passed() {
    let folder = Folder::new("learn-test-cli");
    assert!(folder.refuses("check 01").contains("01-tcp-echo was not started: `cargo xtask start 01`"));
    assert!(folder.says("status").contains("0 of 16 passed. Go on with 01-tcp-echo: `cargo xtask start 01`"));

    let out = folder.says("start tcp-echo");
    assert!(out.contains("  1. `read_full` in src/framing.rs (\"How it works\"): "), "{out}");
    assert!(folder.refuses("start 1").contains("learn-test-cli/01-tcp-echo is there already"), "no work is lost");
    assert!(folder.says("status").contains("01  tcp-echo           started, 3 of 3 exercises to be written"));

    // As it was given: it compiles, fails, and says where to begin.
    let failed = folder.xtask("check 01-tcp-echo").failure();
    let out = text(failed.get_output().stdout.clone());
    assert!(out.contains("exercise 1 of 01-tcp-echo is not written yet, and these tests need it: "), "{out}");
    assert!(out.lines().count() < 40, "a learner reads it: {out}");
    let hint = out.lines().last().unwrap();
    let expected =
        "hint: exercise 1 (`read_full` in learn-test-cli/01-tcp-echo/src/framing.rs) is still to be written. ";
    assert!(hint.starts_with(expected), "{hint}");
    assert!(hint.contains("read \"How it works\" in milestones/01-tcp-echo/README.md;"), "{hint}");
    assert!(hint.ends_with("`cargo xtask hint 01 1` helps."), "{hint}");
    assert!(folder.says("hint 1").starts_with("exercise 1 (`read_full` in src/framing.rs):\n"));
    assert!(folder.says("hint 01 3").contains("`decode`"));
    assert!(folder.refuses("hint 01 4").contains("exercises 1 to 3, no 4"));

    // A mistake of the learner's: what the test says is shown, and that it does not compile.
    let file = folder.0.join("01-tcp-echo/src/framing.rs");
    let stub = std::fs::read_to_string(&file).unwrap();
    let step = Step::find("1").unwrap();
    let solution = std::fs::read_to_string(step.solution(&checkout()).join("src/framing.rs")).unwrap();
    let solved = stub::fill(Path::new("src/framing.rs"), &stub, &solution, |_| true).unwrap();
    std::fs::write(&file, solved.replace("if length > limit", "if length > limit + 1")).unwrap();
    let out = text(folder.xtask("check 01").failure().get_output().stdout.clone());
    assert!(out.contains("panicked at") && out.contains("may be where to look"), "{out}");

    // Exercise 2 panics while 1 and 3 are not written: the panic comes first, and the hint is about 2.
    let two = stub::fill(Path::new("src/framing.rs"), &stub, &solution, |n| n == 2).unwrap();
    let panics = two.replace("let mut sent = 0;", "let mut sent = first.len() - 9;");
    assert_ne!(panics, two);
    std::fs::write(&file, &panics).unwrap();
    let out = text(folder.xtask("check 01").failure().get_output().stdout.clone());
    let line = 1 + panics.lines().position(|l| l.contains("first.len() - 9")).unwrap();
    let expected = format!("exercise 2 panics at src/framing.rs:{line}: attempt to subtract with overflow");
    assert_eq!(out.lines().nth(1), Some(expected.as_str()), "{out}");
    assert!(out.contains("exercise 1 of 01-tcp-echo is not written yet, and these tests need it: "), "{out}");
    assert!(
        out.contains("\nhint: exercise 2 (`write_full` in ") && out.contains("  - exercise 3 (`decode`): not"),
        "{out}"
    );
    assert!(out.contains("  ✗ exercise 2 (`write_full`): panics\n"), "{out}");
    assert!(!out.contains("panicked at") && out.lines().count() < 16, "a learner reads it: {out}");

    // One exercise at a time.
    let out = text(folder.xtask("check 01 2").failure().get_output().stdout.clone());
    assert!(out.contains("exercise 2 of 01-tcp-echo: FAILED: 1 test failed, 0 passed\n"), "{out}");
    std::fs::write(&file, &two).unwrap();
    let out = folder.says("check 01 2");
    assert!(out.contains("exercise 2 of 01-tcp-echo: passed, 1 test\nOurs: `cargo xtask solution 01 2`\n"), "{out}");
    assert!(out.ends_with("Next: `cargo xtask check 01`, the whole milestone\n"), "{out}");
    let out = text(folder.xtask("check 01 3").failure().get_output().stdout.clone());
    assert!(out.contains("hint: exercise 3 (`decode` in ") && out.contains("is still to be written"), "{out}");
    assert!(folder.refuses("check 01 4").contains("exercises 1 to 3, no 4"));

    std::fs::write(&file, two.replace("let mut sent = 0;", "let mut sent = \"0\";")).unwrap();
    let out = text(folder.xtask("check 01").failure().get_output().stdout.clone());
    let first = out.lines().nth(1).unwrap();
    assert!(first.starts_with("exercise 2 does not compile: src/framing.rs:"), "{out}");
    assert!(out.contains("01-tcp-echo: FAILED: it does not compile, so no test ran\nhint: exercise 2 ("), "{out}");
    std::fs::write(&file, solved.replace("if length > limit", "if length > limit + 1")).unwrap();
    let out = folder.says("solution 01");
    assert!(out.contains("-    if length > limit + 1") && out.contains("+    if length > limit "), "{out}");
    assert!(
        folder.says("solution 01 3").contains("`decode` in milestones/01-tcp-echo/src/framing.rs:\n\n{\n    let [m0")
    );
    assert!(folder.refuses("solution 01 4").contains("exercises 1 to 3, no 4"));

    // An endless loop: it is ended, and the test that it hangs in has a name.
    let endless = solved.replace("            Ok(0) => break, ", "            // ");
    assert_ne!(endless, solved);
    std::fs::write(&file, endless).unwrap();
    let learn = Learn::new(&checkout(), "learn-test-cli").unwrap();
    let impatient = Step { patience: Duration::from_secs(3), ..step };
    let report = check(&learn, &impatient, Scope::default()).unwrap();
    let hangs = "framing::tests::read_full_collects_short_reads_and_counts_to_the_end";
    assert_eq!(report.failed, [hangs], "{report:?}");
    let stopped = format!("stopped, still running after 3 s: {hangs}\nnot run: ");
    assert!(report.output.contains(&stopped), "{report:?}");
    let states = [
        "✗ exercise 1 (`read_full`): failed",
        "✓ exercise 2 (`write_full`): passed",
        "✓ exercise 3 (`decode`): passed",
    ];
    assert_eq!(report.verdicts.iter().map(|v| v.to_string().trim().to_owned()).collect::<Vec<_>>(), states);
    assert!(report.hint.contains("exercise 1 (`read_full` in ") && report.hint.contains("(an endless loop? "));

    // Saved while it is watched: the next check passes, and the watch ends.
    std::fs::write(&file, &two).unwrap();
    let mut watch = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .env("TINYNCCL_LEARN", "learn-test-cli")
        .args(["watch", "01"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = String::new();
    for line in BufReader::new(watch.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if line.starts_with("waiting for a save in learn-test-cli/01-tcp-echo") {
            std::fs::write(&file, &solved).unwrap();
        }
        out += &(line + "\n");
    }
    assert!(watch.wait().unwrap().success(), "{out}");
    assert!(out.contains("  - exercise 1 (`read_full`): not written yet\n  ✓ exercise 2"), "{out}");
    assert!(out.contains("  ✓ exercise 1 (`read_full`): passed\n") && out.contains("01-tcp-echo: passed, "), "{out}");
    assert!(out.contains("`cargo xtask solution 01`\nGo on with 02-verbs-hello"), "{out}");
    assert!(folder.says("solution 1").contains("yours is ours"));
    assert!(folder.says("status").contains("1 of 16 passed."));

    // Nothing is lost by starting again.
    assert!(folder.refuses("reset 01").contains("give --yes"), "no terminal here to ask at");
    let out = folder.says("reset 01 --yes");
    assert!(out.contains("The old one is in learn-test-cli/backup/01-tcp-echo-1."), "{out}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), stub);
    assert_eq!(std::fs::read_to_string(folder.0.join("backup/01-tcp-echo-1/src/framing.rs")).unwrap(), solved);
    let out = folder.says("status");
    assert!(out.contains("01  tcp-echo           passed before, started again"), "{out}");
    assert!(out.contains("0 of 16 passed. Go on with 01-tcp-echo: `cargo xtask check 01`"), "{out}");
    std::fs::write(&file, stub + "fn").unwrap();
    let out = text(folder.xtask("check 01").failure().get_output().stdout.clone());
    assert!(out.contains("it does not compile, so no test ran") && out.contains("error: expected identifier"), "{out}");
    assert!(folder.says("status").contains("0 of 16 passed."), "a check that fails takes it back");
}

#[test]
fn what_is_there() {
    let folder = Folder::new("learn-test-list");
    let out = folder.says("list");
    assert!(
        out.contains("07-allreduce-tcp: one hour") && out.contains("  2. `reduce_scatter` in src/by_hand.rs"),
        "{out}"
    );
    assert!(folder.says("next").contains("cargo xtask start 01"));
    assert!(folder.refuses("start 17").contains("there is no milestone '17': expected 1 to 16"));
    assert!(folder.refuses("check 07 --vm").contains("07-allreduce-tcp was not started"));
    assert!(folder.refuses("reset 07 --yes").contains("was not started"));
}

#[test]
fn predictions_are_locked_before_the_answers() {
    let folder = Folder::new("learn-test-predict");
    let given = |arguments: &[&str], input: &str| {
        let mut command = assert_cmd::cargo::cargo_bin_cmd!("xtask");
        let command = command.env("TINYNCCL_LEARN", "learn-test-predict").arg("predict").args(arguments);
        command.write_stdin(input).assert()
    };
    let said = |arguments: &[&str], input: &str| text(given(arguments, input).success().get_output().stdout.clone());
    // Nothing is given away without a prediction.
    let out = said(&["07"], "");
    assert!(out.contains("1. How many bytes does each rank send for 1 MiB"), "{out}");
    assert!(out.contains("3. not predicted yet: its answer stays closed") && !out.contains("1,835,008"), "{out}");

    let out = said(&["07", "1", "--answer", "1 MiB, 8 MiB"], "");
    assert!(out.contains("you 1 MiB, it is 1,048,576 bytes: right"), "{out}");
    assert!(out.contains("you 8 MiB, it is 1,835,008 bytes: too large by a factor of 4.6"), "{out}");
    assert!(out.contains("3 of 4 open"), "{out}");
    let refused = given(&["07", "1", "--answer", "1.75 MiB"], "").failure().get_output().stderr.clone();
    assert!(text(refused).contains("question 1 of 07-allreduce-tcp is locked with '1 MiB, 8 MiB': --again"));
    let refused = given(&["07", "1", "--answer", " ", "--again"], "").failure().get_output().stderr.clone();
    assert!(text(refused).contains("an empty line is no prediction"));
    let out = said(&["07", "1", "--again", "--answer", "1048576 and 1835008"], "");
    assert!(out.contains("you:         1 MiB, 8 MiB\n") && out.contains("then:        1048576 and 1835008\n"), "{out}");
    assert!(out.contains("then 1835008, it is 1,835,008 bytes: right"), "{out}");

    // From the input, a line each; an empty one passes a question over.
    let out = said(&["allreduce-tcp"], "yes\n\nheaders\n");
    assert!(
        !out.contains("1. How many bytes does each rank send for 1 MiB with `--ranks 2`? With `--ranks 8`?\n   your")
    );
    assert!(out.contains("3. not predicted yet") && out.contains("1 of 4 open"), "{out}");
    let out = said(&["07"], "6\n");
    assert!(out.contains("you 6, it is 6: right"), "{out}");
    assert!(out.contains("All are locked. See for yourself: `cargo run --release -p allreduce-tcp`"), "{out}");
    assert_eq!(said(&["07"], "not read").matches("the answer:").count(), 4, "it is shown again");

    let usage = |arguments: &[&str]| text(given(arguments, "").code(2).get_output().stderr.clone());
    assert!(usage(&["07", "5"]).contains("has questions 1 to 4, no 5"));
    assert!(usage(&["07", "--answer", "one more"]).contains("1 predictions for 0 open questions"));
    assert!(folder.0.join("predictions.json").is_file());
}

#[test]
fn an_interview_ends_at_the_whiteboard() {
    let folder = Folder::new("learn-test-interview");
    let walk = |line: &str, typed: &str| {
        let mut command = assert_cmd::cargo::cargo_bin_cmd!("xtask");
        command.arg("interview").args(line.split(' ')).write_stdin(typed).assert()
    };
    let typed = "\n\ns\ns\ns\ns\ns\ns\na 16 4 yes\na.T 4 16 no\na[::2] 32 4 no\na[:,1:3] 16 4 no\na[1:3] 16 4 yes\na[:,::-1] 16 -4 no\n";
    let out = text(walk("11", typed).success().get_output().stdout.clone());
    assert!(out.contains("1 of 7  (python, level 2, 11-pytorch-bindings)"), "{out}");
    assert!(out.contains("A subset of CPython's C interface") && out.contains("How does a wheel say so?"), "{out}");
    assert!(!out.contains("Otherwise no other Python thread"), "skipped: {out}");
    assert!(out.contains("right: the views were made"), "{out}");
    let out = text(walk("11 --count 0 --seed 1", "a 16 4 no\n").code(1).get_output().stdout.clone());
    assert!(out.contains("wrong: line 1, 'a 16 4 no': not no") && out.contains("line 6 is missing"), "{out}");

    let usage = |line: &str| text(walk(line, "").code(2).get_output().stderr.clone());
    assert!(usage("--topic networks").contains("expected one of sockets, rdma, "));
    assert!(usage("--level 4").contains("expected 1, 2 or 3"));
    std::fs::create_dir_all(&folder.0).unwrap();
    let page = folder.0.join("sheet.html");
    let out = text(walk(&format!("--topic rdma --sheet {}", page.display()), "").success().get_output().stdout.clone());
    assert!(out.contains(" questions in "), "{out}");
    assert!(std::fs::read_to_string(&page).unwrap().contains("<h2>rdma</h2>"));
}
