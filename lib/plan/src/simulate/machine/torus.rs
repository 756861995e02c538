//! A two-dimensional torus: rank (row, column) is joined to its four neighbours, with wrap-around.
//!
//! ```text
//!   0 - 1 - 2 -(0)      rows of `columns` ranks; every line is two links, one each way
//!   |   |   |
//!   3 - 4 - 5 -(3)      a route first goes along the row, then along the column, the shorter way round
//!   |   |   |           (dimension-ordered; a tie goes up)
//!  (0) (1) (2)
//! ```
//! The built-in figures are those of one link of a TPU v4's inter-chip interconnect: 50 GB/s each way (N. P. Jouppi et
//! al., "TPU v4", 2023: 6 links of 50 GB/s, there in three dimensions); 1 µs of latency per message and 0.1 µs per link
//! are assumptions.

use super::{Costs, LinkId, Machine, Translation, divides};

/// A torus of rows and columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Torus {
    rows: usize,
    columns: usize,
    /// Seconds of a message, at any distance.
    pub latency: f64,
    /// Seconds for each link on its way.
    pub per_link: f64,
    /// Bytes per second of a link, each way.
    pub bandwidth: f64,
    /// Costs of the ranks' processors.
    pub costs: Costs,
}

const RIGHT: u16 = 0;
const LEFT: u16 = 1;
const DOWN: u16 = 2;
const UP: u16 = 3;

impl Torus {
    /// As square as `ranks` allows.
    pub fn new(ranks: usize) -> Torus {
        let rows = (1..=ranks.isqrt()).rev().find(|&r| ranks.is_multiple_of(r)).unwrap_or(1);
        Torus::of(rows, ranks / rows)
    }

    /// Returns a torus of `rows` rows and `columns` columns.
    pub fn of(rows: usize, columns: usize) -> Torus {
        let costs = Costs { call: 2e-6, overhead: 0.0, reduce: 3.0 / 1.2e12, copy: 2.0 / 1.2e12 };
        Torus { rows, columns, latency: 1e-6, per_link: 0.1e-6, bandwidth: 50e9, costs }
    }

    /// Links along one dimension of `size`, from `at` to `to`: how many, and whether upwards.
    fn way(size: usize, at: usize, to: usize) -> (usize, bool) {
        let up = (to + size - at) % size;
        if up <= size - up { (up, true) } else { (size - up, false) }
    }
}

impl Machine for Torus {
    fn name(&self) -> String {
        format!("mesh, a torus of {} x {}", self.rows, self.columns)
    }

    fn ranks(&self) -> usize {
        self.rows * self.columns
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn kinds(&self) -> Vec<String> {
        ["right", "left", "down", "up"].map(String::from).to_vec()
    }

    fn bandwidth(&self, _: LinkId) -> f64 {
        self.bandwidth
    }

    fn link_name(&self, link: LinkId) -> String {
        let (row, column) = (link.at as usize / self.columns, link.at as usize % self.columns);
        let what = ["right", "left", "down", "up"];
        format!("row {row} column {column} {}", what.get(usize::from(link.kind)).unwrap_or(&"?"))
    }

    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64 {
        let first = links.len();
        let (mut row, mut column) = (from / self.columns, from % self.columns);
        let (across, right) = Torus::way(self.columns, column, to % self.columns);
        for _ in 0..across {
            let at = (row * self.columns + column) as u32;
            links.push(LinkId { kind: if right { RIGHT } else { LEFT }, at });
            column = if right { (column + 1) % self.columns } else { (column + self.columns - 1) % self.columns };
        }
        let (along, down) = Torus::way(self.rows, row, to / self.columns);
        for _ in 0..along {
            let at = (row * self.columns + column) as u32;
            links.push(LinkId { kind: if down { DOWN } else { UP }, at });
            row = if down { (row + 1) % self.rows } else { (row + self.rows - 1) % self.rows };
        }
        self.latency + (links.len() - first) as f64 * self.per_link
    }

    fn period(&self, translation: Translation, ranks: usize) -> Option<usize> {
        // By whole rows; only a full torus wraps.
        let full = ranks == self.ranks() && translation == Translation::Rotation;
        if full { divides(translation, self.columns, ranks) } else { None }
    }
}
