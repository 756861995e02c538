//! Typical wrong solutions of milestone 16's exercise "Agree by hand": its tests must catch each, by a run that shows why.
//! Not beside the exercise, since a learner's folder would have them, and with them the solution.

use std::path::Path;
use std::process::Command;

use xtask::course::{Step, checkout};

/// Builds the milestone's module `agreement`, which needs nothing but std, with `right` replaced by `wrong`. Returns what
/// its tests print, if one fails.
fn tested(folder: &Path, right: &str, wrong: &str) -> Option<String> {
    let source = Step::find("16").unwrap().solution(&checkout()).join("src/agreement");
    for file in std::fs::read_dir(source).unwrap().map(|entry| entry.unwrap().path()) {
        let text = std::fs::read_to_string(&file).unwrap();
        let changed = if file.ends_with("mod.rs") { text.replacen(right, wrong, 1) } else { text.clone() };
        assert!(!file.ends_with("mod.rs") || changed != text || right == wrong, "the solution has no {right:?}");
        std::fs::write(folder.join(file.file_name().unwrap()), changed).unwrap();
    }
    std::fs::write(folder.join("main.rs"), "#[path = \"mod.rs\"]\npub mod agreement;\n").unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let options = ["--edition=2024", "--test", "--crate-type=lib", "-Cdebuginfo=0", "-Awarnings", "-oprogram"];
    let built = Command::new(rustc).current_dir(folder).args(options).arg("main.rs").output().unwrap();
    assert!(built.status.success(), "{wrong}: {}", String::from_utf8_lossy(&built.stderr));
    let program = folder.join("program");
    let run = Command::new(program).arg("--test-threads=1").env("RUST_BACKTRACE", "0").output().unwrap();
    (!run.status.success()).then(|| String::from_utf8(run.stdout).unwrap())
}

#[test]
fn the_model_finds_a_run_for_each_wrong_agreement() {
    let readme = std::fs::read_to_string(Step::find("16").unwrap().solution(&checkout()).join("README.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(tested(folder.path(), "", ""), None, "ours is right");
    let promise = "Message::Propose(_) if self.dead.contains(&from) => {}";
    let proposed = "self.acks = Some(BTreeSet::from([self.rank]));";
    let complete = "living.iter().all(|rank| acks.contains(rank))";
    let voted = "living.iter().all(|rank| self.votes.contains_key(rank))";
    for (name, right, wrong, says) in [
        ("no second round", proposed, "self.acks = Some((0..self.size).collect());", "two outcomes"),
        ("a majority has accepted", complete, "2 * acks.len() > living.len()", "two outcomes"),
        ("the next leader begins anew", "self.accepted.clone().unwrap_or_else", "None.unwrap_or_else", "two outcomes"),
        ("a late proposal counts", promise, "", "two outcomes"),
        ("every rank must vote", voted, "self.votes.len() == self.size", "waits without end"),
        ("only the leader counts", "living.iter().copied().collect()", "[leader].into()", "leaves it out"),
        ("the last vote alone", "|all, rank| all & self.votes[rank]", "|_, rank| self.votes[rank]", "the votes of"),
    ] {
        let said = tested(folder.path(), right, wrong).unwrap_or_else(|| panic!("{name}: no test fails"));
        assert!(said.contains(says), "{name}: {said}");
        // The README shows this run.
        let run = said.lines().skip_while(|line| !line.starts_with("2 ranks, up to 1 deaths: "));
        let run: String = run.take_while(|line| !line.starts_with("note: ")).map(|line| format!("{line}\n")).collect();
        assert!(name != "no second round" || !run.is_empty() && readme.contains(&run), "{name}: {said}");
    }
}
