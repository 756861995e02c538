//! The terms of chunks that pass through the stages of the shared region.

use super::{Load, Work};
use crate::algorithm::Shape;
use crate::wire::Collective;

/// A flag per chunk, and one more for the first if ranks reduce parts for each other. A rank copies the data that
/// others need into its stage; reading theirs is the near end of a message.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    let flag = Load { syncs: 1.0, ..Load::default() };
    let reads = |bytes: f64| Load { bytes, ..flag };
    let reduced = if shape.combines() { others } else { 0.0 };
    // The root, or any rank; one that is not the root.
    let (first, other) = match shape.collective {
        Collective::AllReduce | Collective::Barrier => {
            let rank = reads(2.0 * others / n).reducing(reduced / n).copying(1.0);
            (rank, rank)
        }
        Collective::Reduce => {
            let other = reads(others / n).reducing(reduced / n).copying(1.0);
            (Load { bytes: 2.0 * other.bytes, copied: others / n, ..other }, other)
        }
        Collective::ReduceScatter => {
            let rank = reads(others).reducing(reduced).copying(others);
            (rank, rank)
        }
        Collective::AllToAll => (reads(others).copying(n), reads(others).copying(n)),
        Collective::AllGather => (reads(others).copying(2.0), reads(others).copying(2.0)),
        Collective::Gather => (reads(others).copying(1.0), Load::default().copying(1.0)),
        Collective::Broadcast => (Load::default().copying(2.0), reads(1.0)),
        Collective::Scatter => (Load::default().copying(n), reads(1.0)),
        Collective::SendRecv | Collective::Scan => return Work::default(),
    };
    let mean = |of: fn(&Load) -> f64| (of(&first) + others * of(&other)) / n;
    let mean = Load {
        messages: 0.0,
        joined: 0.0,
        queued: 0.0,
        bytes: mean(|l| l.bytes),
        reduced: mean(|l| l.reduced),
        copied: mean(|l| l.copied),
        syncs: 1.0,
    };
    let busiest = if first.bytes + first.copied >= other.bytes + other.copied { first } else { other };
    let syncs = if matches!(shape.collective, Collective::AllReduce | Collective::Reduce) { 2.0 } else { 1.0 };
    Work { path: Load { syncs, ..busiest }, busiest, mean }
}
