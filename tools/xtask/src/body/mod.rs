//! Finds the body of the function below a marker, in Rust, Python and CUDA C.

mod c;
mod python;
mod rust;

use std::ops::Range;
use std::path::Path;

use anyhow::Result;

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

/// Name and body of the first function that begins at or after byte `from`.
///
/// # Errors
/// No function follows, or it has no body.
pub fn find(language: Language, text: &str, from: usize) -> Result<(String, Range<usize>)> {
    match language {
        Language::Rust => rust::find(text, from),
        Language::Python => python::find(text, from),
        Language::Cuda => c::find(text, from),
    }
}
