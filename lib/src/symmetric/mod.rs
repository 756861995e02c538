//! Memory that all ranks of a communicator on one host map, for collectives without messages between pairs.
//!
//! A link moves a message from one rank to one other. Here every rank writes where all others read:
//! - **one-shot** ([`one_shot`]): on a *board*, each rank has slots. It writes its (small) input once, all read it and
//!   reduce for themselves. Two ranks need one cache line from core to core each way, any number of ranks one step.
//! - **two-shot** ([`two_shot`]): *symmetric buffers*, from `Comm::alloc`, lie in memory that all ranks map, so that a
//!   rank reads its peers' inputs and writes its peers' outputs where they are. Nothing is copied through slots.
//!
//! Both combine in rank order, so that the result is the same on all ranks, bit for bit, whatever the timing.
//! NCCL has the same pair for GPUs: `src/device/symmetric`; PyTorch's `SymmetricMemory` has the names.
//!
//! | file | idea |
//! | --- | --- |
//! | `layout` | where what lies |
//! | `words` | the words of the protocol, with their memory orderings |
//! | `board` | a rank's view: publish, see others arrive, finish |
//! | `checks` | checksums of what is published, where they are asked for |
//! | `run` | one call from start to end: turns, spinning, yielding, sleeping |
//! | `one_shot`, `two_shot`, `staged` | the three algorithms |
//! | `work` | reducing and copying where everything can be reached |
//! | `allocation` | symmetric memory and how a call's buffers are found in it |
//!
//! # Protocol
//! Calls count from 1, equally on all ranks. In call `k` a rank that has something to say writes its payload, if that is
//! longer than 24 bytes, and then, last, its line with number `k` (release). Readers wait for `k` (acquire). When a rank
//! needs nothing of call `k` any more it sets its `finished` to `k`; lines and payload areas are reused when all ranks
//! have finished the call that used them last. Arriving at call `k` says that calls before `k` are finished.
//!
//! A sleeper sets its own `asleep` flag and sleeps on it with a futex; whoever writes something that may be waited for looks
//! at the number of sleepers afterwards. [`fence`](crate::transport::fence) has the order of the two.
//!
//! `model.rs` runs all of this under the model checker loom, with two or three ranks. The command is in `scripts/loom.sh`.

mod allocation;
mod board;
mod checks;
#[cfg(all(test, not(loom)))]
mod corrupt_tests;
mod layout;
#[cfg(all(test, loom))]
mod model;
mod one_shot;
mod run;
mod staged;
mod task;
mod two_shot;
mod words;
mod work;

pub(crate) use allocation::{Allocation, Registry, region_bytes};
pub(crate) use board::Board;
pub(crate) use layout::Layout;
pub(crate) use one_shot::slot_bytes;
pub(crate) use run::run;
pub(crate) use staged::largest_chunk;
pub(crate) use task::{Outcome, Plan};
