//! The hosts on which the ranks run: those of one share memory, all others reach each other over a network.

use super::order::{Order, program_in_order};
use super::{Algorithm, Shape, hierarchical, program};
use crate::schedule::Program;

/// The ranks of each host. Empty: one host, or none is known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hosts {
    /// Ranks of a host in their order; hosts in the order of their first ranks.
    hosts: Vec<Vec<usize>>,
    /// Host of each rank, and its place there.
    places: Vec<(usize, usize)>,
    /// The ranks host by host; none where they are numbered so.
    order: Option<Order>,
}

impl Hosts {
    /// From a label per rank, equal for ranks that share memory.
    pub fn of<T: PartialEq>(labels: &[T]) -> Hosts {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        let mut places = Vec::with_capacity(labels.len());
        for (rank, label) in labels.iter().enumerate() {
            let known = hosts.iter().position(|ranks| ranks.first().is_some_and(|&first| &labels[first] == label));
            let host = known.unwrap_or(hosts.len());
            if known.is_none() {
                hosts.push(Vec::new());
            }
            places.push((host, hosts[host].len()));
            hosts[host].push(rank);
        }
        let order = Order::new(hosts.concat()).filter(|order| !order.is_natural());
        Hosts { hosts, places, order }
    }

    /// Number of hosts: at least 1.
    pub fn count(&self) -> usize {
        self.hosts.len().max(1)
    }

    /// Number of ranks; 0 if nothing is known.
    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// The ranks of `host`, in their order.
    pub fn on(&self, host: usize) -> &[usize] {
        self.hosts.get(host).map_or(&[], Vec::as_slice)
    }

    /// Host of `rank`, and its place there.
    pub fn place(&self, rank: usize) -> Option<(usize, usize)> {
        self.places.get(rank).copied()
    }

    /// Ranks of the smallest host, and of the largest.
    pub fn sizes(&self) -> (usize, usize) {
        let sizes = || self.hosts.iter().map(Vec::len);
        (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0))
    }

    /// The ranks host by host, if they are not numbered so.
    pub fn order(&self) -> Option<&Order> {
        self.order.as_ref()
    }
}

/// [`program`] for ranks on these hosts: [hierarchical](super::hierarchical) where that is asked for, and in an order
/// in which the ranks of a host follow each other. Algorithms in which every rank talks to every other have no order,
/// and keep that of their additions.
pub fn program_on(algorithm: Algorithm, shape: &Shape, hosts: &Hosts, rank: usize) -> Option<Program> {
    match (algorithm, hosts.order()) {
        (Algorithm::Hierarchical, _) => hierarchical::program(shape, hosts, rank),
        (Algorithm::Direct | Algorithm::AllPairs, _) | (_, None) => program(algorithm, shape, rank),
        (_, Some(order)) => program_in_order(algorithm, shape, order, rank),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Collective;

    #[test]
    fn labels_become_hosts() {
        let hosts = Hosts::of(&["b", "a", "b", "b"]);
        assert_eq!((hosts.count(), hosts.ranks(), hosts.sizes()), (2, 4, (1, 3)));
        assert_eq!((hosts.on(0), hosts.on(1), hosts.on(2)), (&[0, 2, 3][..], &[1][..], &[][..]));
        assert_eq!((hosts.place(3), hosts.place(4)), (Some((0, 2)), None));
        assert_eq!(hosts.order().unwrap().ranks(), [0, 2, 3, 1]);
        assert!(Hosts::of(&[5, 5, 1]).order().is_none());
        assert_eq!((Hosts::default().count(), Hosts::of(&[0; 3]).count()), (1, 1));
    }

    #[test]
    fn neighbours_in_a_ring_share_a_host_where_they_can() {
        let hosts = Hosts::of(&[0, 1, 0, 1, 0, 1]);
        let shape = Shape { collective: Collective::AllReduce, ranks: 6, root: 0, channels: 1 };
        let leaving = |algorithm| {
            let peers = |rank| program_on(algorithm, &shape, &hosts, rank).unwrap().links();
            let away = |rank: usize, peer: usize| hosts.place(rank).unwrap().0 != hosts.place(peer).unwrap().0;
            (0..6).flat_map(|rank| peers(rank).into_iter().filter(move |&(_, peer)| away(rank, peer))).count()
        };
        assert_eq!(leaving(Algorithm::Ring), 4, "two edges with two ends");
        // Its additions are in rank order.
        let ranks = |rank| program_on(Algorithm::AllPairs, &shape, &hosts, rank);
        assert!((0..6).all(|rank| ranks(rank) == program(Algorithm::AllPairs, &shape, rank)));
    }
}
