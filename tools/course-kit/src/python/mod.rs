//! Ranks that are Python programs: an interpreter that has their modules, the extension built and laid out where Python
//! finds it, and their start.

pub mod extension;
pub mod interpreter;
pub mod ranks;

pub use interpreter::{Interpreter, Needs, Unavailable};
pub use ranks::Ranks;
