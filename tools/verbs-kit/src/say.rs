//! Lines of output. When two sides print to one terminal, each line begins with its side.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;

static SIDE: OnceLock<String> = OnceLock::new();

/// Makes every later line of this process begin with `side`.
pub fn set_side(side: &str) {
    // A second call changes nothing: a process is one side.
    let _ = SIDE.set(format!("{side} | "));
}

/// The prefix of every line.
pub fn side() -> &'static str {
    SIDE.get().map_or("", String::as_str)
}

/// Writes one line to standard output in one call, so that lines of two processes do not mix.
///
/// # Errors
/// Standard output is closed.
pub fn line(text: fmt::Arguments<'_>) -> io::Result<()> {
    io::stdout().write_all(format!("{}{text}\n", side()).as_bytes())
}

/// `println!` with the side in front. When standard output is closed, the text is lost and the program continues.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {{ let _ = $crate::say::line(format_args!($($text)*)); }};
}
