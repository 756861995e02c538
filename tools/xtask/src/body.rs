//! Finds the body of the function below a marker, in Rust, Python and CUDA C: sources are formatted, so lines tell.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result};
use program_kit::source;

/// Before and behind a docstring.
const QUOTES: &str = "\"\"\"";

/// A language that exercises are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// `.rs`
    Rust,
    /// `.py`
    Python,
    /// `.cu`, `.cuh`
    Cuda,
}

impl Language {
    /// By the file's name.
    pub fn of(file: &Path) -> Option<Language> {
        match file.extension()?.to_str()? {
            "rs" => Some(Language::Rust),
            "py" => Some(Language::Python),
            "cu" | "cuh" => Some(Language::Cuda),
            _ => None,
        }
    }

    /// The prefix of a comment.
    pub fn comment(self) -> &'static str {
        if self == Language::Python { "#" } else { "//" }
    }

    /// A body that does nothing but say `words`. `old` is the one that it stands for: its indentation is kept.
    pub fn empty(self, words: &str, indent: &str) -> String {
        match self {
            Language::Rust => {
                let words = words.replace('{', "{{").replace('}', "}}");
                format!("{{\n{indent}    todo!({words:?})\n{indent}}}")
            }
            Language::Python => format!("{indent}raise NotImplementedError({words:?})\n"),
            // An empty kernel would fail late, by its results, so it must not compile.
            Language::Cuda => format!("{{\n#error {words}\n{indent}}}"),
        }
    }
}

/// Name and body of the first function that begins at or after byte `from`: with its braces, or in Python the whole lines
/// below the docstring.
///
/// # Errors
/// No function follows, or it has no body.
pub fn find(language: Language, text: &str, from: usize) -> Result<(String, Range<usize>)> {
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let start = |line: usize| lines[..line].iter().map(|l| l.len()).sum::<usize>();
    let after = (0..lines.len()).filter(|&line| start(line) >= from);
    let found = after.filter_map(|line| Some((line, name(language, lines[line])?))).next();
    let (first, name) = found.context("no function follows")?;
    let python = language == Language::Python;
    let end = source::end(&lines, first, python);
    let item = first..end;
    let body = if python {
        let head = item
            .clone()
            .find(|&i| source::python_code(lines[i]).ends_with(':'))
            .context("the function's head has no end")?;
        let mut rest = (head + 1..end).filter(|&i| !lines[i].trim().is_empty());
        let mut begin = rest.next();
        // The docstring stays: it is part of the interface.
        if let Some(i) = begin.filter(|&i| lines[i].trim_start().starts_with(QUOTES)) {
            let closed = lines[i].matches(QUOTES).count() == 2 || rest.any(|i| lines[i].contains(QUOTES));
            begin = rest.next().filter(|_| closed);
        }
        start(begin.context("the function has no body")?)..start(end)
    } else {
        // Behind the parameters, which may go over several lines.
        let opens = item.clone().find(|&i| lines[i].trim_end().ends_with('{')).unwrap_or(first);
        let one_line = end == first + 1;
        let brace = if one_line { lines[first].find('{') } else { lines[opens].rfind('{') };
        let close = lines[end - 1].rfind('}').filter(|_| one_line || opens < end - 1);
        let (brace, close) = brace.zip(close).context("the function has no body")?;
        start(opens) + brace..start(end - 1) + close + 1
    };
    Ok((name.to_owned(), body))
}

/// The name of the function that begins in this line.
fn name(language: Language, line: &str) -> Option<&str> {
    /// Words that may stand before `fn` and `def`.
    const BEFORE: [&str; 6] = ["pub", "const", "async", "unsafe", "extern", "\"C\""];
    let qualified = |head: &str| head.split_whitespace().all(|w| BEFORE.contains(&w) || w.starts_with("pub("));
    let line = line.trim_start();
    let behind = |word: &str| line.split_once(word).filter(|(head, _)| qualified(head)).map(|(_, rest)| rest);
    let rest = match language {
        Language::Rust => behind("fn ")?,
        Language::Python => behind("def ")?,
        Language::Cuda if line.starts_with("//") => return None,
        // The word before the parameters.
        Language::Cuda => line.split_once('(')?.0.rsplit(' ').next()?,
    };
    rest.split(['(', '<']).next().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_in_strings_generics_and_other_functions() {
        let text = r##"
impl<const N: usize> A<N> {
    fn before(&self) {}
    // here is no fn to find
    #[inline]
    pub(crate) fn wanted<T: Into<u8>>(self: &Self, f: impl Fn(u8) -> [u8; { 3 }]) -> Result<(), ()>
    where
        T: Copy,
    {
        let s = "{ é"; let c = '}'; /* } */ let r = r#"}"#;
    }
    const fn after(
        a: u8,
    ) -> u8 {
        a
    }
    fn one_line() -> u8 { 1 }
}
trait T {
    fn f();
}
"##;
        let (name, body) = find(Language::Rust, text, text.find("// here").unwrap()).unwrap();
        assert_eq!(name, "wanted");
        assert!(text[body.clone()].starts_with("{\n        let s") && text[body].ends_with("\n    }"));
        let (name, body) = find(Language::Rust, text, text.find("    const fn").unwrap()).unwrap();
        assert_eq!((name.as_str(), &text[body]), ("after", "{\n        a\n    }"));
        let (name, body) = find(Language::Rust, text, text.find("    fn one_line").unwrap()).unwrap();
        assert_eq!((name.as_str(), &text[body]), ("one_line", "{ 1 }"));
        assert!(find(Language::Rust, text, text.find("trait").unwrap()).is_err(), "no body");
        assert!(find(Language::Rust, text, text.len()).is_err());
        assert!(find(Language::Rust, "fn f() {", 0).is_err(), "no end");
    }

    #[test]
    fn docstrings_stay_and_the_next_function_is_not_taken() {
        let text = "class A:\n    def f(self, a,\n          b=1):  # two lines\n        \"\"\"Says\n        what.\"\"\"\n\n        x = \"\"\"left\"\"\"\n\n        return x\n\n\n    def g(self):\n        pass\n";
        let (name, body) = find(Language::Python, text, 0).unwrap();
        assert_eq!(name, "f");
        assert_eq!(&text[body], "        x = \"\"\"left\"\"\"\n\n        return x\n");
        let (name, body) = find(Language::Python, text, text.find("    def g").unwrap()).unwrap();
        assert_eq!((name.as_str(), &text[body]), ("g", "        pass\n"));
        assert!(find(Language::Python, text, text.len()).is_err());
        assert!(find(Language::Python, "def f():\n    \"\"\"Only says.\"\"\"\n", 0).is_err());
    }

    #[test]
    fn kernels_with_comments_and_strings() {
        let text = "// { é(\nextern \"C\" __global__ void add(const float* a /* } */, u64 n,\n                               u64 m) {\n  if (n) { x = '{'; } // }\n}\nvoid next() {}\n";
        let (name, body) = find(Language::Cuda, text, 0).unwrap();
        assert_eq!(name, "add");
        assert!(text[body.clone()].starts_with("{\n  if") && text[body.clone()].ends_with("}\n}"), "{}", &text[body]);
        let (name, body) = find(Language::Cuda, text, text.find("void next").unwrap()).unwrap();
        assert_eq!((name.as_str(), &text[body]), ("next", "{}"));
        assert!(find(Language::Cuda, text, text.len()).is_err() && find(Language::Cuda, "struct S {};", 0).is_err());
    }
}
