//! The chooser by hand: the time of a call by the cost model's formula, and the algorithm and message size with the
//! smallest. For ranks that share memory and have a core each; the library's own
//! ([`cost.rs`](../../../lib/plan/src/topology/cost.rs), [`select.rs`](../../../lib/plan/src/topology/select.rs)) adds
//! networks, relays, and ranks that share a core. `--explain` compares both.

use tinynccl::algorithm::Shape;
use tinynccl::topology::terms::Load;
use tinynccl::topology::{Choice, CostModel, Terms, terms};
use tinynccl::wire::Algorithm;

/// Most halvings of the largest message size that are tried; none goes below [`SMALLEST`].
const HALVINGS: u32 = 4;
const SMALLEST: usize = 8 << 10;

/// Prices of the parts of a call, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Prices {
    /// The call itself.
    call: f64,
    /// A message, both of its ends.
    alpha: f64,
    /// A byte of a message, both of its ends.
    beta: f64,
    /// A byte that is combined with another one.
    gamma: f64,
    /// A byte that is copied.
    delta: f64,
    /// Waiting for a flag in shared memory.
    sync: f64,
}

impl Prices {
    /// The model's, for a call whose buffers take `footprint` bytes per rank: a byte in a cache costs less.
    fn of(model: &CostModel, footprint: f64) -> Prices {
        let shares = model.caches.shares(footprint, model.busy_cores);
        let [beta, gamma, delta] =
            [model.shm.beta, model.reduce, model.copy].map(|rates| rates.at(shares, model.crowding()));
        Prices { call: model.call_ns, alpha: model.shm.alpha_ns, beta, gamma, delta, sync: model.sync_ns }
    }
}

/// The time of a call in nanoseconds.
// EXERCISE 4 (The chooser by hand): price a load: ends of messages (with `queued`) times alpha / 2, bytes times beta /
// 2, the rest times its price; bytes, reduced and copied are segments of `terms.window` bytes. The first window takes
// the longer of path and busiest, each further one busiest; `call` comes once.
pub(crate) fn time(terms: &Terms, prices: &Prices) -> f64 {
    let price = |load: &Load| {
        let ends = (load.messages + load.queued) * prices.alpha + terms.window * load.bytes * prices.beta;
        let on_the_spot = terms.window * (load.reduced * prices.gamma + load.copied * prices.delta);
        ends / 2.0 + on_the_spot + load.syncs * prices.sync
    };
    let (path, busiest) = (price(&terms.work.path), price(&terms.work.busiest));
    prices.call + path.max(busiest) + (terms.windows - 1.0) * busiest
}

/// An algorithm, with messages of at most `message` bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pick {
    pub(crate) algorithm: Algorithm,
    pub(crate) message: usize,
    pub(crate) ns: f64,
}

/// The pick with the smallest `cost`, which is `None` where an algorithm cannot do the call.
// EXERCISE 5 (The chooser by hand): try every candidate with the `largest` message and up to HALVINGS halvings of it
// that are not below SMALLEST. A tie goes to the earlier candidate and to the larger message: all ranks must come to
// the same. Skip what has no cost.
pub(crate) fn choose(
    candidates: &[Algorithm],
    largest: usize,
    cost: impl Fn(Algorithm, usize) -> Option<f64>,
) -> Option<Pick> {
    let mut best: Option<Pick> = None;
    for &algorithm in candidates {
        for halvings in 0..=HALVINGS {
            let message = largest >> halvings;
            if halvings > 0 && message < SMALLEST {
                break;
            }
            let Some(ns) = cost(algorithm, message) else { continue };
            if best.is_none_or(|best| ns < best.ns) {
                best = Some(Pick { algorithm, message, ns });
            }
        }
    }
    best
}

/// Returns true if [`Prices`] suffice for the model: ranks on one host, not more than one per core.
pub(crate) fn applies(model: &CostModel, ranks: usize) -> bool {
    model.placement.hosts(ranks) == 1 && model.ranks_per_core <= 1.0
}

/// Our pick among the algorithms that the library has estimated, for segments of `bytes` bytes, and the library's best.
pub(crate) fn both(choice: &Choice, shape: &Shape, bytes: usize, model: &CostModel) -> Option<[Pick; 2]> {
    let estimated =
        || choice.estimates.iter().filter(|e| !matches!(e.algorithm, Algorithm::OneShot | Algorithm::Staged));
    // In the order of their codes, as the library tries them.
    let candidates: Vec<Algorithm> =
        Algorithm::ALL.into_iter().filter(|a| estimated().any(|e| e.algorithm == *a)).collect();
    // The library begins with this size, unless shorter messages are faster for every algorithm.
    let largest = estimated().map(|e| e.message).max()?;
    let ours = choose(&candidates, largest, |algorithm, message| {
        let terms = terms(algorithm, shape, bytes, message)?;
        Some(time(&terms, &Prices::of(model, terms.footprint)))
    })?;
    let theirs = estimated().min_by(|a, b| a.ns.total_cmp(&b.ns))?;
    Some([ours, Pick { algorithm: theirs.algorithm, message: theirs.message, ns: theirs.ns }])
}

#[cfg(test)]
mod tests {
    use tinynccl::topology::terms::Work;
    use tinynccl::topology::{Rates, choose as library, estimate};
    use tinynccl::wire::Collective;

    use super::*;

    const PRICES: Prices = Prices { call: 7.0, alpha: 100.0, beta: 2.0, gamma: 0.5, delta: 0.25, sync: 30.0 };

    #[test]
    fn time_adds_every_price_once() {
        let one = |load: Load| {
            let work = Work { path: load, busiest: load, mean: load };
            time(&Terms { windows: 1.0, window: 10.0, footprint: 0.0, work }, &PRICES) - PRICES.call
        };
        let none = Load::default();
        assert_eq!(one(none), 0.0);
        assert_eq!(one(Load { messages: 2.0, ..none }), 100.0, "two ends are one message");
        assert_eq!(one(Load { queued: 1.0, ..none }), 50.0);
        assert_eq!(one(Load { bytes: 2.0, ..none }), 20.0, "one segment of 10 bytes, at both ends");
        assert_eq!(one(Load { reduced: 3.0, ..none }), 15.0);
        assert_eq!(one(Load { copied: 4.0, ..none }), 10.0);
        assert_eq!(one(Load { syncs: 2.0, ..none }), 60.0);
    }

    #[test]
    fn time_of_further_windows_is_the_busiest_ranks() {
        let load = |messages| Load { messages, ..Load::default() };
        let of = |path, busiest, windows| {
            let work = Work { path: load(path), busiest: load(busiest), mean: load(0.0) };
            time(&Terms { windows, window: 1.0, footprint: 0.0, work }, &PRICES)
        };
        assert_eq!(of(6.0, 2.0, 1.0), 307.0, "the chain");
        assert_eq!(of(2.0, 6.0, 1.0), 307.0, "the busiest rank");
        assert_eq!(of(6.0, 2.0, 4.0), 607.0, "the chain once, and the busiest rank three times");
    }

    #[test]
    fn time_is_the_librarys_estimate() {
        let flat = CostModel { contention: 1.0, copy: Rates::flat(0.1), ..CostModel::shm() };
        for model in [CostModel::shm(), flat, CostModel::shm().on_cores(4, 8)] {
            for collective in Collective::ALL {
                for (ranks, bytes) in [(2, 8), (3, 4096), (8, 1 << 20), (16, 64 << 20)] {
                    let shape = Shape { collective, ranks, root: 0, channels: 1 };
                    for algorithm in Algorithm::ALL {
                        let Some(terms) = terms(algorithm, &shape, bytes, 128 << 10) else { continue };
                        let ours = time(&terms, &Prices::of(&model, terms.footprint));
                        let theirs = estimate(algorithm, &shape, bytes, 128 << 10, &model).unwrap().total();
                        assert!(
                            (ours - theirs).abs() <= 1e-9 * theirs,
                            "{algorithm} {collective}, {ranks} ranks, {bytes} bytes: {ours} ns, the library's {theirs}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn choose_takes_the_smallest_and_breaks_ties_as_all_ranks_must() {
        let all = [Algorithm::Ring, Algorithm::Tree, Algorithm::Direct];
        let pick = |cost: &dyn Fn(Algorithm, usize) -> Option<f64>| {
            choose(&all, 64 << 10, cost).map(|pick| (pick.algorithm, pick.message))
        };
        assert_eq!(pick(&|_, _| Some(1.0)), Some((Algorithm::Ring, 64 << 10)), "all equal");
        assert_eq!(
            pick(&|a, _| Some(if a == Algorithm::Direct { 1.0 } else { 2.0 })),
            Some((Algorithm::Direct, 64 << 10))
        );
        assert_eq!(pick(&|_, message| Some(message as f64)), Some((Algorithm::Ring, 8 << 10)), "not below 8 KiB");
        let middle = |_, message: usize| Some((message as f64 - 32768.0).abs());
        assert_eq!(pick(&middle), Some((Algorithm::Ring, 32 << 10)));
        assert_eq!(pick(&|a, _| (a == Algorithm::Tree).then_some(5.0)), Some((Algorithm::Tree, 64 << 10)));
        assert_eq!(pick(&|_, _| None), None);
        let tried = std::cell::RefCell::new(Vec::new());
        choose(&all[..1], 1 << 20, |_, message| {
            tried.borrow_mut().push(message >> 10);
            Some(0.0)
        });
        assert_eq!(*tried.borrow(), [1024, 512, 256, 128, 64], "four halvings");
        assert_eq!(choose(&all, 4096, |_, message| Some(message as f64)).unwrap().message, 4096, "the largest always");
    }

    #[test]
    fn both_choosers_pick_the_same() {
        for model in [CostModel::shm(), CostModel::shm().on_cores(4, 8)] {
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast, Collective::Reduce]
            {
                for ranks in [2, 3, 4, 8, 17, 64] {
                    let shape = Shape { collective, ranks, root: 0, channels: 1 };
                    for bytes in [8, 1 << 10, 32 << 10, 1 << 20, 64 << 20] {
                        let choice = library(&shape, bytes, 128 << 10, &model, None).unwrap();
                        let [ours, theirs] = both(&choice, &shape, bytes, &model).unwrap();
                        assert_eq!(ours.algorithm, theirs.algorithm, "{collective}, {ranks} ranks, {bytes} bytes");
                    }
                }
            }
        }
    }
}
