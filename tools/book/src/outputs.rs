//! Recorded commands and their output: `docs/book/outputs/NAME.cmd` and `NAME.txt`.
//!
//! The first line of a `.cmd` says how to compare: `# compare: exact`, `numbers` (all numbers are equal, and so are all
//! runs of spaces) or `lines` (like `numbers`, and neither the order of lines nor their repetition matters). bash runs
//! the rest from the repository's root. A second line `# shown in: milestones/NN-x/README.md` says that the output is
//! the first one of that README's *Expected output*, and no file beside it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use program_kit::process::{self, Outcome};

use crate::expected;
use crate::paths::repository;
use crate::programs;

/// Time limit of a command.
const LIMIT: Duration = Duration::from_secs(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compare {
    Exact,
    Numbers,
    Lines,
}

/// A command and its output.
#[derive(Debug)]
pub(crate) struct Recorded {
    name: String,
    compare: Compare,
    command: String,
    output: String,
    /// The README that shows it.
    readme: Option<String>,
}

fn folder() -> PathBuf {
    repository().join("docs/book/outputs")
}

impl Recorded {
    /// Reads both files; a missing `.txt` is empty.
    pub(crate) fn read(name: &str) -> Result<Recorded> {
        let path = folder().join(format!("{name}.cmd"));
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let (first, command) = text.split_once('\n').unwrap_or((&text, ""));
        let compare = match first.strip_prefix("# compare: ") {
            Some("exact") => Compare::Exact,
            Some("numbers") => Compare::Numbers,
            Some("lines") => Compare::Lines,
            _ => bail!("{name}.cmd begins with '{first}', expected '# compare: exact', 'numbers' or 'lines'"),
        };
        let (readme, command) = match command.strip_prefix("# shown in: ").and_then(|rest| rest.split_once('\n')) {
            Some((readme, command)) => (Some(readme.to_owned()), command),
            None => (None, command),
        };
        let output = match &readme {
            Some(readme) => expected::read(readme)?,
            None => fs::read_to_string(folder().join(format!("{name}.txt"))).unwrap_or_default(),
        };
        Ok(Recorded { name: name.to_owned(), compare, command: command.trim().to_owned(), output, readme })
    }

    /// As the book shows it.
    pub(crate) fn shown(&self) -> String {
        let note = match self.compare {
            Compare::Exact => "",
            Compare::Numbers => {
                "\n<div class=\"origin\">Numbers differ from run to run; the rest is compared in CI.</div>\n"
            }
            Compare::Lines => {
                "\n<div class=\"origin\">Numbers and the order of lines differ from run to run; the rest is compared in CI.</div>\n"
            }
        };
        // `-q` keeps cargo's messages out of the comparison; a reader may want to see them.
        format!(
            "```sh\n{}\n```\n\n```text\n{}\n```\n{note}",
            self.command.replace("cargo run -q ", "cargo run "),
            self.output.trim_end()
        )
    }

    fn same(&self, other: &str) -> bool {
        match self.compare {
            Compare::Exact => self.output == other,
            Compare::Numbers => masked(&self.output) == masked(other),
            Compare::Lines => sorted(&self.output) == sorted(other),
        }
    }
}

/// `text` with each number and each run of spaces replaced by one character.
fn masked(text: &str) -> Vec<String> {
    text.lines()
        .map(|line| line.split_inclusive(|c: char| !c.is_ascii_alphanumeric()).map(one_digit).collect::<String>())
        .map(|line| {
            let mut out = String::new();
            let mut last = ' ';
            for c in line.chars() {
                let c = if c.is_ascii_digit() { '#' } else { c };
                // `1.5e-3` and `1,000` are one number.
                let within = last == '#' && matches!(c, '#' | '.' | ',');
                if !(within || (c == ' ' && last == ' ')) {
                    out.push(c);
                    last = c;
                }
            }
            out.trim_end().to_owned()
        })
        .collect()
}

/// An address (`0x…`) or a fingerprint (12 hexadecimal digits and more) as one digit; other words as they are.
fn one_digit(word: &str) -> String {
    let (name, end) = word.split_at(word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).len());
    let hex = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit());
    let number = name.strip_prefix("0x").is_some_and(hex) || (name.len() >= 12 && hex(name));
    if number { format!("0{end}") } else { word.to_owned() }
}

fn sorted(text: &str) -> Vec<String> {
    let mut lines = masked(text);
    lines.sort();
    lines.dedup();
    lines
}

fn print(recorded: &Recorded) -> Result<String> {
    let own = programs::path("tinynccl-book")?;
    let line = programs::built(&recorded.command, own.parent().unwrap_or(&own));
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", &format!("({line}) 2>&1")]);
    let outcome = process::run(command.current_dir(repository()).env_remove("RUST_LOG"), LIMIT)?;
    if outcome.late {
        bail!("{}: no end after {} s: {}", recorded.name, LIMIT.as_secs(), recorded.command);
    }
    if !outcome.success() {
        let Outcome { code, stdout, stderr, .. } = outcome;
        bail!("{}: exit code {code:?}: {}\n{stdout}{stderr}", recorded.name, recorded.command);
    }
    Ok(outcome.stdout)
}

/// Every name, sorted.
pub(crate) fn names() -> Result<Vec<String>> {
    let mut names = vec![];
    for entry in fs::read_dir(folder()).context("reading docs/book/outputs")? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "cmd")
            && let Some(stem) = path.file_stem().and_then(|s| s.to_str())
        {
            names.push(stem.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

pub(crate) fn run(bless: bool, only: &[String]) -> Result<()> {
    let names = if only.is_empty() { names()? } else { only.to_vec() };
    let mut wrong = 0;
    for name in &names {
        let recorded = Recorded::read(name)?;
        let start = Instant::now();
        let printed = print(&recorded)?;
        let took = start.elapsed().as_secs_f64();
        if let (true, Some(readme)) = (bless, &recorded.readme) {
            println!("{name}: for {readme}, written by hand, {took:.1} s\n{printed}");
        } else if bless {
            fs::write(folder().join(format!("{name}.txt")), &printed)?;
            println!("{name}: written, {took:.1} s");
        } else if recorded.same(&printed) {
            println!("{name}: the same, {took:.1} s");
        } else {
            wrong += 1;
            println!("{name}: DIFFERS: {}\n--- the book\n{}\n--- now\n{printed}", recorded.command, recorded.output);
        }
    }
    if wrong > 0 {
        bail!("{wrong} of {} outputs differ; if the new ones are right: scripts/book.sh bless", names.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_numbers_and_spaces_only() {
        assert_eq!(masked("a  12.5 us"), masked("a 7 us"));
        assert_ne!(masked("a 12.5 us"), masked("b 12.5 us"));
        assert_eq!(masked("at 0x5fe0, b905eb9c5ce2e8e8 same"), masked("at 0x12, 7bfa34e8d9585d15 same"));
        assert_ne!(masked("feedback dead"), masked("feedback beef"), "words");
        assert_ne!(masked("one\ntwo"), masked("two\none"));
        assert_eq!(sorted("b 1\na 2\na 3"), sorted("a 9\nb 10"));
    }

    /// Compares what a README expects with what its first command prints, in a build for tests.
    #[test]
    fn an_output_of_a_readme_is_that_of_its_first_command() {
        let mut found = 0;
        for name in names().unwrap() {
            let recorded = Recorded::read(&name).unwrap();
            let Some(readme) = &recorded.readme else { continue };
            let text = fs::read_to_string(repository().join(readme)).unwrap();
            let run = text.split("\n## Run\n").nth(1).unwrap();
            let first = run.split("```sh\n").nth(1).unwrap().lines().next().unwrap();
            let first = first.replace("--release ", "").replace("cargo run ", "cargo run -q ");
            let command = recorded.command.lines().last().unwrap().split(" | sed").next().unwrap();
            assert_eq!(command, first, "{readme}");
            assert!(!recorded.output.is_empty() && !recorded.output.starts_with('$'), "{readme}");
            found += 1;
        }
        assert!(found >= 8, "{found} READMEs");
    }

    #[test]
    fn exact_is_exact() {
        let (name, command, output) = ("x".into(), "true".into(), "1\n".into());
        let recorded = Recorded { name, compare: Compare::Exact, command, output, readme: None };
        assert!(recorded.same("1\n") && !recorded.same("2\n"));
        let numbers = Recorded { compare: Compare::Numbers, ..recorded };
        assert!(numbers.same("2\n") && !numbers.same("two\n"));
    }
}
