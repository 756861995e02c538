//! mscclpp's execution plans: JSON with a `gpu` per rank, its threadblocks and their one-sided operations.
//!
//! The meaning of each operation is that of `src/core/executor/execution_plan.cc` and
//! `src/core/include/execution_kernel.hpp` of microsoft/mscclpp.
//!
//! | file | idea |
//! |---|---|
//! | `file` | the text's structure |
//! | `read` | operations with their buffers, channels and signals resolved |
//! | `one_sided` | which signal, barrier or packet makes what known to whom |
//! | `one_sided/transfer` | messages in the place of writes and reads |
//! | `shorten` | steps that are one step of a schedule |
//! | `write` | from a schedule |

mod file;
mod one_sided;
pub(super) mod read;
mod shorten;
pub(super) mod write;

use crate::wire::Collective;

/// Name of the format in errors.
pub(super) const NAME: &str = "mscclpp";

/// Collectives that mscclpp has names for, and that have a result which is known.
const COLLECTIVES: [(&str, Collective); 4] = [
    ("allreduce", Collective::AllReduce),
    ("allgather", Collective::AllGather),
    ("reducescatter", Collective::ReduceScatter),
    ("alltoall", Collective::AllToAll),
];
