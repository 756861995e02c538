//! Collective communication from first principles: NCCL's calls between processes, threads and GPUs.
//!
//! ```no_run
#![doc = include_str!("../examples/all_reduce.rs")]
//! ```
//!
//! # In your program
//!
//! The library is not published as a crate yet. In `Cargo.toml`, with `path = "…/tinynccl/lib"` for a clone beside your
//! program:
//!
//! ```toml
//! [dependencies]
//! tinynccl = { git = "https://github.com/tinynccl/tinynccl" }
//! ```
//!
//! With `default-features = false` it has no [`cuda`], and builds in four fifths of the time. The program above is
//! `cargo run -p tinynccl --example all_reduce`; `own_algorithm` makes a collective of its own.
//!
//! # Types
//!
//! | Type | What it is |
//! |---|---|
//! | [`Comm`] | one rank's communicator: blocking and asynchronous collectives, messages, [`Comm::split`] |
//! | [`comm::Group`] | several calls as one, which cannot wait for each other: [`Comm::group`] |
//! | [`schedule::Schedule`] | a collective of your own making, proved, and run by [`Comm::run_program`] |
//! | [`comm::Work`] | an asynchronous call, which has the buffers until [`comm::Work::wait`] |
//! | [`comm::SymmetricBuffer`] | memory that the peers read and write directly: [`Comm::alloc`] |
//! | [`launch::Launcher`] | starts the ranks of a program on this host |
//! | [`process_group::ProcessGroup`] | `torch.distributed`'s interface over this library, NCCL or MPI |
//! | [`ddp::Ddp`] | gradients in buckets, averaged while backward goes on |
//! | [`SharedState`] | equal buffers on all ranks after ranks were lost and gained: what differs is fetched |
//! | [`cuda::DeviceComm`] | collectives between GPUs, enqueued in a stream or captured in a graph |
//! | [`transport::rails::Net`] | connections with posted sends and receives, as NVIDIA's NCCL wants them of a network |
//! | [`Config`] | the settings, also from variables `TINYNCCL_…` |
//! | [`Error`] | names the call, the ranks, the expected and the received value, and the next step |
//!
//! # To read
//!
//! [The book](https://github.com/tinynccl/tinynccl/blob/main/docs/book/src/index.md) builds the library step by step, and has
//! pages on [the way of a call](https://github.com/tinynccl/tinynccl/blob/main/docs/book/src/topics/stack.md), on
//! [choosing an algorithm](https://github.com/tinynccl/tinynccl/blob/main/docs/book/src/topics/algorithms.md), on
//! [ranks that are lost](https://github.com/tinynccl/tinynccl/blob/main/docs/book/src/topics/survive.md) and on
//! [a job that hangs](https://github.com/tinynccl/tinynccl/blob/main/docs/book/src/topics/hang.md).
//! [All settings](https://github.com/tinynccl/tinynccl/blob/main/docs/config.md),
//! [measurements](https://github.com/tinynccl/tinynccl/blob/main/docs/speed/README.md).
//!
//! # Below the calls
//!
//! A collective is data: an [`algorithm`] compiles a call into a [`schedule`], the executor runs it over
//! [`transport`] links. The same value is verified, costed ([`topology`]), drawn and simulated ([`simulate`]). See
//! SPEC.md for the architecture. What only computes is a crate below this one, `tinynccl-plan` (`lib/plan`), and has
//! the same names here.

pub mod ddp;
mod declared;
pub mod launch;
pub mod process_group;
mod shared_state;

#[doc(inline)]
pub use tinynccl_comm as comm;
#[doc(inline)]
pub use tinynccl_comm::{reduce, status, topology, trace};
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use tinynccl_cuda as cuda;
#[doc(inline)]
pub use tinynccl_plan::{algorithm, dtype, error, float8, schedule, simulate, wire};
#[doc(inline)]
pub use tinynccl_sys::{config, interrupt};
#[cfg(fuzzing)]
#[doc(hidden)]
pub use tinynccl_transport::fuzzing;
#[doc(inline)]
pub use tinynccl_transport::{self as transport, bootstrap};

pub use shared_state::{SharedState, Synchronized};
pub use tinynccl_comm::{Comm, Ticket};
pub use tinynccl_plan::{Call, DType, Element, Error, F8E4M3, F8E5M2, ReduceOp, Result};
#[doc(hidden)]
pub use tinynccl_sys::Kept;
pub use tinynccl_sys::{Config, Secret};

/// Compiles the example of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
