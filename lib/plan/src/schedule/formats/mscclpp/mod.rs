//! mscclpp's execution plans: JSON with a `gpu` per rank, its threadblocks and their one-sided operations.
//!
//! The meaning of each operation is that of `src/core/executor/execution_plan.cc` and
//! `src/core/include/execution_kernel.hpp` of microsoft/mscclpp.
//!
//! | file | idea |
//! |---|---|
//! | `file` | the text's structure |
//! | `read` | operations with their buffers, channels and signals resolved |
//! | `one_sided` | which write, read or signal makes what known to whom; messages in their place |
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
