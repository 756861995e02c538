//! Data-parallel training of a small MLP on the CPU: what milestones 13, 14 and 15 share.
//!
//! ```text
//! options   settings of a training, and the start of its ranks
//! data      points, their order in an epoch, a rank's shard
//! rng       the same random numbers everywhere
//! mlp       the model: forward, and backward into a sink
//! loss      cross entropy, squared error
//! optim     SGD with momentum, Adam
//! replica   one rank's copy, and its step
//! proof     all ranks hold the same bits
//! ```
//! Milestone 13 writes the core itself: the loss, backward, the step and the proof.

pub mod data;
pub mod loss;
pub mod mlp;
pub mod optim;
pub mod options;
pub mod proof;
pub mod replica;
pub mod rng;
