//! Milestone 06 as a library: a link of one's own, and a job over it.

pub mod link;
pub mod meeting;
