//! A character-level GPT with explicit forward and backward passes, trained with data parallelism.
//!
//! Two chapters: [`cpu`] has the network and its training in plain loops, [`gpu`] the same on GPUs. What both need lies
//! beside them: [`config`] (sizes), [`params`] (what is learnt), [`data`] (text to batches), [`dropout`] and [`rng`]
//! (what is random), [`train`] (the loop), [`run`] (a rank's life), [`checkpoint`],
//! [`sample`], [`report`], [`cli`]. Ranks that die: [`elastic`], and [`agreement`] by hand.
//!
//! Everything random is a function of a seed and of counters (step, layer, sample, position), never of the number of
//! ranks or threads: R ranks with 1/R of the batch each compute what one rank computes with the whole batch.

pub mod agreement;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod cpu;
pub mod data;
pub mod dropout;
pub mod elastic;
pub mod gpu;
pub mod params;
pub mod report;
pub mod rng;
pub mod run;
pub mod sample;
pub mod train;
