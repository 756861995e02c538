//! Milestone 14: the MLP of milestone 13 trained by several GPUs. See README.md beside Cargo.toml.

pub mod buckets;
pub mod check;
pub mod compile;
pub mod kernels;
pub mod model;
pub mod replica;
pub mod time;
pub mod timeline;
pub mod train;
