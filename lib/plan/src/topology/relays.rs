//! The cost of relayed messages, between ranks that reach each other only through others.
//!
//! ```text
//! rank 0 ──hop── rank 1 ──hop── rank 2        a message from 0 to 2: two messages, and rank 1 receives and sends it
//! ```
//! Each hop is a separate message, so a relayed message costs alpha and beta once per hop:
//! - on the *path*, one after the other: a relay forwards whole messages as they arrive (cut-through), so the hops of
//!   one message follow each other, and those of the next message overlap with them;
//! - in the *load* of the relay, two more ends per relayed message. A thread of the relay forwards it; the model gives
//!   that thread no separate core, because a machine full of ranks has none to spare.
//!
//! The relayed messages are counted in the programs of all ranks; without relays nothing is counted. A relay outside
//! the communicator has no load here.

use std::collections::BTreeMap;

use super::routes::Path;
use crate::algorithm::{Hosts, Shape, program_on};
use crate::wire::Algorithm;

/// The relayed pairs of a communicator, by its own numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Relays {
    /// For each pair, the lower rank first: hops, and the members among its relays.
    ways: BTreeMap<(usize, usize), (usize, Vec<usize>)>,
}

/// Factors of an algorithm's messages and of their bytes: 1 without relays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factor {
    /// Their number.
    pub messages: f64,
    /// Their bytes.
    pub bytes: f64,
}

/// The factors for the three views of [`Work`](super::terms::Work).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Detour {
    /// Factor on the longest chain of messages.
    pub path: Factor,
    /// Factor of the rank that has most to do, relaying included.
    pub busiest: Factor,
    /// Factor of all ranks together.
    pub mean: Factor,
}

impl Detour {
    /// Every message makes one hop.
    pub const NONE: Detour = Detour { path: Factor::ONE, busiest: Factor::ONE, mean: Factor::ONE };
}

impl Factor {
    const ONE: Factor = Factor { messages: 1.0, bytes: 1.0 };
}

/// A rank's work, counted in ends of messages and in their bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    own: [f64; 2],
    /// Its own, times the hops that they make.
    hops: [f64; 2],
    /// Between others.
    relayed: [f64; 2],
}

impl Relays {
    /// From the routes of the world, for a communicator of these members.
    pub fn new(paths: &[Path], members: &[usize]) -> Relays {
        let of = |rank: &usize| members.iter().position(|member| member == rank);
        let way = |path: &Path| {
            let (a, b) = (of(&path.ends[0])?, of(&path.ends[1])?);
            Some(((a.min(b), a.max(b)), (path.through.len() + 1, path.through.iter().filter_map(of).collect())))
        };
        Relays { ways: paths.iter().filter_map(way).collect() }
    }

    /// Hops of a message between two ranks.
    pub fn hops(&self, a: usize, b: usize) -> usize {
        self.way(a, b).map_or(1, |(hops, _)| *hops)
    }

    fn way(&self, a: usize, b: usize) -> Option<&(usize, Vec<usize>)> {
        self.ways.get(&(a.min(b), a.max(b)))
    }

    /// The factors of an algorithm with its relayed messages.
    pub fn detour(&self, algorithm: Algorithm, shape: &Shape, hosts: &Hosts) -> Detour {
        if self.ways.is_empty() {
            return Detour::NONE;
        }
        let mut ranks = vec![Counted::default(); shape.ranks];
        for rank in 0..shape.ranks {
            let Some(program) = program_on(algorithm, shape, hosts, rank) else { return Detour::NONE };
            for step in program.lanes.iter().flat_map(|lane| &lane.steps) {
                let size = [1.0, step.parts().len() as f64];
                for peer in [step.source(), step.destination()].into_iter().flatten() {
                    let hops = self.hops(rank, peer) as f64;
                    if let Some(counted) = ranks.get_mut(rank) {
                        add(&mut counted.own, size, 1.0);
                        add(&mut counted.hops, size, hops);
                    }
                }
                // Each message once: where it is sent.
                let relays = step.destination().and_then(|peer| self.way(rank, peer));
                for &relay in relays.into_iter().flat_map(|(_, through)| through) {
                    if let Some(counted) = ranks.get_mut(relay) {
                        add(&mut counted.relayed, size, 2.0);
                    }
                }
            }
        }
        let factor = |of: &dyn Fn(usize) -> f64| Factor { messages: of(0), bytes: of(1) };
        let most = |of: &dyn Fn(&Counted) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
        let sum = |of: &dyn Fn(&Counted) -> f64| ranks.iter().map(of).sum::<f64>();
        Detour {
            // The chain goes through the rank whose messages make most hops.
            path: factor(&|i| most(&|c| ratio(c.hops[i], c.own[i]))),
            busiest: factor(&|i| ratio(most(&|c| c.own[i] + c.relayed[i]), most(&|c| c.own[i]))),
            mean: factor(&|i| ratio(sum(&|c| c.own[i] + c.relayed[i]), sum(&|c| c.own[i]))),
        }
    }
}

fn add(to: &mut [f64; 2], size: [f64; 2], times: f64) {
    to.iter_mut().zip(size).for_each(|(to, size)| *to += times * size);
}

/// At least 1, also for 0 / 0.
fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { (a / b).max(1.0) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{CostModel, Routes, choose, estimate};
    use crate::wire::Collective;

    fn line(ranks: usize) -> Relays {
        Relays::new(&Routes::new(ranks, |a, b| b == a + 1).paths(), &(0..ranks).collect::<Vec<_>>())
    }

    fn shape(collective: Collective, ranks: usize) -> Shape {
        Shape { collective, ranks, root: 0, channels: 1 }
    }

    #[test]
    fn nothing_is_paid_where_nothing_is_relayed() {
        let direct = Relays::new(&Routes::direct().paths(), &[0, 1, 2]);
        assert_eq!(direct.detour(Algorithm::Ring, &shape(Collective::AllReduce, 3), &Hosts::default()), Detour::NONE);
        // Only the pair 0 and 2 is relayed, and a chain over the line does not use it.
        let chain = shape(Collective::Broadcast, 3);
        assert_eq!(line(3).detour(Algorithm::Ring, &chain, &Hosts::default()), Detour::NONE);
    }

    #[test]
    fn a_ring_over_a_line_of_three_pays_for_one_edge() {
        let detour = line(3).detour(Algorithm::Ring, &shape(Collective::AllReduce, 3), &Hosts::default());
        // Of three edges one makes two hops. Its relay has the ends of its own two edges and of this one.
        for (factor, expected) in [(detour.path, 1.5), (detour.busiest, 2.0), (detour.mean, 4.0 / 3.0)] {
            assert!(
                (factor.messages - expected).abs() < 1e-12 && (factor.bytes - expected).abs() < 1e-12,
                "{detour:?}"
            );
        }
    }

    #[test]
    fn numbers_are_those_of_the_communicator_and_outsiders_have_no_load() {
        let paths = Routes::new(4, |a, b| b == a + 1).paths();
        let relays = Relays::new(&paths, &[3, 0]);
        assert_eq!((relays.hops(0, 1), relays.hops(1, 0)), (3, 3));
        let detour = relays.detour(Algorithm::Direct, &shape(Collective::AllReduce, 2), &Hosts::default());
        assert_eq!((detour.path.messages, detour.busiest, detour.mean), (3.0, Factor::ONE, Factor::ONE));
    }

    #[test]
    fn more_relays_never_cost_less_for_any_algorithm() {
        for ranks in 2..=9 {
            for collective in Collective::ALL {
                let shape = shape(collective, ranks);
                for algorithm in Algorithm::ALL {
                    let direct = CostModel::tcp();
                    let relayed = CostModel { relays: line(ranks), ..direct.clone() };
                    for bytes in [8, 64 << 10, 16 << 20] {
                        let ns = |m| estimate(algorithm, &shape, bytes, 128 << 10, m).map(|cost| cost.total());
                        if let (Some(direct), Some(relayed)) = (ns(&direct), ns(&relayed)) {
                            assert!(relayed >= direct, "{algorithm} {shape:?} {bytes}: {relayed} after {direct}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn on_a_line_small_calls_turn_from_everybody_to_neighbours() {
        // Over direct links 8 bytes go to all 8 ranks at once or in log n rounds; on a line those messages pass most of
        // the ranks.
        let shape = shape(Collective::Broadcast, 8);
        let direct = CostModel::tcp();
        let relayed = CostModel { relays: line(8), ..direct.clone() };
        let time = |algorithm, model| estimate(algorithm, &shape, 64 << 10, 128 << 10, model).unwrap().total();
        let gap = |model| time(Algorithm::Direct, model) / time(Algorithm::Ring, model);
        assert!(gap(&relayed) > 2.0 * gap(&direct), "{} after {}", gap(&relayed), gap(&direct));
        let chosen = choose(&shape, 64 << 10, 128 << 10, &relayed, None).unwrap();
        assert_eq!(chosen.algorithm, Algorithm::Ring, "{:?}", chosen.estimates);
    }
}
