//! The terms of the hierarchical algorithms. They depend on the hosts, without which nothing is counted.

use super::{Load, Terms, Work, segments};
use crate::algorithm::hierarchical::{parts, supports, widened};
use crate::algorithm::{Hosts, Shape};
use crate::schedule::Partition;
use crate::topology::placement::{Crossing, Share};
use crate::wire::Collective;

/// Terms of a call, and the share of it that leaves the host; `None` where there is no program.
pub(crate) fn on(hosts: &Hosts, shape: &Shape, bytes: usize, message: usize) -> Option<(Terms, Crossing)> {
    if !supports(shape, hosts) {
        return None;
    }
    let shape = widened(shape, hosts, bytes, message);
    let windows = Partition::new(bytes, 1, parts(&shape, hosts), message).windows() as f64;
    let (work, crossing) = work(&shape, hosts);
    let terms = Terms { windows, window: bytes as f64 / windows, footprint: bytes as f64 * segments(&shape), work };
    Some((terms, crossing))
}

/// Numbers inside the hosts, and between them.
#[derive(Debug, Clone, Copy)]
struct Split {
    inside: f64,
    between: f64,
}

impl Split {
    fn sum(self) -> f64 {
        self.inside + self.between
    }

    /// The share that leaves the host.
    fn leaving(self) -> f64 {
        if self.sum() > 0.0 { self.between / self.sum() } else { 0.0 }
    }
}

/// Messages of a channel in a window: all have the same length.
struct Messages {
    /// Segments in one.
    size: f64,
    /// Sums over all ranks.
    all: Split,
    /// Ends of messages of the busiest rank.
    busiest: Split,
    /// Messages that it adds.
    added: f64,
    /// The longest chain.
    hops: Split,
}

fn messages(shape: &Shape, hosts: &Hosts) -> Messages {
    let (n, h) = (shape.ranks as f64, hosts.count() as f64);
    let (lanes, most) = hosts.sizes();
    let (lanes, most) = (lanes as f64, most as f64);
    let others = most - 1.0;
    match shape.collective {
        Collective::ReduceScatter | Collective::AllGather => {
            // Segments that another rank carries, and those of the fullest lane.
            let brought = n - h * lanes;
            let carried: f64 = (0..hosts.count()).map(|host| (hosts.on(host).len() as f64 / lanes).ceil()).sum();
            let slots = (most / lanes).ceil();
            let sums = shape.collective == Collective::ReduceScatter;
            let back = if sums { brought } else { 0.0 };
            Messages {
                size: 1.0,
                all: Split { inside: n * (n - h) + back, between: n * (h - 1.0) },
                // It takes the others' inputs of its lane and gives them those of theirs, or the other way round.
                busiest: Split { inside: carried * others + n - carried, between: 2.0 * carried * (h - 1.0) / h },
                added: carried * others + carried * (h - 1.0) / h,
                hops: Split { inside: slots + if brought > 0.0 { 1.0 } else { 0.0 }, between: slots * (h - 1.0) },
            }
        }
        Collective::Broadcast | Collective::Reduce => {
            let reduces = shape.collective == Collective::Reduce;
            let is_carrier = hosts.place(shape.root).is_some_and(|(_, place)| (place as f64) < lanes);
            // Lanes that another rank of the root's host carries.
            let with_root = if is_carrier { lanes - 1.0 } else { lanes };
            let back = if reduces { with_root } else { 0.0 };
            Messages {
                size: 1.0 / lanes,
                all: Split { inside: lanes * (n - h) + back, between: lanes * (h - 1.0) },
                busiest: Split { inside: others + lanes - 1.0 + back, between: (h - 1.0).min(2.0) },
                added: others + 1.0,
                hops: Split { inside: if with_root > 0.0 { 2.0 } else { 1.0 }, between: h - 1.0 },
            }
        }
        // A part for each lane and host, both ways.
        _ => Messages {
            size: 1.0 / (lanes * h),
            all: Split { inside: 2.0 * h * lanes * (n - h), between: 2.0 * h * lanes * (h - 1.0) },
            busiest: Split { inside: 2.0 * h * (others + lanes - 1.0), between: 4.0 * (h - 1.0) },
            added: h * others + h - 1.0,
            hops: Split { inside: 2.0, between: 2.0 * (h - 1.0) },
        },
    }
}

/// The work of one window, and what leaves the host.
pub(super) fn work(shape: &Shape, hosts: &Hosts) -> (Work, Crossing) {
    let Messages { size, all, busiest, added, hops } = messages(shape, hosts);
    let (n, channels) = (shape.ranks as f64, shape.channels as f64);
    let load = |ends: f64, reduced: f64, copied: f64| {
        let reduced = if shape.combines() { reduced } else { 0.0 };
        Load::ends(channels * ends, ends * size).reducing(reduced).copying(copied)
    };
    let copied = match shape.collective {
        Collective::AllGather => [1.0, 1.0],
        Collective::Broadcast => [1.0, 1.0 / n],
        _ => [0.0, 0.0],
    };
    // Each input of each result is added once.
    let sums = if shape.collective == Collective::ReduceScatter { n - 1.0 } else { (n - 1.0) / n };
    let rank = load(busiest.sum(), added * size, copied[0]);
    let work = Work {
        path: Load { messages: 2.0 * hops.sum(), copied: 0.0, ..rank },
        busiest: rank,
        mean: load(2.0 * all.sum() / n, sums, copied[1]),
    };
    let share = |split: Split| Share::of(split.leaving());
    let path = Share { messages: hops.leaving(), bytes: busiest.leaving() };
    (work, Crossing { path, busiest: share(busiest), mean: share(all) })
}
