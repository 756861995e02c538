//! Milestone 11: what a program needs to start Python ranks: an interpreter, the extension built and put where it is found.

pub mod extension;
pub mod interpreter;
pub mod ranks;
pub mod unavailable;

pub use interpreter::{Interpreter, Needs};
pub use ranks::Ranks;
pub use unavailable::{Unavailable, exit_code};
