//! Milestone 02 as a library: the code shared by the program `verbs-hello` and later milestones.
//!
//! The modules here are plain Rust; `verbs` holds the objects of libibverbs.

pub mod alone;
pub mod choice;
pub mod completion;
pub mod endpoint;
pub mod gid;
pub mod pair;
pub mod say;
pub mod side;
pub mod steps;
pub mod unavailable;
pub mod verbs;
pub mod words;
