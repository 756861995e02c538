//! Milestone 02 as a library: what the program `verbs-hello` and milestone 05 share.
//!
//! The modules here are plain Rust and build anywhere. `verbs` holds the objects of libibverbs and is only there
//! with the feature of the same name.

pub mod alone;
pub mod choice;
pub mod completion;
pub mod endpoint;
pub mod gid;
pub mod say;
pub mod side;
pub mod steps;
pub mod unavailable;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod words;
