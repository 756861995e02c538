//! A milestone's files with the bodies of their exercises taken out, and put back.

use std::path::Path;

use anyhow::Result;

use crate::body::Language;
use crate::course::Step;
use crate::exercise::{self, Exercise};
use crate::files;

/// The mark that replaces a body, which can be found again in files and in the output of a program.
pub fn tag(step: &Step, number: u32) -> String {
    format!("exercise {number} of {}", step.folder())
}

/// The [`tag`] in a line that a program printed when it came to a body that is not written.
pub fn unwritten(line: &str) -> Option<&str> {
    let (tag, _) = line[line.find("exercise ")?..].split_once(": ")?;
    let (number, step) = tag.strip_prefix("exercise ")?.split_once(" of ")?;
    (number.parse::<u32>().is_ok() && Step::find(step).is_ok()).then_some(tag)
}

/// The text of `file` with each exercise's body replaced by a stub that states the task.
///
/// # Errors
/// A marker that is not one.
pub fn strip(step: &Step, file: &Path, text: &str) -> Result<String> {
    let replace = |text: &str, e: &Exercise| {
        let words = format!("{}: {} See README.md, section \"{}\".", tag(step, e.number), e.text, e.section);
        Language::of(file).map_or(String::new(), |language| language.empty(&words, indent(language, text, e)))
    };
    edit(file, text, replace)
}

/// The text of the stub `file` with the bodies of `solution` put back, of those exercises that `wanted` names.
///
/// # Errors
/// A marker that is not one, or that `solution` lacks.
pub fn fill(file: &Path, stub: &str, solution: &str, wanted: impl Fn(u32) -> bool) -> Result<String> {
    let theirs = exercise::parse(file, solution)?;
    edit(file, stub, |stub, e| {
        let body = theirs.iter().find(|t| t.number == e.number && wanted(e.number));
        body.map_or(&stub[e.body.clone()], |t| &solution[t.body.clone()]).to_owned()
    })
}

/// Replaces each exercise's body, from the last to the first, so that earlier offsets stay valid.
fn edit(file: &Path, text: &str, body: impl Fn(&str, &Exercise) -> String) -> Result<String> {
    let mut edited = text.to_owned();
    let mut all = exercise::parse(file, text)?;
    all.sort_by_key(|e| std::cmp::Reverse(e.body.start));
    for e in all {
        edited.replace_range(e.body.clone(), &body(text, &e));
    }
    Ok(edited)
}

/// The blanks before the line in which a body ends; in Python, before its first line.
fn indent<'a>(language: Language, text: &'a str, e: &Exercise) -> &'a str {
    let place = if language == Language::Python { e.body.start } else { e.body.end - 1 };
    let line = text[..place].rfind('\n').map_or(0, |n| n + 1);
    let rest = &text[line..];
    &rest[..rest.len() - rest.trim_start_matches(' ').len()]
}

/// Numbers of the exercises that are still stubs in the learner's files.
///
/// # Errors
/// A file that cannot be read.
pub fn open(step: &Step, folder: &Path, exercises: &[Exercise]) -> Result<Vec<u32>> {
    let mut texts = Vec::new();
    for file in files::list(folder)? {
        texts.extend(files::read(&folder.join(file))?);
    }
    let said = |e: &&Exercise| texts.iter().any(|t| t.contains(&tag(step, e.number)));
    Ok(exercises.iter().filter(said).map(|e| e.number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> Step {
        Step::find("7").unwrap()
    }

    #[test]
    fn a_body_is_taken_out_and_put_back() {
        let solution = "\
impl A {
    /// Doc.
    // EXERCISE 1 (How): add {x} and \"y\".
    fn f(&self, x: u8) -> u8 {
        x + 1
    }
}

// EXERCISE 2 (Why): nothing.
fn g() { f() }
";
        let file = Path::new("src/a.rs");
        let stub = strip(&step(), file, solution).unwrap();
        let expected = "    fn f(&self, x: u8) -> u8 {\n        todo!(\"exercise 1 of 07-allreduce-tcp: add {{x}} and \\\"y\\\". See README.md, section \\\"How\\\".\")\n    }\n}\n";
        assert!(stub.contains(expected), "{stub}");
        assert!(stub.contains("fn g() {\n    todo!(\"exercise 2 of 07"), "{stub}");
        assert_eq!(fill(file, &stub, solution, |_| true).unwrap(), solution);
        let half = fill(file, &stub, solution, |n| n == 1).unwrap();
        assert!(half.contains("x + 1") && !half.contains("{ f() }"), "{half}");
        assert_eq!(fill(file, &stub, solution, |_| false).unwrap(), stub);
    }

    #[test]
    fn python_and_cuda() {
        let python = "class A:\n    # EXERCISE 1 (How): call it.\n    def f(self):\n        \"\"\"Doc.\"\"\"\n        return 1\n\n    def g(self):\n        pass\n";
        let file = Path::new("python/a.py");
        let stub = strip(&step(), file, python).unwrap();
        let expected = "        \"\"\"Doc.\"\"\"\n        raise NotImplementedError(\"exercise 1 of 07-allreduce-tcp: call it. See README.md, section \\\"How\\\".\")\n\n    def g";
        assert!(stub.contains(expected), "{stub}");
        assert_eq!(fill(file, &stub, python, |_| true).unwrap(), python);
        let cuda = "// EXERCISE 1 (How): add.\n__global__ void add(float* a) { a[0] = 1; }\n";
        let file = Path::new("src/a.cu");
        let stub = strip(&step(), file, cuda).unwrap();
        assert!(stub.contains("add(float* a) {\n#error exercise 1 of 07-allreduce-tcp: add. See"), "{stub}");
        assert_eq!(fill(file, &stub, cuda, |_| true).unwrap(), cuda);
    }
}
