//! Collective communication from first principles.
//!
//! A collective is data: an [`algorithm`] compiles a call into a [`schedule`], the executor runs it over
//! [`transport`] links, and a [`Comm`] puts blocking and asynchronous calls on top. See SPEC.md for the architecture.
//!
//! What only computes is a crate below this one, `tinynccl-plan` (`lib/plan`), and has the same names here.

pub mod bootstrap;
pub mod comm;
pub mod config;
pub mod cuda;
pub mod ddp;
mod doorbell;
mod executor;
mod fork;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod interrupt;
pub mod launch;
pub mod process_group;
pub mod reduce;
mod secret;
mod strangers;
mod symmetric;
mod sync;
mod threads;
pub mod topology;
pub mod trace;
pub mod transport;

pub use comm::Comm;
pub use config::Config;
pub use secret::Secret;
pub(crate) use tinynccl_plan::device;
pub use tinynccl_plan::{Call, DType, Element, Error, F8E4M3, F8E5M2, ReduceOp, Result};
#[doc(inline)]
pub use tinynccl_plan::{algorithm, dtype, error, float8, schedule, simulate, wire};

/// Compiles the example of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
