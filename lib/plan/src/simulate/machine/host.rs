//! Ranks of one host, with the library's own measured prices ([`CostModel`]).
//!
//! ```text
//!   core 0        core 1          a message is copied in by one core and out by the other: each end costs half
//!   rank 0, 2     rank 1, 3       of alpha and of beta, as in the cost model
//! ```
//! A message between two ranks has a rate of 1/beta at most, and a core twice that for all messages that its ranks send
//! and receive. Prices per byte depend on the location of the data, so a machine is built for one footprint.
//!
//! Ranks that share a core run in time slices: each takes as many times as long, and every hop costs a context switch.

use super::{Costs, LinkId, Machine, Translation, divides};
use crate::topology::{CostModel, LinkCost};

/// Ranks of one host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    ranks: usize,
    cores: usize,
    over: &'static str,
    latency: f64,
    /// Bytes per second between two ranks.
    bandwidth: f64,
    costs: Costs,
}

impl Host {
    /// `ranks` ranks on `cores` cores that touch `footprint` bytes each (input and output), over TCP or through shared
    /// memory.
    pub fn new(model: &CostModel, ranks: usize, cores: usize, footprint: usize, over_tcp: bool) -> Host {
        let cores = cores.clamp(1, ranks.max(1));
        let model = model.clone().on_cores(ranks, cores);
        let LinkCost { alpha_ns, beta } = if over_tcp { model.tcp } else { model.shm };
        let shares = model.caches.shares(footprint as f64, model.busy_cores);
        let seconds = |rates: &crate::topology::Rates| rates.at(shares, model.crowding()) * 1e-9;
        let turns = model.ranks_per_core;
        let costs = Costs {
            call: model.call_ns * 1e-9,
            overhead: alpha_ns / 2.0 * 1e-9 * turns,
            reduce: seconds(&model.reduce) * turns,
            copy: seconds(&model.copy) * turns,
        };
        let over = if over_tcp { "TCP" } else { "shared memory" };
        Host { ranks, cores, over, latency: model.switch_ns * 1e-9, bandwidth: 1.0 / seconds(&beta), costs }
    }
}

impl Machine for Host {
    fn name(&self) -> String {
        format!("host, {} ranks on {} cores over {}", self.ranks, self.cores, self.over)
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn kinds(&self) -> Vec<String> {
        vec!["core".to_owned()]
    }

    fn bandwidth(&self, _: LinkId) -> f64 {
        2.0 * self.bandwidth
    }

    fn fastest(&self) -> f64 {
        self.bandwidth
    }

    fn link_name(&self, link: LinkId) -> String {
        format!("core {}", link.at)
    }

    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64 {
        links.extend([from, to].map(|rank| LinkId { kind: 0, at: (rank % self.cores) as u32 }));
        self.latency
    }

    fn period(&self, translation: Translation, ranks: usize) -> Option<usize> {
        if self.cores == self.ranks { divides(translation, 1, ranks) } else { None }
    }
}
