//! Memory that all ranks of a communicator on one host map, for collectives without messages between pairs.
//!
//! A link moves a message from one rank to one other. Here every rank writes memory that all others read:
//! - **one-shot** ([`one_shot`]): each rank has slots in a *shared region*. It writes its (small) input once; all ranks
//!   read it and reduce it themselves. Two ranks need one cache line from core to core in each direction, any number of
//!   ranks one step.
//! - **two-shot** ([`two_shot`]): *symmetric buffers*, from `Comm::alloc`, are in memory that all ranks map. A rank
//!   reads its peers' inputs and writes its peers' outputs directly. Nothing is copied through slots.
//!
//! Both combine in rank order, so that the result is the same on all ranks, bit for bit, whatever the timing.
//! NCCL has the same pair for GPUs: `src/device/symmetric`; PyTorch's `SymmetricMemory` has the names.
//!
//! | file | idea |
//! | --- | --- |
//! | `layout` | offsets in the shared region |
//! | `words` | the words of the protocol, with their memory orderings |
//! | `board` | a rank's view: publish, see others arrive, finish |
//! | `turn` | a rank's message as it was read, and the result of looking for one |
//! | `task` | a call's plan and its memory |
//! | `checks` | sums of published data, in calls that are verified |
//! | `run` | one call from start to end: steps, spinning, yielding, sleeping |
//! | `one_shot`, `two_shot`, `staged` | the three algorithms |
//! | `work` | reducing and copying between mapped buffers |
//! | `allocation` | symmetric memory and how a call's buffers are found in it |
//!
//! # Protocol
//! Calls are numbered from 1, the same on all ranks. In call `k` a rank with data writes its payload, if that is longer
//! than 24 bytes, and last its line with number `k` (release). Readers wait for `k` (acquire). When a rank needs
//! nothing of call `k` any more, it sets its `finished` to `k`. Lines and slots are reused when all ranks have finished
//! the call that used them last. Arriving at call `k` implies that calls before `k` are finished.
//!
//! A sleeper sets its own `asleep` flag and sleeps on it with a futex. A rank that writes an awaited word then reads
//! the number of sleepers. [`fence`](tinynccl_transport::fence) orders the two.
//!
//! `model.rs` runs all of this under the model checker loom, with two or three ranks. The command is in
//! `scripts/loom.sh`.

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
mod turn;
mod two_shot;
mod words;
mod work;

pub(crate) use allocation::{Allocation, Registry, region_bytes};
pub(crate) use board::{Alarm, Board};
pub(crate) use layout::Layout;
pub(crate) use one_shot::slot_bytes;
pub(crate) use run::run;
pub(crate) use staged::largest_chunk;
pub use task::Plan;
pub(crate) use turn::Outcome;
