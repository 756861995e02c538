//! The part of [tinynccl](https://github.com/tinynccl/tinynccl) that only computes: the program of each rank of a
//! collective, the proof of its result, and its cost. Nothing here opens a socket or a file, queries the machine, or
//! reads a clock.
//!
//! Programs use the crate `tinynccl`, which has all these modules under the same names.
//!
//! Each module uses those above it:
//!
//! | module | idea |
//! | --- | --- |
//! | [`float8`], [`dtype`] | element types and operators |
//! | [`wire`] | names of collectives and algorithms; the header of a message |
//! | [`error`](mod@error) | the one error type |
//! | [`call`] | the one description of a call |
//! | [`device`] | names of how a call of GPUs runs |
//! | [`schedule`] | a collective as data: its steps, proved, played, drawn |
//! | [`algorithm`] | from a call to a schedule |
//! | [`topology`] | connectivity of ranks, cost of a schedule, choice of the algorithm |
//! | [`simulate`] | the same schedules on machines that need not exist |

pub mod algorithm;
pub mod call;
pub mod device;
pub mod dtype;
pub mod error;
pub mod float8;
pub mod schedule;
pub mod simulate;
pub mod topology;
pub mod wire;

pub use call::Call;
pub use dtype::{DType, Element, ReduceOp};
pub use error::{Error, Result};
pub use float8::{F8E4M3, F8E5M2};

/// Compiles the example of the crate's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
