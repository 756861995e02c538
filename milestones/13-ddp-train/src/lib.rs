//! Milestone 13: data-parallel training of a small MLP. Milestone 15 uses the same parts.

pub mod data;
pub mod loss;
pub mod mlp;
pub mod optim;
pub mod options;
pub mod plot;
pub mod proof;
pub mod replica;
pub mod rng;
pub mod train;
