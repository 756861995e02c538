//! The cost model: a message of m bytes takes `alpha + beta·m`, combining m bytes takes `gamma·m`.
//!
//! On a CPU every rank's core does its copies and reductions one after the other, so two times matter per window:
//! - the *path*: the longest chain of messages, each a hop of `alpha + penalty`, with the bytes on it;
//! - the *load*: what the busiest core does for one window. Each end of a message costs half of alpha and of beta.
//!
//! ```text
//! time = max(path, load) + (windows - 1) · (load + penalty)
//!
//! path   |--hop--|--hop--|--hop--|
//! load   |==w0==|==w1==|==w2==|==w3==|        windows follow each other as fast as the busiest rank works
//! ```
//! How many hops, messages and bytes each algorithm takes is in `work.rs`; the verifier checks those figures.
//!
//! Sources: R. W. Hockney, "The communication challenge for MPP" (1994), for alpha and beta; A. Alexandrov et al.,
//! "LogGP" (1995), for the difference between latency and load; NCCL `src/graph/tuning.cc` for the use.

use serde::{Deserialize, Serialize};

use super::work::{Load, work};
use crate::algorithm::{Shape, cut};
use crate::error::{Error, Result};
use crate::schedule::Partition;
use crate::wire::Algorithm;

/// Cost of a message between two ranks, one way, with the copies at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCost {
    /// Time of an empty message in nanoseconds.
    pub alpha_ns: f64,
    /// Time per byte in nanoseconds.
    pub beta_ns_per_byte: f64,
}

impl LinkCost {
    /// Time of a message.
    pub fn message_ns(&self, bytes: usize) -> f64 {
        self.alpha_ns + self.beta_ns_per_byte * bytes as f64
    }
}

/// Everything the choice of an algorithm depends on. It must be the same on all ranks: one rank makes it, and all
/// (that one too) read the text of [`CostModel::to_json`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Format of this record: [`CostModel::VERSION`].
    pub version: u32,
    /// Messages between ranks (of the slowest kind of link in use).
    pub link: LinkCost,
    /// Time to combine two buffers, in nanoseconds per byte of the result.
    pub reduce_ns_per_byte: f64,
    /// Added to each hop when ranks share cores: the scheduler has to switch to the receiver first. In nanoseconds.
    pub hop_penalty_ns: f64,
    /// Ranks per core: above 1, ranks take turns.
    pub ranks_per_core: f64,
}

impl CostModel {
    /// Version of the record that this code reads and writes.
    pub const VERSION: u32 = 1;

    /// Built-in figures for shared memory: an order of magnitude, for when nothing was measured.
    pub fn shm() -> CostModel {
        CostModel::with_link(LinkCost { alpha_ns: 100.0, beta_ns_per_byte: 0.1 })
    }

    /// Built-in figures for TCP over loopback.
    pub fn tcp() -> CostModel {
        CostModel::with_link(LinkCost { alpha_ns: 5_000.0, beta_ns_per_byte: 0.25 })
    }

    /// These links, the built-in figure for arithmetic, a core for each rank.
    pub fn with_link(link: LinkCost) -> CostModel {
        CostModel { version: Self::VERSION, link, reduce_ns_per_byte: 0.03, hop_penalty_ns: 0.0, ranks_per_core: 1.0 }
    }

    /// The same links with so many ranks of this host on so many cores: where ranks take turns, each hop costs a switch.
    pub fn on_cores(self, ranks: usize, cores: usize) -> CostModel {
        let ranks_per_core = (ranks as f64 / cores.max(1) as f64).max(1.0);
        // A switch by yielding takes about 2 µs; one by sleeping and waking takes 15 µs and more.
        CostModel { ranks_per_core, hop_penalty_ns: if ranks_per_core > 1.0 { 2_000.0 } else { 0.0 }, ..self }
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        // Plain numbers in a plain struct: this cannot fail, and an empty text would be refused by `from_json`.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads [`CostModel::to_json`]'s text.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the text is of another version, or holds figures that cannot be.
    pub fn from_json(text: &str) -> Result<CostModel> {
        let invalid = |detail: String| Error::invalid("cost model", detail);
        let model: CostModel =
            serde_json::from_str(text).map_err(|e| invalid(format!("{text:?} does not parse: {e}")))?;
        if model.version != Self::VERSION {
            return Err(invalid(format!("expected version {}, got {}", Self::VERSION, model.version)));
        }
        let figures = [
            ("alpha_ns", model.link.alpha_ns),
            ("beta_ns_per_byte", model.link.beta_ns_per_byte),
            ("reduce_ns_per_byte", model.reduce_ns_per_byte),
            ("hop_penalty_ns", model.hop_penalty_ns),
            ("ranks_per_core", model.ranks_per_core),
        ];
        match figures.into_iter().find(|(_, value)| !(0.0..1e12).contains(value)) {
            Some((name, value)) => Err(invalid(format!("{name}: expected 0 to 1e12, got {value}"))),
            None => Ok(model),
        }
    }

    fn load_ns(&self, load: &Load, window: f64) -> f64 {
        load.messages * self.link.alpha_ns / 2.0
            + window * (load.bytes * self.link.beta_ns_per_byte / 2.0 + load.reduced * self.reduce_ns_per_byte)
    }
}

/// Time in nanoseconds of a call with segments of `bytes` bytes and messages of up to `max_message` bytes.
/// `None` when the algorithm cannot do it.
pub fn estimate(
    algorithm: Algorithm,
    shape: &Shape,
    bytes: usize,
    max_message: usize,
    model: &CostModel,
) -> Option<f64> {
    let work = work(algorithm, shape)?;
    let (parts, span) = cut(algorithm, shape)?;
    let windows = Partition::new(bytes, 1, parts, max_message / span).windows() as f64;
    let window = bytes as f64 / windows;
    let link = &model.link;
    let path = work.hops * (link.alpha_ns + model.hop_penalty_ns)
        + window * (work.path_bytes * link.beta_ns_per_byte + work.path_reduced * model.reduce_ns_per_byte);
    // Ranks that share a core take turns: then the sum over the ranks counts, not the busiest alone.
    let shared = model.ranks_per_core.max(1.0) * model.load_ns(&work.mean, window);
    let load = model.load_ns(&work.busiest, window).max(shared);
    Some(path.max(load) + (windows - 1.0) * (load + model.hop_penalty_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Collective;

    fn all_reduce(ranks: usize) -> Shape {
        Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 }
    }

    #[test]
    fn two_ranks_by_hand() {
        let model = CostModel::shm();
        let ns = |algorithm, bytes| estimate(algorithm, &all_reduce(2), bytes, 1 << 20, &model).unwrap();
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * b.max(1.0), "{a} {b}");
        close(ns(Algorithm::Direct, 1000), 100.0 + 100.0 + 30.0);
        close(ns(Algorithm::Ring, 1000), 2.0 * 100.0 + 100.0 + 15.0);
        close(ns(Algorithm::Tree, 1000), 2.0 * 100.0 + 200.0 + 30.0);
        close(ns(Algorithm::HalvingDoubling, 1000), 200.0 + 100.0 + 15.0);
    }

    #[test]
    fn windows_pipeline_a_chain() {
        let shape = Shape { collective: Collective::Broadcast, ranks: 8, root: 0, channels: 1 };
        let ns = |message| estimate(Algorithm::Ring, &shape, 1 << 20, message, &CostModel::shm()).unwrap();
        assert!(ns(64 << 10) < 0.4 * ns(1 << 20));
    }

    #[test]
    fn estimates_are_finite_and_grow_with_size_and_ranks_per_core() {
        for model in [CostModel::shm(), CostModel::tcp(), CostModel::shm().on_cores(8, 2)] {
            for algorithm in Algorithm::ALL {
                for collective in Collective::ALL {
                    for ranks in [1, 2, 3, 8, 17, 65_536] {
                        let shape = Shape { collective, ranks, root: 0, channels: 1 };
                        let mut before = 0.0;
                        for bytes in [0, 8, 1 << 10, 1 << 16, 1 << 20, 1 << 30, usize::MAX] {
                            let Some(ns) = estimate(algorithm, &shape, bytes, 128 << 10, &model) else { continue };
                            assert!(
                                ns.is_finite() && ns >= before,
                                "{algorithm} {shape:?} {bytes}: {ns} after {before}"
                            );
                            before = ns;
                            let crowded = CostModel { ranks_per_core: 4.0, hop_penalty_ns: 2e3, ..model.clone() };
                            assert!(estimate(algorithm, &shape, bytes, 128 << 10, &crowded).unwrap() >= ns);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn json_round_trips_and_rejects_garbage() {
        let model = CostModel::tcp().on_cores(4, 2);
        let text = model.to_json();
        assert_eq!(CostModel::from_json(&text).unwrap(), model);
        for bad in [
            String::new(),
            text.replace("\"version\":1", "\"version\":2"),
            text.replace("5000.0", "-1"),
            text.replace("5000.0", "1e300"),
            text.replace("alpha_ns", "alpha"),
            format!("{text}x"),
        ] {
            let e = CostModel::from_json(&bad).unwrap_err().to_string();
            assert!(e.starts_with("cost model: "), "{e}");
        }
    }
}
