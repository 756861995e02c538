//! The cost model: prices of a message, a copied byte and a combined byte, and from them the time of a call.
//!
//! On a CPU every rank's core does its copies and reductions one after the other, so two times matter per window:
//! - the *path*: the longest chain of messages, each a hop of `alpha + switch`, with the bytes on it, and the ends of
//!   other messages that its ranks handle in between;
//! - the *load*: the work of the busiest core for one window. Each end of a message costs half of alpha and of beta.
//!
//! ```text
//! time = call + max(path, load) + (windows - 1) · (load + switch)
//!
//! path   |--hop--|--hop--|--hop--|
//! load   |==w0==|==w1==|==w2==|==w3==|        windows follow each other as fast as the busiest rank works
//!
//! path, load = ends/2 · alpha  +  bytes/2 · beta  +  combined · gamma  +  copied · delta  +  flags · sync
//! ```
//! | figure | meaning | source |
//! | --- | --- | --- |
//! | alpha | an empty message, one way | Hockney |
//! | beta, gamma, delta | a byte sent, combined, copied; each by the location of the data ([`Rates`]) | Hockney; [`super::rates`] |
//! | load, and ends in between | the part of a message that keeps a core busy | LogGP's o and G |
//! | shm or tcp | alpha and beta of each kind of link; the share of each from the [`Placement`] | NCCL `src/graph/tuning.cc` |
//! | call | entering the library, finding the plan | measured with a message that makes one hop instead of many |
//! | sync | waiting for a flag in shared memory: a message without a payload | |
//! | switch | ranks that share a core in time slices: the scheduler runs another rank first | built in |
//! | hops | a relayed message is one message per hop, and loads the relays | [`super::relays`], counted in the programs |
//! | ranks per core | then the load of all ranks of a core counts, not that of the busiest | |
//! | crowding | R cores on one memory: times `1 + (c - 1)(R - 1)`, where c is how much two slow each other down | measured |
//!
//! [`mod@super::terms`] has the number of each that an algorithm takes; the verifier checks those figures.
//!
//! Not modelled: NUMA, TCP streams that share a NIC, page faults, time lost because ranks do not enter together.
//!
//! Sources: R. W. Hockney, "The communication challenge for MPP" (1994); A. Alexandrov et al., "LogGP" (1995); NCCL
//! `src/graph/tuning.cc` for the use.

use serde::{Deserialize, Serialize};

use super::placement::{Placement, Share};
use super::rates::{Caches, Rates, Shares};
use super::relays::{Factor, Relays};
use super::terms::{Load, crossing, hierarchical, terms};
use crate::algorithm::{Hosts, Shape};
use crate::wire::Algorithm;

/// Cost of a message between two ranks, one way, with the copies at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCost {
    /// Time of an empty message in nanoseconds.
    pub alpha_ns: f64,
    /// Time per byte in nanoseconds.
    pub beta: Rates,
}

/// The share of alpha that a message over TCP saves when it travels with another one: its headers, the interrupts at
/// both ends, the receiver's wake-up. A system call remains.
const JOINED: f64 = 0.8;

/// Everything the choice of an algorithm depends on. It must be the same on all ranks: one rank makes it, and all
/// (that one too) read its text and [check](CostModel::check) it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Format of this record: [`CostModel::VERSION`].
    pub version: u32,
    /// Messages through shared memory.
    pub shm: LinkCost,
    /// Messages over a network: TCP, or RDMA if requested.
    pub tcp: LinkCost,
    /// Extra time of combining a byte that is copied or received anyway.
    pub reduce: Rates,
    /// Copying a byte from memory to memory.
    pub copy: Rates,
    /// A call that sends nothing, in nanoseconds.
    pub call_ns: f64,
    /// Waiting for a flag that another rank sets in shared memory, in nanoseconds.
    pub sync_ns: f64,
    /// Factor by which memory takes longer when two cores use it at once: 1 to 2.
    pub contention: f64,
    /// Added to each hop when ranks share cores, in nanoseconds.
    pub switch_ns: f64,
    /// Ranks per core: above 1, ranks run in time slices.
    pub ranks_per_core: f64,
    /// Cores of a host that run ranks.
    pub busy_cores: f64,
    /// Bytes from which messages between ranks that share memory use zero copy, also on small pages; `None`: never.
    #[serde(alias = "lend_from")]
    pub zero_copy_from: Option<usize>,
    /// Caches of a host.
    pub caches: Caches,
    /// Placement of the ranks on hosts, whose memory they share.
    pub placement: Placement,
    /// The ranks that reach each other only through relays. Not in the record: every rank computes it for each
    /// communicator.
    #[serde(skip)]
    pub relays: Relays,
    /// The hosts of the ranks. Not in the record, as the relays.
    #[serde(skip)]
    pub hosts: Hosts,
}

impl CostModel {
    /// Version of the record that this code reads and writes.
    pub const VERSION: u32 = 3;

    /// Built-in figures for ranks of one host over shared memory: orders of magnitude, used without a measurement.
    pub fn shm() -> CostModel {
        CostModel {
            version: Self::VERSION,
            shm: LinkCost { alpha_ns: 100.0, beta: Rates::new(0.1, 0.1, 0.2) },
            tcp: LinkCost { alpha_ns: 5_000.0, beta: Rates::new(0.25, 0.25, 0.4) },
            reduce: Rates::new(0.03, 0.03, 0.06),
            copy: Rates::new(0.04, 0.06, 0.15),
            call_ns: 50.0,
            sync_ns: 60.0,
            contention: 1.5,
            switch_ns: 0.0,
            ranks_per_core: 1.0,
            busy_cores: 1.0,
            zero_copy_from: None,
            caches: Caches::TYPICAL,
            placement: Placement::TOGETHER,
            relays: Relays::default(),
            hosts: Hosts::default(),
        }
    }

    /// Built-in figures for ranks of which no two share memory.
    pub fn tcp() -> CostModel {
        CostModel { placement: Placement::APART, ..CostModel::shm() }
    }

    /// Returns these figures for ranks placed like `placement`.
    pub fn placed(self, placement: Placement) -> CostModel {
        CostModel { placement, ..self }
    }

    /// Returns these figures for ranks on `hosts`.
    pub fn on_hosts(self, hosts: Hosts) -> CostModel {
        CostModel { placement: Placement::on(&hosts), hosts, ..self }
    }

    /// Returns these figures for `ranks` ranks of a host on `cores` cores: where ranks share a core, each hop costs a
    /// switch.
    pub fn on_cores(self, ranks: usize, cores: usize) -> CostModel {
        let cores = cores.max(1) as f64;
        // Rounded, so that it survives JSON.
        let ranks_per_core = ((ranks as f64 / cores * 1e6).round() / 1e6).max(1.0);
        // A switch by yielding takes about 2 µs; one by sleeping and waking takes 15 µs and more.
        let switch_ns = if ranks_per_core > 1.0 { 2_000.0 } else { 0.0 };
        CostModel { ranks_per_core, switch_ns, busy_cores: (ranks as f64).clamp(1.0, cores), ..self }
    }

    /// Factor by which memory is slower with all busy cores on it than with one.
    pub fn crowding(&self) -> f64 {
        1.0 + (self.contention - 1.0) * (self.busy_cores - 1.0)
    }

    /// Checks the figures; the error says which one is invalid.
    pub fn check(&self) -> Result<(), String> {
        if self.version != Self::VERSION {
            return Err(format!("expected version {}, got {}", Self::VERSION, self.version));
        }
        let rates =
            [("shm.beta", self.shm.beta), ("tcp.beta", self.tcp.beta), ("reduce", self.reduce), ("copy", self.copy)];
        for (name, rate) in rates {
            if let Some((level, value)) = rate.figures().into_iter().find(|(_, value)| !(0.0..1e9).contains(value)) {
                return Err(format!("{name}.{level}: expected 0 to 1e9, got {value}"));
            }
            if !rate.is_sorted() {
                return Err(format!("{name}: expected l2 <= l3 <= memory, got {rate:?}"));
            }
        }
        let figures = [
            ("shm.alpha_ns", self.shm.alpha_ns, 0.0..1e12),
            ("tcp.alpha_ns", self.tcp.alpha_ns, 0.0..1e12),
            ("call_ns", self.call_ns, 0.0..1e12),
            ("sync_ns", self.sync_ns, 0.0..1e12),
            ("switch_ns", self.switch_ns, 0.0..1e12),
            ("contention", self.contention, 1.0..2.0 + 1e-9),
            ("ranks_per_core", self.ranks_per_core, 1.0..1e6),
            ("busy_cores", self.busy_cores, 1.0..1e6),
            ("placement", self.placement.block() as f64, 1.0..f64::INFINITY),
            ("caches.l2", self.caches.l2 as f64, 1.0..1e15),
            ("caches.l3", self.caches.l3 as f64, 1.0..1e15),
        ];
        match figures.into_iter().find(|(_, value, range)| !range.contains(value)) {
            Some((name, value, range)) => {
                Err(format!("{name}: expected {} to {}, got {value}", range.start, range.end))
            }
            None => Ok(()),
        }
    }

    /// The time of a load, by term. `detour`: factor of its messages over the network.
    fn price(&self, load: &Load, window: f64, share: Share, shares: Shares, detour: Factor) -> Breakdown {
        let crowding = self.crowding();
        let rate = |rates: &Rates| rates.at(shares, crowding);
        let mix = |shm: f64, tcp: f64, share: f64| (1.0 - share) * shm + share * tcp;
        let alpha = mix(self.shm.alpha_ns, self.tcp.alpha_ns * detour.messages, share.messages);
        let beta = mix(rate(&self.shm.beta), rate(&self.tcp.beta) * detour.bytes, share.bytes);
        Breakdown {
            latency_ns: (load.messages + load.queued - JOINED * share.messages * load.joined) / 2.0 * alpha,
            transfer_ns: window * load.bytes / 2.0 * beta,
            reduce_ns: window * load.reduced * rate(&self.reduce),
            copy_ns: window * load.copied * rate(&self.copy),
            sync_ns: load.syncs * self.sync_ns,
            switch_ns: 0.0,
            call_ns: 0.0,
            windows: 1.0,
            bound: Bound::Load,
        }
    }
}

/// Components of a call's time, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Breakdown {
    /// Messages, however short.
    pub latency_ns: f64,
    /// Their bytes.
    pub transfer_ns: f64,
    /// Bytes combined.
    pub reduce_ns: f64,
    /// Bytes copied on the spot.
    pub copy_ns: f64,
    /// Flags waited for.
    pub sync_ns: f64,
    /// The scheduler, where ranks share cores.
    pub switch_ns: f64,
    /// The call itself.
    pub call_ns: f64,
    /// Windows that follow each other.
    pub windows: f64,
    /// The bound of the first window.
    pub bound: Bound,
}

/// The resource that determines the time of the first window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// The longest chain of messages.
    Path,
    /// The busiest rank.
    Load,
    /// All ranks of a core, one after the other.
    Cores,
}

impl Breakdown {
    /// The whole time in nanoseconds.
    pub fn total(&self) -> f64 {
        self.terms().iter().map(|(_, ns)| ns).sum()
    }

    /// Name and nanoseconds of each term.
    pub fn terms(&self) -> [(&'static str, f64); 7] {
        [
            ("call", self.call_ns),
            ("latency", self.latency_ns),
            ("transfer", self.transfer_ns),
            ("reduce", self.reduce_ns),
            ("copy", self.copy_ns),
            ("sync", self.sync_ns),
            ("switch", self.switch_ns),
        ]
    }

    /// `times` as long.
    fn scaled(self, times: f64) -> Breakdown {
        Breakdown {
            latency_ns: times * self.latency_ns,
            transfer_ns: times * self.transfer_ns,
            reduce_ns: times * self.reduce_ns,
            copy_ns: times * self.copy_ns,
            sync_ns: times * self.sync_ns,
            switch_ns: times * self.switch_ns,
            ..self
        }
    }

    /// Both, one after the other.
    fn then(self, next: Breakdown) -> Breakdown {
        Breakdown {
            latency_ns: self.latency_ns + next.latency_ns,
            transfer_ns: self.transfer_ns + next.transfer_ns,
            reduce_ns: self.reduce_ns + next.reduce_ns,
            copy_ns: self.copy_ns + next.copy_ns,
            sync_ns: self.sync_ns + next.sync_ns,
            switch_ns: self.switch_ns + next.switch_ns,
            ..self
        }
    }

    /// The longer of the two.
    fn max(self, other: Breakdown) -> Breakdown {
        if other.total() > self.total() { other } else { self }
    }
}

/// Time of a call with segments of `bytes` bytes and messages of up to `max_message` bytes. `None` when the algorithm
/// does not support it.
pub fn estimate(
    algorithm: Algorithm,
    shape: &Shape,
    bytes: usize,
    max_message: usize,
    model: &CostModel,
) -> Option<Breakdown> {
    let (terms, leaving) = match algorithm {
        Algorithm::Hierarchical => hierarchical::on(&model.hosts, shape, bytes, max_message)?,
        _ => {
            // Its ranks are taken host by host.
            let root = model.hosts.order().map_or(shape.root, |order| order.position(shape.root));
            let placed = Shape { root, ..*shape };
            (terms(algorithm, shape, bytes, max_message)?, crossing(algorithm, &placed, model.placement))
        }
    };
    let shares = model.caches.shares(terms.footprint, model.busy_cores);
    let detour = model.relays.detour(algorithm, shape, &model.hosts);
    let price = |load: &Load, share, detour, bound| Breakdown {
        bound,
        ..model.price(load, terms.window, share, shares, detour)
    };
    let mut path = price(&terms.work.path, leaving.path, detour.path, Bound::Path);
    // A flag makes its waiter wait for another rank just as a message does.
    path.switch_ns = (terms.hops() + terms.work.path.syncs) * model.switch_ns;
    // Ranks that share a core run in time slices: then the sum over the ranks counts, not the busiest alone.
    let turns = price(&terms.work.mean, leaving.mean, detour.mean, Bound::Cores).scaled(model.ranks_per_core.max(1.0));
    let load = price(&terms.work.busiest, leaving.busiest, detour.busiest, Bound::Load).max(turns);
    let next = Breakdown { switch_ns: model.switch_ns, ..load }.scaled(terms.windows - 1.0);
    Some(Breakdown { call_ns: model.call_ns, windows: terms.windows, ..path.max(load).then(next) })
}

#[cfg(test)]
mod tests {
    use approx::{assert_abs_diff_eq, relative_eq};

    use super::*;
    use crate::wire::Collective;

    fn all_reduce(ranks: usize) -> Shape {
        Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 }
    }

    fn ns(algorithm: Algorithm, shape: &Shape, bytes: usize, message: usize, model: &CostModel) -> f64 {
        estimate(algorithm, shape, bytes, message, model).unwrap().total()
    }

    /// Round figures, the same at every level of memory.
    fn flat() -> CostModel {
        let link = |alpha_ns, beta| LinkCost { alpha_ns, beta: Rates::flat(beta) };
        let (shm, tcp) = (link(100.0, 0.1), link(5_000.0, 0.25));
        let (reduce, copy) = (Rates::flat(0.03), Rates::flat(0.04));
        CostModel { shm, tcp, reduce, copy, call_ns: 0.0, ..CostModel::shm() }
    }

    #[test]
    fn two_ranks_by_hand() {
        let close = |algorithm, bytes, expected: f64| {
            let got = ns(algorithm, &all_reduce(2), bytes, 1 << 20, &flat());
            assert!(relative_eq!(got, expected, max_relative = 1e-6), "{algorithm}: {got}, by hand {expected}");
        };
        close(Algorithm::Direct, 1000, 100.0 + 100.0 + 30.0);
        close(Algorithm::Ring, 1000, 2.0 * 100.0 + 100.0 + 15.0);
        close(Algorithm::Tree, 1000, 2.0 * 100.0 + 200.0 + 30.0);
        close(Algorithm::HalvingDoubling, 1000, 200.0 + 100.0 + 15.0);
    }

    #[test]
    fn the_terms_say_where_the_time_goes() {
        let model = CostModel { call_ns: 7.0, ..flat() };
        let cost = estimate(Algorithm::Ring, &all_reduce(2), 1000, 1 << 20, &model).unwrap();
        assert_eq!((cost.call_ns, cost.latency_ns, cost.windows, cost.bound), (7.0, 200.0, 1.0, Bound::Path));
        assert_abs_diff_eq!(cost.transfer_ns, 100.0, epsilon = 1e-9);
        assert_abs_diff_eq!(cost.reduce_ns, 15.0, epsilon = 1e-9);
        let gather = Shape { collective: Collective::AllGather, ..all_reduce(2) };
        let cost = estimate(Algorithm::Ring, &gather, 1000, 1 << 20, &flat()).unwrap();
        assert_eq!((cost.reduce_ns, cost.bound), (0.0, Bound::Load));
        assert_abs_diff_eq!(cost.copy_ns, 40.0, epsilon = 1e-9);
    }

    #[test]
    fn the_slower_kind_of_link_counts_where_it_is_used() {
        let shape = Shape { collective: Collective::Broadcast, ..all_reduce(8) };
        let chain = |block| ns(Algorithm::Ring, &shape, 0, 1 << 20, &flat().placed(Placement::blocks(block)));
        assert_eq!(chain(8), 700.0);
        assert_eq!(chain(4), 600.0 + 5_000.0);
        assert_eq!(chain(2), 400.0 + 15_000.0);
        assert_eq!(chain(1), 35_000.0);
        // Distances 1 and 2 stay on the host, distance 4 does not.
        let cube = |block| ns(Algorithm::HalvingDoubling, &all_reduce(8), 0, 1 << 20, &flat().placed(block));
        assert_eq!(cube(Placement::blocks(4)), 2.0 * (100.0 + 100.0 + 5_000.0));
        assert_eq!(cube(Placement::APART), 6.0 * 5_000.0);
    }

    #[test]
    fn beyond_the_caches_bytes_cost_more_and_more_cores_make_it_worse() {
        let model = CostModel { contention: 2.0, ..CostModel::shm() };
        let per_byte = |bytes: usize, model: &CostModel| {
            ns(Algorithm::Ring, &all_reduce(2), bytes, 128 << 10, model) / bytes as f64
        };
        let alone = per_byte(1 << 30, &model);
        assert!(alone > 1.5 * per_byte(1 << 18, &model));
        let two = model.clone().on_cores(2, 2);
        assert_eq!(two.crowding(), 2.0);
        assert!(per_byte(1 << 30, &two) > 1.8 * alone, "one core saturates the memory: two take twice as long");
        assert_eq!(per_byte(1 << 17, &two), per_byte(1 << 17, &model), "caches are not shared that way");
    }

    #[test]
    fn windows_pipeline_a_chain() {
        let shape = Shape { collective: Collective::Broadcast, ..all_reduce(8) };
        let ns = |message| ns(Algorithm::Ring, &shape, 1 << 20, message, &flat());
        assert!(ns(64 << 10) < 0.4 * ns(1 << 20));
    }

    #[test]
    fn estimates_are_finite_and_grow_with_size_and_ranks_per_core() {
        for model in [CostModel::shm(), CostModel::tcp(), CostModel::shm().on_cores(8, 2)] {
            for algorithm in Algorithm::ALL {
                for collective in Collective::ALL {
                    for ranks in [1, 2, 3, 8, 17, 65_536] {
                        for block in [2, 4] {
                            let model =
                                if block == 4 { model.clone().placed(Placement::blocks(4)) } else { model.clone() };
                            let shape = Shape { collective, ranks, root: 0, channels: 1 };
                            let mut before = 0.0;
                            for bytes in [0, 8, 1 << 10, 1 << 16, 1 << 20, 1 << 30, usize::MAX] {
                                let at =
                                    |model| estimate(algorithm, &shape, bytes, 128 << 10, model).map(|b| b.total());
                                let Some(ns) = at(&model) else { continue };
                                assert!(
                                    ns.is_finite() && ns >= before,
                                    "{algorithm} {shape:?} {bytes}: {ns} after {before}"
                                );
                                before = ns;
                                let crowded = CostModel { ranks_per_core: 4.0, switch_ns: 2e3, ..model.clone() };
                                assert!(at(&crowded).unwrap() >= ns);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn json_round_trips_and_rejects_garbage() {
        let model = CostModel::tcp().on_cores(4, 2);
        let text = serde_json::to_string(&model).unwrap();
        let read = |text: &str| {
            let model: CostModel = serde_json::from_str(text).map_err(|e| e.to_string())?;
            model.check().map(|()| model)
        };
        assert_eq!(read(&text), Ok(model));
        assert_eq!(read(&serde_json::to_string(&CostModel::shm()).unwrap()), Ok(CostModel::shm()));
        for bad in [
            String::new(),
            text.replace("\"version\":3", "\"version\":2"),
            text.replace("5000.0", "-1"),
            text.replace("5000.0", "1e300"),
            text.replace("alpha_ns", "alpha"),
            text.replace("\"placement\":1", "\"placement\":0"),
            text.replace("\"memory\":0.2", "\"memory\":0.01"),
            text.replace("\"contention\":1.5", "\"contention\":9.5"),
            format!("{text}x"),
        ] {
            assert_ne!(bad, text);
            assert!(read(&bad).is_err(), "{bad}");
        }
    }
}
