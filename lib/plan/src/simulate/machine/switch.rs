//! One switch that never blocks: every rank has a port, and all pairs are alike. The textbook's machine.

use super::{Costs, LinkId, Machine, Translation, divides};

/// Ranks on one switch.
#[derive(Debug, Clone, PartialEq)]
pub struct Switch {
    /// Number of ranks.
    pub ranks: usize,
    /// Seconds from port to port.
    pub latency: f64,
    /// Bytes per second of a port, each way.
    pub bandwidth: f64,
    /// Costs of the ranks' processors.
    pub costs: Costs,
}

const OUT: u16 = 0;
const IN: u16 = 1;

impl Machine for Switch {
    fn name(&self) -> String {
        format!("switch, {} ranks, {:.3} us, {:.3} GB/s", self.ranks, self.latency * 1e6, self.bandwidth * 1e-9)
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn kinds(&self) -> Vec<String> {
        ["port out", "port in"].map(String::from).to_vec()
    }

    fn bandwidth(&self, _: LinkId) -> f64 {
        self.bandwidth
    }

    fn link_name(&self, link: LinkId) -> String {
        format!("rank {} {}", link.at, if link.kind == OUT { "out" } else { "in" })
    }

    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64 {
        links.extend([LinkId { kind: OUT, at: from as u32 }, LinkId { kind: IN, at: to as u32 }]);
        self.latency
    }

    fn period(&self, translation: Translation, ranks: usize) -> Option<usize> {
        divides(translation, 1, ranks)
    }
}
