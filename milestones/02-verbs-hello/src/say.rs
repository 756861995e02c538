//! Lines of output, each with the side that it comes from when two sides print to one terminal.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;

static SIDE: OnceLock<String> = OnceLock::new();

/// From now on every line of this process begins with `side`.
pub fn set_side(side: &str) {
    // A second call changes nothing: a process is one side.
    let _ = SIDE.set(format!("{side} | "));
}

/// What every line begins with.
pub fn side() -> &'static str {
    SIDE.get().map_or("", String::as_str)
}

/// Writes one line to standard output, in one piece so that lines of two processes do not mix.
///
/// # Errors
/// Standard output is closed.
pub fn line(text: fmt::Arguments<'_>) -> io::Result<()> {
    io::stdout().write_all(format!("{}{text}\n", side()).as_bytes())
}

/// `println!` with the side in front; when nobody reads any more, the text is lost and the program goes on.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {{ let _ = $crate::say::line(format_args!($($text)*)); }};
}
