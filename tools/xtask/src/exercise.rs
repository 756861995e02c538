//! Markers in a milestone's source. A comment above a function
//!
//! ```text
//! // EXERCISE 2 (How it works): what to write, in a sentence or two,
//! // over as many lines as it takes.
//! ```
//! says that a learner writes its body: exercise 2 of the milestone, explained in that section of its README. In Python
//! the comment begins with `#`. `(How it works; needs GPU)` or `torch` says what the exercise cannot be checked
//! without.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use program_kit::Usage;

use crate::body::{self, Language};
use crate::course::Step;
use crate::files;

/// Hardware or software that a check of the exercise needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// An NVIDIA GPU with its driver and NVRTC.
    Gpu,
    /// Python with numpy and torch.
    Torch,
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Needs::Gpu => "a GPU",
            Needs::Torch => "numpy and torch",
        })
    }
}

/// One function that a learner writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exercise {
    /// From 1, within the milestone.
    pub number: u32,
    /// The README's section that explains it.
    pub section: String,
    /// Requirement of a check.
    pub needs: Option<Needs>,
    /// The task.
    pub text: String,
    /// The file, from the milestone's folder.
    pub file: PathBuf,
    /// The function.
    pub function: String,
    /// Bytes of the body in the file: with its braces, or the indented lines below the docstring.
    pub body: Range<usize>,
}

/// The exercises of one file's text, in the order in which they stand there.
///
/// # Errors
/// A marker that is not one, or that no function follows.
pub fn parse(file: &Path, text: &str) -> Result<Vec<Exercise>> {
    let Some(language) = Language::of(file) else { return Ok(Vec::new()) };
    let comment = language.comment();
    let mut found = Vec::new();
    let (mut at, mut lines) = (0, text.split_inclusive('\n').peekable());
    while let Some(line) = lines.next() {
        at += line.len();
        let Some(head) = line.trim().strip_prefix(comment).and_then(|l| l.strip_prefix(" EXERCISE ")) else { continue };
        let mut words = vec![head.to_owned()];
        while let Some(more) = lines.peek().and_then(|l| l.trim().strip_prefix(comment)?.strip_prefix(' ')) {
            words.push(more.trim().to_owned());
            at += lines.next().map_or(0, str::len);
        }
        let marker = words.join(" ");
        let place = || format!("{}: the marker 'EXERCISE {marker}'", file.display());
        let (number, section, needs, what) = read(&marker).with_context(place)?;
        let (function, body) = body::find(language, text, at).with_context(place)?;
        found.push(Exercise { number, section, needs, text: what, file: file.to_owned(), function, body });
    }
    Ok(found)
}

/// `2 (How it works; needs RDMA): what to write`.
fn read(marker: &str) -> Result<(u32, String, Option<Needs>, String)> {
    let (number, rest) = marker.split_once(" (").context("expected 'EXERCISE NUMBER (SECTION): TEXT'")?;
    let (head, text) = rest.split_once("): ").context("expected '(SECTION): TEXT' behind the number")?;
    let (section, needs) = match head.split_once("; needs ") {
        None => (head, None),
        Some((section, "GPU")) => (section, Some(Needs::Gpu)),
        Some((section, "torch")) => (section, Some(Needs::Torch)),
        Some((_, other)) => bail!("needs '{other}': expected GPU or torch"),
    };
    ensure!(!text.trim().is_empty(), "it says nothing");
    Ok((number.parse().context("its number")?, section.to_owned(), needs, text.trim().to_owned()))
}

/// The exercises of a milestone's folder, by number.
///
/// # Errors
/// A file that cannot be read, a marker that is not one, numbers that are not 1, 2, 3, …
pub fn of(step: &Step, folder: &Path) -> Result<Vec<Exercise>> {
    let mut all = Vec::new();
    for file in files::list(folder)? {
        if let Some(text) = files::read(&folder.join(&file))? {
            all.extend(parse(&file, &text)?);
        }
    }
    all.sort_by_key(|e| e.number);
    let numbers: Vec<u32> = all.iter().map(|e| e.number).collect();
    ensure!(
        numbers.iter().copied().eq(1..=numbers.len() as u32),
        "{}: its exercises have the numbers {numbers:?}, expected 1, 2, 3 and so on",
        step.folder()
    );
    Ok(all)
}

/// The exercise `number` of all those of a step.
///
/// # Errors
/// There is none; the text says which there are.
pub fn find<'a>(step: &Step, all: &'a [Exercise], number: u32) -> Result<&'a Exercise> {
    let found = all.iter().find(|e| e.number == number);
    let none = || Usage(format!("{} has exercises 1 to {}, no {number}", step.folder(), all.len()));
    Ok(found.ok_or_else(none)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_read_with_all_its_lines() {
        let text = "/// Doc.\n// EXERCISE 2 (How it works; needs GPU): launch it,\n// and wait.\nfn launch() -> u8 {\n    7\n}\n";
        let [e] = parse(Path::new("src/a.rs"), text).unwrap().try_into().unwrap();
        assert_eq!((e.number, e.section.as_str(), e.needs), (2, "How it works", Some(Needs::Gpu)));
        assert_eq!((e.text.as_str(), e.function.as_str()), ("launch it, and wait.", "launch"));
        assert_eq!(&text[e.body], "{\n    7\n}");
    }

    #[test]
    fn what_is_no_marker_is_refused() {
        for bad in ["1: text", "1 (A) text", "x (A): text", "1 (A; needs luck): text", "1 (A): "] {
            let text = format!("// EXERCISE {bad}\nfn f() {{}}\n");
            let error = parse(Path::new("src/a.rs"), &text).unwrap_err().to_string();
            assert!(error.contains("src/a.rs: the marker 'EXERCISE"), "{error}");
        }
        assert!(parse(Path::new("src/a.rs"), "// EXERCISE 1 (A): text\nstruct S;\n").is_err(), "no function follows");
        assert_eq!(parse(Path::new("src/a.toml"), "# EXERCISE").unwrap(), []);
    }
}
