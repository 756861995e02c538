//! The terms of direct exchange with all ranks.

use super::{Load, Work, edges, rank_order_copies};
use crate::algorithm::Shape;
use crate::topology::placement::{Crossing, Placement, Share};
use crate::wire::Collective;

/// One hop; a rank, or the root, handles n-1 messages each way.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    let own = matches!(
        shape.collective,
        Collective::AllGather | Collective::AllToAll | Collective::Broadcast | Collective::Scatter | Collective::Gather
    );
    let own = match shape.collective {
        Collective::Reduce => rank_order_copies(shape.ranks, shape.root, true),
        _ => f64::from(u8::from(own)),
    };
    if shape.collective == Collective::Scan {
        // Half of the messages of an all_reduce; the last rank gets one of every other.
        let mut work = Work::symmetric(1.0, Load::ends(others, others).reducing(others));
        work.busiest.copied = if shape.ranks > 2 { 2.0 } else { 1.0 };
        work.mean = Load::ends(others, others).reducing(others / 2.0).copying((1.0 + 2.0 * (n - 2.0)) / n);
        return work;
    }
    if !shape.collective.has_root() {
        let mut work = Work::symmetric(1.0, Load::hops(others, others).reducing(others).copying(own));
        if (shape.is_all_reduce() || shape.collective == Collective::ReduceScatter) && shape.ranks > 2 {
            work.busiest.copied = rank_order_copies(shape.ranks, shape.ranks - 1, true);
            work.mean.copied = others / n;
        }
        return work;
    }
    // The last message waits until the root has received, or sent, the others. Over loopback the sender also does most
    // of the receiver's work, so each sent message counts as both ends (measured over TCP, three messages: 25 µs out,
    // 11 in).
    let out = matches!(shape.collective, Collective::Broadcast | Collective::Scatter);
    let queued = (others - 1.0) * if out { 2.0 } else { 1.0 };
    Work {
        // The root's end of every message, and one end of its own at the last peer.
        path: Load::ends(2.0, n).queueing(queued).reducing(others),
        busiest: Load::ends(others, others).reducing(others).copying(own),
        mean: edges(n).copying(own / n),
    }
}

/// A rank's messages to its own host stay there.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let n = shape.ranks;
    let share = |block: usize| (n - block) as f64 / (n as f64 - 1.0);
    let all = Share::of(1.0);
    if shape.collective.has_root() {
        let root = Share::of(share(placement.block_of(shape.root, n)));
        return Crossing { path: Share { messages: 1.0, ..root }, busiest: root, mean: root };
    }
    let last = placement.block_of(n - 1, n);
    let full = (n - last) as f64 / n as f64;
    let mean = Share::of(full * share(placement.block_of(0, n)) + (1.0 - full) * share(last));
    let busiest = Share::of(share(last));
    Crossing { path: Share { bytes: busiest.bytes, ..all }, busiest, mean }
}
