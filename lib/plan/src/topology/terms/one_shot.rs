//! The terms of one-shot: each rank writes once and reads all others.

use super::{Load, Work};
use crate::algorithm::Shape;
use crate::wire::Collective;

/// One flag. A rank copies its input into its slot, and reads what it needs of all others: the near end of a message.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    let flag = Load { syncs: 1.0, ..Load::default() };
    let written = match shape.collective {
        Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => n,
        _ => 1.0,
    };
    let reader = Load { bytes: others, ..flag }.reducing(if shape.combines() { others } else { 0.0 });
    let one = Load { bytes: 1.0, ..flag };
    match shape.collective {
        Collective::Broadcast | Collective::Scatter => {
            let (root, other) = (Load::default().copying(written), one);
            Work {
                path: other.copying(written),
                busiest: other.copying(written),
                mean: Load { copied: root.copied / n, ..other },
            }
        }
        Collective::Reduce | Collective::Gather => Work {
            path: reader.copying(written),
            busiest: reader.copying(written),
            mean: Load { bytes: others / n, ..flag }.copying(1.0),
        },
        _ => {
            let rank = reader.copying(written);
            Work { path: rank, busiest: rank, mean: rank }
        }
    }
}
