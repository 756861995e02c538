//! Milestone.
fn main() {}
