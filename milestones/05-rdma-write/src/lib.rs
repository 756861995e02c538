//! Milestone 05 as a library: the parts that need no device and are tested everywhere.

pub mod fault;
pub mod pattern;
pub mod region;
