//! Milestone 11: what a program needs to start Python ranks: an interpreter, the extension built and put where it is found.

pub mod extension;
pub mod interpreter;
pub mod ranks;

pub use interpreter::{Interpreter, Needs, Unavailable};
pub use ranks::Ranks;
