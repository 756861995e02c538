//! Time per byte, by the location of the bytes.
//!
//! A call accesses a *footprint* of F bytes per rank (its input and its output). Reused buffers stay in the caches as
//! far as they fit. A cache of C bytes is assumed to hold C/F of a footprint F:
//! ```text
//! share in L2        min(1, L2 / F)
//! share in L3        min(1, L3 / (R·F)) less that of L2      R ranks of a host share one L3
//! share in memory    the rest
//! ```
//! A rate thus has three figures, and grows smoothly from one to the next.
//!
//! Source: the three-Cs view of J. L. Hennessy and D. A. Patterson, "Computer Architecture", chapter 2 (capacity
//! misses). A true LRU cache would hold nothing of a loop that does not fit; real ones are not true LRU.

use serde::{Deserialize, Serialize};

/// Nanoseconds per byte by the location of the data. They never fall from one level to the next ([`Rates::new`]).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// In a core's own cache.
    pub l2: f64,
    /// In the cache that the cores share.
    pub l3: f64,
    /// In memory.
    pub memory: f64,
}

impl Rates {
    /// These figures, each at least the one before.
    pub fn new(l2: f64, l3: f64, memory: f64) -> Rates {
        let l3 = l3.max(l2);
        Rates { l2, l3, memory: memory.max(l3) }
    }

    /// Returns `ns_per_byte` for every level.
    pub fn flat(ns_per_byte: f64) -> Rates {
        Rates::new(ns_per_byte, ns_per_byte, ns_per_byte)
    }

    /// The rate at which these shares of the bytes are found. `crowding` (at least 1) slows memory down.
    pub fn at(&self, shares: Shares, crowding: f64) -> f64 {
        shares.l2 * self.l2 + shares.l3 * self.l3 + shares.memory * (self.memory * crowding)
    }

    pub(super) fn figures(&self) -> [(&'static str, f64); 3] {
        [("l2", self.l2), ("l3", self.l3), ("memory", self.memory)]
    }

    pub(super) fn is_sorted(&self) -> bool {
        self.l2 <= self.l3 && self.l3 <= self.memory
    }
}

/// The shares of a call's bytes at each level; they add up to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// In a core's own cache.
    pub l2: f64,
    /// In the shared cache.
    pub l3: f64,
    /// In memory.
    pub memory: f64,
}

/// Sizes of the caches in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Caches {
    /// A core's own (level 2).
    pub l2: usize,
    /// The one that cores share (level 3).
    pub l3: usize,
}

impl Caches {
    /// For machines that do not report their caches.
    pub const TYPICAL: Caches = Caches { l2: 1 << 20, l3: 32 << 20 };

    /// Shares of a call's bytes by level, for `footprint` bytes per rank, when `ranks` ranks share the level-3 cache.
    pub fn shares(&self, footprint: f64, ranks: f64) -> Shares {
        let held = |cache: usize, bytes: f64| if bytes > cache as f64 { cache as f64 / bytes } else { 1.0 };
        let l2 = held(self.l2, footprint);
        let l3 = held(self.l3, footprint * ranks.max(1.0)).max(l2);
        Shares { l2, l3: l3 - l2, memory: 1.0 - l3 }
    }
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;

    #[test]
    fn what_fits_is_in_the_cache_and_what_does_not_is_shared_out() {
        let caches = Caches { l2: 1 << 20, l3: 32 << 20 };
        let close = |a: Shares, b: (f64, f64, f64)| {
            for (got, expected) in [(a.l2, b.0), (a.l3, b.1), (a.memory, b.2)] {
                assert_abs_diff_eq!(got, expected, epsilon = 1e-12);
            }
        };
        close(caches.shares(0.0, 2.0), (1.0, 0.0, 0.0));
        close(caches.shares((1 << 20) as f64, 2.0), (1.0, 0.0, 0.0));
        close(caches.shares((4 << 20) as f64, 2.0), (0.25, 0.75, 0.0));
        close(caches.shares((64 << 20) as f64, 1.0), (1.0 / 64.0, 0.5 - 1.0 / 64.0, 0.5));
        close(caches.shares((64 << 20) as f64, 2.0), (1.0 / 64.0, 0.25 - 1.0 / 64.0, 0.75));
    }

    #[test]
    fn rates_grow_with_the_footprint_and_with_crowding() {
        let (caches, rates) = (Caches::TYPICAL, Rates::new(0.05, 0.1, 0.3));
        let mut before = 0.0;
        for shift in 0..60 {
            let shares = caches.shares((1u64 << shift) as f64, 2.0);
            let rate = rates.at(shares, 1.0);
            assert!(rate >= before, "{rate} after {before} at 2^{shift}");
            assert!(rates.at(shares, 2.0) >= rate);
            before = rate;
        }
        assert_abs_diff_eq!(before, 0.3, epsilon = 1e-3);
        assert_eq!(Rates::new(0.3, 0.1, 0.2), Rates::flat(0.3));
    }
}
