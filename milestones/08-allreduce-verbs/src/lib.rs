//! Milestone 08 as a library: what the verbs transport does for every message, in the smallest form.

pub mod credits;
pub mod mailbox;
