//! Collective communication from first principles.
//!
//! A collective is data: an [`algorithm`] compiles a call into a [`schedule`], the executor runs it over
//! [`transport`] links, and a [`Comm`] puts blocking and asynchronous calls on top. See SPEC.md for the architecture.

pub mod algorithm;
pub mod bootstrap;
pub mod comm;
pub mod config;
pub mod cuda;
pub mod ddp;
pub mod dtype;
pub mod error;
mod executor;
pub mod float8;
mod fork;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod interrupt;
pub mod launch;
pub mod process_group;
pub mod reduce;
pub mod schedule;
mod secret;
pub mod simulate;
mod strangers;
mod symmetric;
pub mod topology;
pub mod trace;
pub mod transport;
pub mod wire;

pub use comm::Comm;
pub use config::Config;
pub use dtype::{DType, Element, ReduceOp};
pub use error::{Error, Result};
pub use float8::{F8E4M3, F8E5M2};
pub use secret::Secret;

/// Compiles the example of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
