//! Maximum flow and minimum cut, by blocking flows (E. A. Dinic, 1970).

use std::collections::VecDeque;

/// A vertex of a [`Network`].
pub(super) type Vertex = usize;

/// Part of the largest capacity below which a flow counts as nothing.
const NOTHING: f64 = 1e-12;

/// One direction of an edge. The other direction is its neighbour in the list: `at ^ 1`.
#[derive(Debug, Clone, Copy)]
struct Arc {
    to: Vertex,
    capacity: f64,
    left: f64,
}

/// Directed edges with capacities.
#[derive(Debug, Clone, Default)]
pub(super) struct Network {
    arcs: Vec<Arc>,
    leaving: Vec<Vec<usize>>,
}

/// An edge, by the order in which they were added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Edge(usize);

impl Network {
    pub(super) fn vertex(&mut self) -> Vertex {
        self.leaving.push(Vec::new());
        self.leaving.len() - 1
    }

    pub(super) fn edge(&mut self, from: Vertex, to: Vertex, capacity: f64) -> Edge {
        let at = self.arcs.len();
        self.arcs.push(Arc { to, capacity, left: capacity });
        self.arcs.push(Arc { to: from, capacity: 0.0, left: 0.0 });
        self.leaving[from].push(at);
        self.leaving[to].push(at + 1);
        Edge(at)
    }

    pub(super) fn set(&mut self, edge: Edge, capacity: f64) {
        self.arcs[edge.0].capacity = capacity;
    }

    pub(super) fn capacity(&self, edge: Edge) -> f64 {
        self.arcs[edge.0].capacity
    }

    /// True if an edge leads from `side` to the other vertices.
    pub(super) fn crosses(&self, edge: Edge, side: &[bool]) -> bool {
        side[self.arcs[edge.0 + 1].to] && !side[self.arcs[edge.0].to]
    }

    /// The largest flow, and the vertices on the source's side of a minimum cut.
    pub(super) fn largest(&mut self, source: Vertex, sink: Vertex) -> (f64, Vec<bool>) {
        let finite = self.arcs.iter().map(|arc| arc.capacity).filter(|capacity| capacity.is_finite());
        let nothing = finite.fold(0.0, f64::max) * NOTHING;
        self.arcs.iter_mut().for_each(|arc| arc.left = arc.capacity);
        let mut sum = 0.0;
        loop {
            let level = self.levels(source, nothing);
            if level[sink].is_none() {
                return (sum, level.into_iter().map(|level| level.is_some()).collect());
            }
            let mut next = vec![0; self.leaving.len()];
            while let Some(flow) = self.augment(source, sink, &level, &mut next, nothing) {
                sum += flow;
            }
        }
    }

    /// Distances from the source over edges with capacity left.
    fn levels(&self, source: Vertex, nothing: f64) -> Vec<Option<u32>> {
        let mut level = vec![None; self.leaving.len()];
        level[source] = Some(0);
        let mut queue = VecDeque::from([(source, 0)]);
        while let Some((vertex, far)) = queue.pop_front() {
            for &at in &self.leaving[vertex] {
                let Arc { to, left, .. } = self.arcs[at];
                if left > nothing && level[to].is_none() {
                    level[to] = Some(far + 1);
                    queue.push_back((to, far + 1));
                }
            }
        }
        level
    }

    /// Sends a flow along one shortest path; `next` is the first edge of each vertex that may lead on.
    fn augment(
        &mut self,
        source: Vertex,
        sink: Vertex,
        level: &[Option<u32>],
        next: &mut [usize],
        nothing: f64,
    ) -> Option<f64> {
        let mut path: Vec<usize> = Vec::new();
        let mut vertex = source;
        while vertex != sink {
            let Some(&at) = self.leaving[vertex].get(next[vertex]) else {
                // A dead end: one step back.
                let last = path.pop()?;
                vertex = self.arcs[last ^ 1].to;
                next[vertex] += 1;
                continue;
            };
            let Arc { to, left, .. } = self.arcs[at];
            if left > nothing && level[to].is_some() && level[to] == level[vertex].map(|level| level + 1) {
                path.push(at);
                vertex = to;
            } else {
                next[vertex] += 1;
            }
        }
        let flow = path.iter().map(|&at| self.arcs[at].left).fold(f64::INFINITY, f64::min);
        for at in path {
            self.arcs[at].left -= flow;
            self.arcs[at ^ 1].left += flow;
        }
        Some(flow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_is_as_wide_as_its_narrowest_edge() {
        let mut network = Network::default();
        let [a, b, c, d] = std::array::from_fn(|_| network.vertex());
        let wide = network.edge(a, b, 3.0);
        let narrow = network.edge(b, c, 1.0);
        network.edge(c, d, f64::INFINITY);
        let (flow, side) = network.largest(a, d);
        assert!(flow == 1.0 && network.crosses(narrow, &side) && !network.crosses(wide, &side));
        network.edge(b, d, 0.5);
        assert_eq!(network.largest(a, d).0, 1.5);
        assert_eq!(network.largest(d, a).0, 0.0);
    }

    proptest! {
        /// L. R. Ford and D. R. Fulkerson, 1956: no cut is narrower than the largest flow, and one is as narrow.
        #[test]
        fn the_largest_flow_is_the_smallest_cut(
            edges in proptest::collection::vec((0usize..6, 0usize..6, 0u32..10), 1..24),
        ) {
            let mut network = Network::default();
            (0..6).for_each(|_| _ = network.vertex());
            let add = |&(from, to, capacity): &(usize, usize, u32)| network.edge(from, to, f64::from(capacity));
            let edges: Vec<Edge> = edges.iter().map(add).collect();
            let (flow, found) = network.largest(0, 5);
            let width = |side: &[bool]| {
                edges.iter().filter(|edge| network.crosses(**edge, side)).map(|edge| network.capacity(*edge)).sum::<f64>()
            };
            let cuts = (0u32..16).map(|others| {
                let side: Vec<bool> = (0..6).map(|v| v == 0 || (v < 5 && others >> (v - 1) & 1 == 1)).collect();
                width(&side)
            });
            prop_assert_eq!(flow, cuts.fold(f64::INFINITY, f64::min));
            prop_assert_eq!(flow, width(&found));
        }
    }
}
