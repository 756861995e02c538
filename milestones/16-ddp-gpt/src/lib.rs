//! A character-level GPT with explicit forward and backward passes, trained with data parallelism.
//!
//! Reading order: [`config`] (sizes), [`data`] (text to batches), [`model`] (the passes, built from [`ops`]),
//! [`gradients`] (where gradients live, and how ranks average them), [`adamw`], [`train`] (the loop). [`gpu`] is the same on GPUs.
//!
//! Everything random is a function of a seed and of counters (step, layer, sample, position), never of the number of
//! ranks or threads: R ranks with 1/R of the batch each compute what one rank computes with the whole batch.

pub mod adamw;
pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod distributed;
pub mod gpu;
pub mod gradients;
pub mod model;
pub mod ops;
pub mod params;
pub mod plot;
pub mod profile;
pub mod report;
pub mod rng;
pub mod sample;
pub mod schedule;
pub mod train;
