//! The least time in which the links of a machine can carry a collective, whatever the schedule, and the links that
//! forbid a shorter one.
//!
//! | file | idea |
//! |---|---|
//! | this one | what must reach whom, as flows |
//! | `flow` | the largest flow, and the narrowest cut |
//! | `tests` | formulas, and schedules that are simulated |
//!
//! Two kinds of demand are compared with the links' bandwidths; neither knows of latency or of processors.
//! - **What a rank must learn.** In an all_gather each rank must get the segments of all others, so the links into
//!   every set of vertices that lacks k segments carry k segments (Edmonds, 1973: where ranks alone branch, trees that
//!   reach this bound exist. ForestColl, arXiv 2402.06787, packs them). Ranks copy and forward here.
//! - **What the ranks receive together.** Switches do not copy: each byte that a rank gets has left some rank on its
//!   own.
//!
//! Reduced data flow as copied data do, the other way round. For each element of an all_reduce n - 1 ranks send
//! theirs before the first rank has the result, and n - 1 receive it after that (Patarasuk and Yuan, 2009); and over
//! each cut a part of it passes either way.
//!
//! Links of which both directions share a bandwidth, or that share another, count as if each had it for itself: the
//! bound is below the truth there. It also lets messages take any path, not only the machine's routes.

mod flow;
#[cfg(test)]
mod tests;

use self::flow::{Edge, Network, Vertex};
use crate::schedule::Shape;
use crate::wire::Collective;

/// A lower bound of a collective's time on a machine's links.
#[derive(Debug, Clone, PartialEq)]
pub struct Bound {
    /// Seconds for each byte of a segment.
    pub seconds_per_byte: f64,
    /// Names of the links that forbid less, in the machine's order.
    pub links: Vec<String>,
}

/// A machine's vertices and links, as flows see them.
#[derive(Debug, Clone, Default)]
pub(super) struct Wiring {
    /// Vertex of each rank.
    pub(super) place: Vec<usize>,
    /// Per vertex: bandwidth and name of the connection between its ranks.
    pub(super) inside: Vec<Option<(f64, String)>>,
    /// From, to, bandwidth, name.
    pub(super) links: Vec<(usize, usize, f64, String)>,
}

/// Least time of a call of `shape` on `wiring`; `None` for calls without data, or where no links lead.
pub(super) fn bound(wiring: &Wiring, shape: &Shape) -> Option<Bound> {
    let ranks = shape.ranks;
    if ranks < 2 {
        return None;
    }
    let forward = || Flows::new(wiring, ranks, false);
    let backward = || Flows::new(wiring, ranks, true);
    let others = (ranks - 1) as f64;
    let gathered = |flows: Flows| flows.all_learn(|_| 1.0, &vec![others; ranks]);
    let copied = |flows: Flows| {
        let received: Vec<f64> = (0..ranks).map(|rank| f64::from(u8::from(rank != shape.root))).collect();
        flows.all_learn(|from| f64::from(u8::from(from == shape.root)), &received)
    };
    match shape.collective {
        Collective::AllGather => gathered(forward()),
        Collective::ReduceScatter => gathered(backward()),
        Collective::AllReduce => {
            let mut flows = forward();
            let rate = flows.together(2.0 * others);
            flows.between_halves(rate, |_, _, _| 1.0)
        }
        Collective::Broadcast => copied(forward()),
        Collective::Reduce => copied(backward()),
        Collective::Scatter => forward().sent_from(shape.root),
        Collective::Gather => backward().sent_from(shape.root),
        Collective::AllToAll => {
            forward().between_halves(Rate::default(), |_, _, [inside, outside]| (inside * outside) as f64)
        }
        // A rank needs the inputs before its own.
        Collective::Scan => {
            let mut flows = forward();
            let rate = flows.together(others);
            flows.between_halves(rate, |from, to, _| f64::from(u8::from(from < to)))
        }
        Collective::Barrier | Collective::SendRecv => None,
    }
}

/// A flow network in which every rank is a source and a sink.
#[derive(Debug, Clone)]
struct Flows {
    network: Network,
    source: Vertex,
    sink: Vertex,
    /// Per rank: edge from the source, edge from what it receives to what it sends, edge to the sink.
    ends: Vec<[Edge; 3]>,
    /// Ranks one of which stands for each vertex.
    leaders: Vec<usize>,
    /// Vertex of what each rank sends.
    sends: Vec<Vertex>,
    named: Vec<(Edge, String)>,
}

/// Amounts that enter and leave in a flow, in multiples of the unknown rate: per rank, from the source and to the sink.
struct Demand {
    from: Vec<f64>,
    to: Vec<f64>,
    /// Ranks pass on what they receive.
    passes_on: bool,
}

/// The largest rate so far, with the links that forbid more.
struct Rate {
    value: f64,
    links: Vec<String>,
}

impl Default for Rate {
    fn default() -> Rate {
        Rate { value: f64::INFINITY, links: Vec::new() }
    }
}

impl Rate {
    fn bound(self) -> Option<Bound> {
        let seconds_per_byte = 1.0 / self.value;
        seconds_per_byte.is_finite().then_some(Bound { seconds_per_byte, links: self.links })
    }
}

impl Flows {
    /// The links between the first `ranks` ranks, with their directions turned round if `reversed`.
    fn new(wiring: &Wiring, ranks: usize, reversed: bool) -> Flows {
        let mut network = Network::default();
        let (source, sink) = (network.vertex(), network.vertex());
        let mut named = Vec::new();
        let turned = |(from, to): (usize, usize)| if reversed { (to, from) } else { (from, to) };
        // What arrives at a place may leave it again, and what leaves may not arrive.
        let places: Vec<[Vertex; 2]> = wiring
            .inside
            .iter()
            .map(|_| {
                let [arrives, leaves] = [network.vertex(), network.vertex()];
                network.edge(arrives, leaves, f64::INFINITY);
                [arrives, leaves]
            })
            .collect();
        for (from, to, bandwidth, name) in &wiring.links {
            let (from, to) = turned((*from, *to));
            named.push((network.edge(places[from][1], places[to][0], *bandwidth), name.clone()));
        }
        let at_home = &wiring.place[..ranks.min(wiring.place.len())];
        let hubs: Vec<Option<[Vertex; 2]>> = (wiring.inside.iter().enumerate())
            .map(|(place, inside)| {
                // A rank alone sends nothing to itself.
                let several = at_home.iter().filter(|&&at| at == place).nth(1).is_some();
                inside.as_ref().filter(|_| several).map(|(bandwidth, name)| {
                    let [enters, ends] = [network.vertex(), network.vertex()];
                    named.push((network.edge(enters, ends, *bandwidth), name.clone()));
                    [enters, ends]
                })
            })
            .collect();
        let (mut ends, mut leaders, mut sends, mut seen) = (vec![], vec![], vec![], vec![false; places.len()]);
        for (rank, &place) in at_home.iter().enumerate() {
            let [receives, send] = [network.vertex(), network.vertex()];
            network.edge(places[place][0], receives, f64::INFINITY);
            network.edge(send, places[place][1], f64::INFINITY);
            if let Some([enters, leaves]) = hubs[place] {
                network.edge(send, enters, f64::INFINITY);
                network.edge(leaves, receives, f64::INFINITY);
            }
            ends.push([
                network.edge(source, send, 0.0),
                network.edge(receives, send, 0.0),
                network.edge(receives, sink, 0.0),
            ]);
            sends.push(send);
            if !std::mem::replace(&mut seen[place], true) {
                leaders.push(rank);
            }
        }
        Flows { network, source, sink, ends, leaders, sends, named }
    }

    /// Every rank gets `has(from)` segments from each other rank, and receives `received` in all.
    fn all_learn(mut self, has: impl Fn(usize) -> f64, received: &[f64]) -> Option<Bound> {
        let ranks = self.ends.len();
        let mut rate = Rate::default();
        let together = Demand { from: vec![f64::INFINITY; ranks], to: received.to_vec(), passes_on: false };
        self.lower(&together, &mut rate);
        for to in self.leaders.clone() {
            let from: Vec<f64> = (0..ranks).map(|from| if from == to { 0.0 } else { has(from) }).collect();
            let sum = from.iter().sum();
            let one = |rank| if rank == to { sum } else { 0.0 };
            self.lower(&Demand { from, to: (0..ranks).map(one).collect(), passes_on: true }, &mut rate);
        }
        rate.bound()
    }

    /// Every other rank gets a segment of its own from `root`.
    fn sent_from(mut self, root: usize) -> Option<Bound> {
        let ranks = self.ends.len();
        let mut rate = Rate::default();
        let from = (0..ranks).map(|rank| if rank == root { f64::INFINITY } else { 0.0 }).collect();
        let to = (0..ranks).map(|rank| if rank == root { 0.0 } else { 1.0 }).collect();
        self.lower(&Demand { from, to, passes_on: true }, &mut rate);
        rate.bound()
    }

    /// Rate at which all ranks together can receive `segments`.
    fn together(&mut self, segments: f64) -> Rate {
        for ends in self.ends.clone() {
            let unbounded = [f64::INFINITY, 0.0, f64::INFINITY];
            ends.into_iter().zip(unbounded).for_each(|(edge, capacity)| self.network.set(edge, capacity));
        }
        let (width, side) = self.network.largest(self.source, self.sink);
        Rate { value: width / segments, links: self.names(&side) }
    }

    /// Lowers `rate` to that of the narrowest of the cuts between two ranks, over which `demand(from, to, numbers of
    /// ranks on both sides)` segments pass.
    fn between_halves(mut self, mut rate: Rate, demand: impl Fn(usize, usize, [usize; 2]) -> f64) -> Option<Bound> {
        let ranks = self.ends.len();
        // Two ranks of one place have a cut, too.
        let second = (1..ranks).find(|rank| !self.leaders.contains(rank));
        let ends: Vec<usize> = self.leaders.iter().copied().chain(second).collect();
        for &from in &ends {
            for &to in ends.iter().filter(|&&to| to != from) {
                for (rank, [source, on, sink]) in self.ends.iter().enumerate() {
                    let unbounded = |is: bool| if is { f64::INFINITY } else { 0.0 };
                    self.network.set(*source, unbounded(rank == from));
                    self.network.set(*on, f64::INFINITY);
                    self.network.set(*sink, unbounded(rank == to));
                }
                let (width, side) = self.network.largest(self.source, self.sink);
                let inside = self.sends.iter().filter(|&&send| side[send]).count();
                let value = width / demand(from, to, [inside, ranks - inside]);
                if value < rate.value {
                    rate = Rate { value, links: self.names(&side) };
                }
            }
        }
        rate.bound()
    }

    /// Lowers the rate until the network carries the demand: each cut that is too narrow gives the next rate (Newton's
    /// method for fractional programs, Dinkelbach, 1967).
    fn lower(&mut self, demand: &Demand, rate: &mut Rate) {
        let wanted: f64 = demand.to.iter().sum();
        if rate.value.is_infinite() {
            // More than all links together carry.
            rate.value = 2.0 * self.named.iter().map(|(edge, _)| self.network.capacity(*edge)).sum::<f64>() / wanted;
        }
        loop {
            let x = rate.value;
            for (rank, [from, on, to]) in self.ends.iter().enumerate() {
                let source = if demand.from[rank] > 0.0 { demand.from[rank] * x } else { 0.0 };
                self.network.set(*from, source);
                self.network.set(*on, if demand.passes_on { f64::INFINITY } else { 0.0 });
                self.network.set(*to, demand.to[rank] * x);
            }
            let (carried, side) = self.network.largest(self.source, self.sink);
            if carried >= wanted * x * (1.0 - 1e-9) {
                return;
            }
            // The part of the cut that does not grow with the rate.
            let crossing = self.named.iter().filter(|(edge, _)| self.network.crosses(*edge, &side));
            let fixed: f64 = crossing.map(|(edge, _)| self.network.capacity(*edge)).sum();
            let scaled = (carried - fixed) / x;
            let next = fixed / (wanted - scaled);
            // Rounding may leave the last cut as it was.
            if next.is_nan() || next >= x {
                return;
            }
            *rate = Rate { value: next, links: self.names(&side) };
        }
    }

    fn names(&self, side: &[bool]) -> Vec<String> {
        let crossing = self.named.iter().filter(|(edge, _)| self.network.crosses(*edge, side));
        crossing.map(|(_, name)| name.clone()).collect()
    }
}
