//! MSCCL's XML: an `<algo>` with a `<gpu>` per rank, its threadblocks `<tb>` and their `<step>`s.
//!
//! The meaning of each attribute is that of `src/graph/topo.cc` and `src/collectives/device/msccl_interpreter.h` of
//! microsoft/msccl: a step waits for step `deps` of threadblock `depid`; `src` of a step that receives and reduces is
//! our own operand.

pub(super) mod read;
pub(super) mod write;

use crate::wire::Collective;

/// Name of the format in errors.
pub(super) const NAME: &str = "MSCCL";

/// Collectives that MSCCL has names for, but for `custom`.
const COLLECTIVES: [(&str, Collective); 6] = [
    ("allreduce", Collective::AllReduce),
    ("allgather", Collective::AllGather),
    ("reduce_scatter", Collective::ReduceScatter),
    ("alltoall", Collective::AllToAll),
    ("broadcast", Collective::Broadcast),
    ("reduce", Collective::Reduce),
];
