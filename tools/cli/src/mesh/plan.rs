//! The port pairs of nodes, by their subnets, and the routes between nodes that share none.

use tinynccl::bootstrap::interface::in_subnet;
use tinynccl_plan::topology::Routes;

use super::node::{Node, Port};

/// Two ports in one subnet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cable {
    /// Numbers of the nodes, the lower one first.
    pub(super) nodes: [usize; 2],
    /// Each node's port, by its index in [`Node::ports`].
    pub(super) ports: [usize; 2],
}

/// The route between two nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Way {
    /// Both are one machine and see the same interfaces.
    Same,
    /// Over these port pairs.
    Cables(Vec<Cable>),
    /// Through these nodes, from the lower end on.
    Through(Vec<usize>),
    None,
}

impl Cable {
    /// The ports at both ends.
    pub(super) fn ends<'a>(&self, nodes: &'a [Node]) -> Option<[&'a Port; 2]> {
        let port = |end: usize| nodes.get(self.nodes[end])?.ports.get(self.ports[end]);
        Some([port(0)?, port(1)?])
    }

    /// Mbit/s: the slower end's.
    pub(super) fn speed(&self, nodes: &[Node]) -> Option<u32> {
        let [a, b] = self.ends(nodes)?;
        Some(a.speed?.min(b.speed?))
    }
}

/// Every pair of ports in one subnet, of nodes that are not one machine.
pub(super) fn cables(nodes: &[Node]) -> Vec<Cable> {
    let mut found = Vec::new();
    for (high, b) in nodes.iter().enumerate() {
        for (low, a) in nodes.iter().enumerate().take(high).filter(|(_, a)| !a.host.same_network(&b.host)) {
            for (i, ours) in a.ports.iter().enumerate() {
                let together = b.ports.iter().enumerate().filter(|(_, theirs)| shared(ours, theirs));
                found.extend(together.map(|(j, _)| Cable { nodes: [low, high], ports: [i, j] }));
            }
        }
    }
    found.sort_unstable();
    found
}

/// Each is in the other's subnet. The same address at both is a bridge's, which every host has.
fn shared(a: &Port, b: &Port) -> bool {
    a.ip != b.ip && in_subnet(a.ip, a.prefix, b.ip) && in_subnet(b.ip, b.prefix, a.ip)
}

/// The route between every two nodes, the lower one first, over the port pairs that carry data.
pub(super) fn ways(nodes: &[Node], cables: &[Cable]) -> Vec<([usize; 2], Way)> {
    let between = |pair: [usize; 2]| cables.iter().filter(move |cable| cable.nodes == pair).copied();
    let same =
        |[a, b]: [usize; 2]| matches!((nodes.get(a), nodes.get(b)), (Some(a), Some(b)) if a.host.same_network(&b.host));
    let routes = Routes::new(nodes.len(), |a, b| same([a, b]) || between([a, b]).next().is_some());
    let pairs = (0..nodes.len()).flat_map(|low| (low + 1..nodes.len()).map(move |high| [low, high]));
    let way = |pair: [usize; 2]| {
        let direct: Vec<Cable> = between(pair).collect();
        match routes.path(pair[0], pair[1]) {
            _ if same(pair) => Way::Same,
            _ if !direct.is_empty() => Way::Cables(direct),
            Some(path) => Way::Through(path.through),
            None => Way::None,
        }
    };
    pairs.map(|pair| (pair, way(pair))).collect()
}
