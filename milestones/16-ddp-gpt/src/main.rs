//! Milestone 16: a character-level GPT trained with data parallelism.

fn main() {}
