//! Milestone 11: starts Python ranks. Finds an interpreter, builds the extension, and installs it where Python finds
//! it.

pub mod extension;
pub mod interpreter;
pub mod ranks;

pub use interpreter::{Interpreter, Needs, Unavailable};
pub use ranks::Ranks;
