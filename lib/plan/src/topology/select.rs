//! Chooses the algorithm and message size with the smallest estimate.

use super::cost::{Breakdown, CostModel, estimate};
use crate::algorithm::Shape;
use crate::wire::{Algorithm, Collective};

/// Messages are not cut below this many bytes to pipeline them.
const SMALLEST_MESSAGE: usize = 8 << 10;
/// Two ranks send the halves of this many bytes or more over two links at once.
const TWO_STREAMS: usize = 256 << 10;
/// Ranks of a host up to which each of them has a link to each other one, where that is not asked for.
const MOST_ON_A_HOST: usize = 16;
/// Message sizes tried: the largest allowed, and this number of halvings of it.
const HALVINGS: u32 = 4;

/// One candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The best message size for it, in bytes.
    pub message: usize,
    /// Time in nanoseconds, by the model.
    pub ns: f64,
    /// Its components.
    pub cost: Breakdown,
}

/// The choice and its basis.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The algorithm to take.
    pub algorithm: Algorithm,
    /// Longest message to cut the buffer into, in bytes, at most what was allowed.
    pub message: usize,
    /// All candidates, the fastest first.
    pub estimates: Vec<Estimate>,
    /// The requested algorithm if it does not support the call: the fastest was taken instead.
    pub refused: Option<Algorithm>,
    /// The algorithm that is taken instead by a call whose buffers are all in symmetric memory, on every rank.
    pub symmetric: Option<Algorithm>,
    /// A schedule made for the links of a described machine (`TINYNCCL_TOPOLOGY`) is taken over links instead.
    pub packed: bool,
    /// The least time that the links of that machine allow.
    pub limit: Option<Limit>,
}

/// A bound of a call's time, of no algorithm: its bytes over the narrowest cut of a described machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Limit {
    /// Time in nanoseconds.
    pub ns: f64,
    /// Names of the links that set it.
    pub links: Vec<String>,
}

impl Choice {
    /// The estimate of the algorithm that was chosen.
    pub fn chosen(&self) -> Option<&Estimate> {
        self.estimates.iter().find(|e| e.algorithm == self.algorithm)
    }

    /// Puts `algorithm` first: by a rule, not by its estimate. `message` is its chunk in bytes.
    pub fn prefer(&mut self, algorithm: Algorithm, shape: &Shape, bytes: usize, message: usize, model: &CostModel) {
        if let Some(cost) = estimate(algorithm, shape, bytes, message, model) {
            self.estimates.insert(0, Estimate { algorithm, message, ns: cost.total(), cost });
            (self.algorithm, self.message, self.refused) = (algorithm, message, None);
        }
    }

    /// The fastest of the others.
    pub fn runner_up(&self) -> Option<&Estimate> {
        self.estimates.iter().find(|e| e.algorithm != self.algorithm)
    }
}

/// Chooses for segments of `bytes` bytes and messages of at most `max_message` bytes. `None` when no algorithm supports
/// the call (point to point, no ranks).
///
/// Pure: ranks that pass the same arguments get the same answer. Ties go to the first in code order and to the larger
/// message. `forced` is taken whenever it supports the collective. Cache the result per (shape, bytes): this costs
/// about a microsecond.
pub fn choose(
    shape: &Shape,
    bytes: usize,
    max_message: usize,
    model: &CostModel,
    forced: Option<Algorithm>,
) -> Option<Choice> {
    let mut estimates: Vec<Estimate> = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| !matches!(algorithm, Algorithm::OneShot | Algorithm::Staged))
        .filter(|&algorithm| forced == Some(algorithm) || is_sensible(algorithm, shape, bytes, model))
        .filter_map(|algorithm| best_message(algorithm, shape, bytes, max_message, model))
        .collect();
    // Stable, so that ties stay in code order.
    estimates.sort_by(|a, b| a.ns.total_cmp(&b.ns));
    let asked = forced.and_then(|algorithm| estimates.iter().find(|e| e.algorithm == algorithm));
    let Estimate { algorithm, message, .. } = *asked.or(estimates.first())?;
    let refused = forced.filter(|_| asked.is_none());
    Some(Choice { algorithm, message, estimates, refused, symmetric: None, packed: false, limit: None })
}

/// A case that the estimates miss: two trees send two messages instead of one. They pay if each half is worth a
/// message. Between two ranks, both trees use the same pair, so they pay only as two streams (measured over TCP). If
/// each rank has its own segment they never pay: in a ring, a rank sends and receives less, in half the messages. Also
/// missed: the memory and the opening of links between all ranks of a host.
fn is_sensible(algorithm: Algorithm, shape: &Shape, bytes: usize, model: &CostModel) -> bool {
    if algorithm == Algorithm::Hierarchical {
        return model.hosts.sizes().1 <= MOST_ON_A_HOST;
    }
    let least = if shape.ranks == 2 { TWO_STREAMS } else { 2 * SMALLEST_MESSAGE };
    let segments = matches!(shape.collective, Collective::AllGather | Collective::ReduceScatter);
    algorithm != Algorithm::DoubleTree || (bytes >= least && !segments)
}

fn best_message(
    algorithm: Algorithm,
    shape: &Shape,
    bytes: usize,
    max_message: usize,
    model: &CostModel,
) -> Option<Estimate> {
    let mut best: Option<Estimate> = None;
    for halvings in 0..=HALVINGS {
        let message = max_message >> halvings;
        if halvings > 0 && message < SMALLEST_MESSAGE {
            break;
        }
        let cost = estimate(algorithm, shape, bytes, message, model)?;
        let ns = cost.total();
        if best.is_none_or(|b| ns < b.ns) {
            best = Some(Estimate { algorithm, message, ns, cost });
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Hosts;
    use crate::topology::Rates;

    fn shape(collective: Collective, ranks: usize) -> Shape {
        Shape { collective, ranks, root: 0, channels: 1 }
    }

    fn chosen(ranks: usize, bytes: usize, model: &CostModel) -> Algorithm {
        choose(&shape(Collective::AllReduce, ranks), bytes, 128 << 10, model, None).unwrap().algorithm
    }

    #[test]
    fn two_ranks_cross_over_from_direct_to_ring() {
        // Direct saves a message but adds everything on both ranks: alpha = gamma/2 · bytes at 6.7 kB and 333 kB.
        let shm = CostModel::shm();
        assert_eq!(chosen(2, 8, &shm), Algorithm::Direct);
        assert_eq!(chosen(2, 6_000, &shm), Algorithm::Direct);
        assert_eq!(chosen(2, 8_000, &shm), Algorithm::Ring);
        assert_eq!(chosen(2, 128 << 20, &shm), Algorithm::Ring);
        assert_eq!(chosen(2, 64_000, &CostModel::tcp()), Algorithm::Direct);
        assert_eq!(chosen(2, 128 << 20, &CostModel::tcp()), Algorithm::Ring);
    }

    #[test]
    fn no_second_tree_where_one_message_would_do() {
        for model in [CostModel::shm(), CostModel::tcp()] {
            for (ranks, bytes) in [(2, 8), (2, 32 << 10), (2, 128 << 10), (4, 8), (4, 8 << 10), (64, 1000)] {
                for collective in [Collective::Broadcast, Collective::Reduce] {
                    let shape = shape(collective, ranks);
                    let choice = choose(&shape, bytes, 128 << 10, &model, None).unwrap();
                    assert!(choice.estimates.iter().all(|e| e.algorithm != Algorithm::DoubleTree), "{shape:?} {bytes}");
                    let asked = choose(&shape, bytes, 128 << 10, &model, Some(Algorithm::DoubleTree)).unwrap();
                    assert_eq!(asked.algorithm, Algorithm::DoubleTree);
                }
            }
        }
    }

    #[test]
    fn many_ranks_small_messages_take_logarithmic_hops_and_large_ones_the_ring_or_its_equal() {
        for model in [CostModel::shm(), CostModel::tcp()] {
            assert_eq!(chosen(4, 8, &model), Algorithm::RecursiveDoubling);
            for ranks in [64, 1000, 4096] {
                let small = chosen(ranks, 8, &model);
                assert!(!matches!(small, Algorithm::Ring | Algorithm::Direct), "{ranks} ranks: {small}");
            }
            for ranks in [3, 5, 12] {
                let large = chosen(ranks, 256 << 20, &model);
                assert!(matches!(large, Algorithm::Ring | Algorithm::AllPairs), "{ranks} ranks: {large}");
            }
        }
    }

    #[test]
    fn a_root_sends_one_message_after_the_other() {
        let model = CostModel::tcp().on_cores(4, 2);
        let choice = |collective| choose(&shape(collective, 4), 8, 1 << 20, &model, None).unwrap().algorithm;
        assert_eq!((choice(Collective::Broadcast), choice(Collective::Reduce)), (Algorithm::Tree, Algorithm::Direct));
        // Between two ranks a second tree is a second message of the same sender, whatever the size is.
        let pair = shape(Collective::Broadcast, 2);
        let ns = |algorithm| estimate(algorithm, &pair, 8, 1 << 20, &CostModel::tcp()).unwrap().total();
        assert!(ns(Algorithm::DoubleTree) > 1.4 * ns(Algorithm::Tree));
    }

    #[test]
    fn short_segments_over_tcp_go_by_way_of_the_hypercube() {
        // Three messages per rank either way, but two of them travel together.
        for model in [CostModel::tcp(), CostModel::tcp().on_cores(4, 2)] {
            for collective in [Collective::ReduceScatter, Collective::AllGather] {
                for bytes in [8, 512, 8 << 10] {
                    let choice = choose(&shape(collective, 4), bytes, 1 << 20, &model, None).unwrap();
                    assert_eq!(choice.algorithm, Algorithm::HalvingDoubling, "{collective:?} {bytes}");
                }
            }
        }
    }

    #[test]
    fn segments_go_by_way_of_others_only_where_that_is_asked_for() {
        // In total as many bytes as a ring, but more of them at an inner node, or at a rank of a pair.
        for model in [CostModel::shm(), CostModel::tcp(), CostModel::tcp().on_cores(4, 2)] {
            for collective in [Collective::ReduceScatter, Collective::AllGather] {
                for ranks in [2, 3, 5, 6, 7, 8, 12, 17, 64] {
                    for bytes in [8, 8 << 10, 1 << 20, 64 << 20] {
                        let choice = choose(&shape(collective, ranks), bytes, 1 << 20, &model, None).unwrap();
                        let by_others = match choice.algorithm {
                            Algorithm::HalvingDoubling => !ranks.is_power_of_two(),
                            algorithm => matches!(algorithm, Algorithm::Tree | Algorithm::DoubleTree),
                        };
                        assert!(!by_others, "{collective} {ranks} ranks {bytes} bytes: {choice:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_that_share_cores_avoid_hops_and_work() {
        let crowded = CostModel::shm().on_cores(8, 2);
        let choice = choose(&shape(Collective::AllReduce, 8), 8, 128 << 10, &crowded, None).unwrap();
        assert_eq!(choice.algorithm, Algorithm::Direct);
        assert_eq!(choice.estimates.last().unwrap().algorithm, Algorithm::Ring);
        assert_ne!(chosen(8, 1 << 20, &crowded), Algorithm::Direct);
    }

    #[test]
    fn a_long_chain_gets_short_messages() {
        let shape = shape(Collective::Broadcast, 8);
        let choice = choose(&shape, 1 << 20, 128 << 10, &CostModel::shm(), Some(Algorithm::Ring)).unwrap();
        assert_eq!(choice.algorithm, Algorithm::Ring);
        assert!(choice.message < 128 << 10);
    }

    #[test]
    fn a_forced_algorithm_is_taken_or_named() {
        let model = CostModel::shm();
        let forced = |collective, algorithm| choose(&shape(collective, 6), 8, 4096, &model, Some(algorithm)).unwrap();
        let choice = forced(Collective::AllReduce, Algorithm::Tree);
        assert_eq!((choice.algorithm, choice.refused), (Algorithm::Tree, None));
        // The seven with schedules, but for two trees, which pay only for more bytes.
        assert_eq!(choice.estimates.len(), 6);
        let choice = forced(Collective::Gather, Algorithm::Tree);
        assert_eq!((choice.algorithm, choice.refused), (Algorithm::Direct, Some(Algorithm::Tree)));
        let choice = forced(Collective::AllGather, Algorithm::HalvingDoubling);
        assert_eq!((choice.algorithm, choice.refused), (Algorithm::HalvingDoubling, None));
        assert!(choose(&shape(Collective::SendRecv, 2), 8, 4096, &model, None).is_none());
    }

    #[test]
    fn ties_go_to_the_first_in_code_order() {
        let free = CostModel { reduce: Rates::flat(0.0), ..CostModel::shm() };
        let choice = choose(&shape(Collective::AllReduce, 1), 8, 4096, &free, None).unwrap();
        assert_eq!((choice.algorithm, choice.message), (Algorithm::Ring, 4096));
        assert!(choice.estimates.is_sorted_by(|a, b| (a.ns, a.algorithm as u8) < (b.ns, b.algorithm as u8)));
    }

    proptest::proptest! {
        /// All ranks rely on this: equal arguments give equal answers, also for a model that was sent as text.
        #[test]
        fn the_choice_depends_on_its_arguments_alone(
            collective in 0u8..9, ranks in 1usize..200, root in 0usize..200, channels in 1usize..4,
            bytes in 0usize..1 << 30, message in 12u32..24, alpha in 1.0f64..1e6, beta in 1e-3f64..10.0,
            block in 1usize..20, cores in 1usize..64,
        ) {
            let rounded = |x: f64| format!("{x:.5e}").parse().unwrap();
            let link = crate::topology::LinkCost { alpha_ns: rounded(alpha), beta: Rates::flat(rounded(beta)) };
            let placement = crate::topology::Placement::blocks(block);
            let model = CostModel { tcp: link, ..CostModel::shm() }.placed(placement).on_cores(block.min(ranks), cores);
            let shape = Shape { root: root % ranks, channels, ..shape(Collective::ALL[usize::from(collective)], ranks) };
            let choice = |model: &CostModel| choose(&shape, bytes, 1 << message, model, None);
            let first = choice(&model);
            proptest::prop_assert!(first.is_some());
            let as_text = serde_json::from_str::<CostModel>(&serde_json::to_string(&model).unwrap()).unwrap();
            proptest::prop_assert_eq!(&as_text, &model);
            proptest::prop_assert_eq!(choice(&as_text), first);
        }
    }

    #[test]
    fn several_hosts_take_the_hierarchy_where_bytes_count_and_one_host_does_not_know_of_it() {
        let chosen = |labels: &[usize], collective, bytes| {
            let model = CostModel::tcp().on_hosts(Hosts::of(labels));
            choose(&shape(collective, labels.len()), bytes, 256 << 10, &model, None).unwrap()
        };
        for labels in [&[0, 0, 0, 0, 1, 1, 1, 1][..], &[0, 1, 0, 1, 0, 1, 0, 1], &[0, 0, 0, 1, 1, 1, 2, 2, 2]] {
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
                let choice = chosen(labels, collective, 4 << 20);
                assert_eq!(choice.algorithm, Algorithm::Hierarchical, "{collective} on {labels:?}: {choice:?}");
            }
            // Eight bytes cross the network once.
            assert_ne!(chosen(labels, Collective::AllReduce, 8).algorithm, Algorithm::Hierarchical);
        }
        let crowded: Vec<usize> = (0..34).map(|rank| rank / 17).collect();
        for labels in [&[0; 8][..], &[0, 1, 2, 3], &crowded] {
            let choice = chosen(labels, Collective::AllReduce, 4 << 20);
            assert!(choice.estimates.iter().all(|e| e.algorithm != Algorithm::Hierarchical));
        }
    }
}
