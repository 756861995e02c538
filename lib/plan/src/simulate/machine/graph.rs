//! A machine from a [`Description`]: its nodes, links, shared things.
//!
//! Messages take the route of least latency, then of fewest links, then the one whose links come first. Every node
//! forwards messages.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

pub use super::description::{CostsDescription, Description, Duplex, Inside, Link, Node, Shared};
use super::{Costs, LinkId, MOST_KINDS, Machine};
use crate::algorithm::Hosts;
use crate::error::{Error, Result};
use crate::schedule::Shape;
use crate::simulate::bound::{Bound, Wiring, bound};

/// Most ranks of a description.
const MOST_RANKS: usize = 1 << 20;

/// A machine that a [`Description`] describes.
#[derive(Debug, Clone)]
pub struct Graph {
    name: String,
    costs: Costs,
    kinds: Vec<String>,
    /// By [`LinkId::at`]: name, bandwidth, kind.
    links: Vec<(String, f64, u16)>,
    /// The node of each rank.
    place: Vec<usize>,
    /// Per node: latency and link inside.
    inside: Vec<Option<(f64, u32)>>,
    /// Per source node with ranks: the edge by which each node is reached.
    reached: HashMap<usize, Vec<Option<usize>>>,
    edges: Vec<Edge>,
}

#[derive(Debug, Clone)]
struct Edge {
    from: usize,
    to: usize,
    latency: f64,
    /// The links that messages on it occupy.
    links: Vec<u32>,
}

fn wrong<T>(detail: String) -> Result<T> {
    Err(Error::invalid("topology", detail))
}

/// Checks a figure that must be positive and finite.
fn positive(what: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        wrong(format!("{what}: expected more than 0, got {value}"))
    }
}

/// Checks a figure that may be 0.
fn at_least_zero(what: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        wrong(format!("{what}: expected 0 or more, got {value}"))
    }
}

/// The node of each rank.
fn places(nodes: &[Node]) -> Result<Vec<usize>> {
    let total = nodes.iter().fold(0usize, |sum, node| sum.saturating_add(node.ranks));
    match total {
        0 => return wrong("no node has ranks: add ranks = 1 to a [[node]]".to_owned()),
        too_many if too_many > MOST_RANKS => {
            return wrong(format!("{too_many} ranks, expected at most {MOST_RANKS}"));
        }
        _ => {}
    }
    if nodes.iter().all(|node| node.numbers.is_empty()) {
        return Ok(nodes.iter().enumerate().flat_map(|(at, node)| std::iter::repeat_n(at, node.ranks)).collect());
    }
    let mut places = vec![None; total];
    for (at, node) in nodes.iter().enumerate() {
        let (what, count) = (format!("node '{}', numbers", node.name), node.numbers.len());
        if count != node.ranks {
            return wrong(format!("{what}: {count} of them, expected as many as it has ranks, {}", node.ranks));
        }
        for &rank in &node.numbers {
            match places.get_mut(rank) {
                None => return wrong(format!("{what}: rank {rank}, expected a rank below {total}")),
                Some(Some(_)) => return wrong(format!("{what}: rank {rank} is there twice")),
                Some(place) => *place = Some(at),
            }
        }
    }
    // As many as there are places, and none twice.
    Ok(places.into_iter().flatten().collect())
}

impl Graph {
    /// The machine that `description` describes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for unknown or repeated names, invalid figures, and nodes with ranks that no route
    /// joins.
    pub fn new(description: &Description) -> Result<Graph> {
        let costs = &description.costs;
        let rate = |what: &str, gb_s: f64| at_least_zero(what, gb_s).map(|r| if r > 0.0 { 1e-9 / r } else { 0.0 });
        let costs = Costs {
            call: at_least_zero("costs.call_us", costs.call_us)? * 1e-6,
            overhead: at_least_zero("costs.overhead_us", costs.overhead_us)? * 1e-6,
            reduce: rate("costs.reduce_gb_s", costs.reduce_gb_s)?,
            copy: rate("costs.copy_gb_s", costs.copy_gb_s)?,
        };
        let mut graph = Graph {
            name: if description.name.is_empty() { "a described machine".to_owned() } else { description.name.clone() },
            costs,
            kinds: vec![],
            links: vec![],
            place: vec![],
            inside: vec![],
            reached: HashMap::new(),
            edges: vec![],
        };
        let nodes = graph.add_nodes(&description.node)?;
        graph.add_links(description, &nodes)?;
        graph.find_ways(&description.node)?;
        Ok(graph)
    }

    fn add_nodes(&mut self, nodes: &[Node]) -> Result<HashMap<String, usize>> {
        self.place = places(nodes)?;
        let mut names = HashMap::new();
        for (at, node) in nodes.iter().enumerate() {
            if names.insert(node.name.clone(), at).is_some() {
                return wrong(format!("two nodes are called '{}'", node.name));
            }
            let inside = match node.inside {
                Some(inside) => {
                    let what = format!("node '{}', inside", node.name);
                    let latency = at_least_zero(&format!("{what}.latency_us"), inside.latency_us)? * 1e-6;
                    let bandwidth = positive(&format!("{what}.bandwidth_gb_s"), inside.bandwidth_gb_s)? * 1e9;
                    Some((latency, self.add_link(format!("inside {}", node.name), bandwidth, "inside")?))
                }
                None if node.ranks > 1 => {
                    return wrong(format!(
                        "node '{}' has {} ranks and does not say how they are joined: add inside = {{ latency_us = ..., \
                         bandwidth_gb_s = ... }}",
                        node.name, node.ranks
                    ));
                }
                None => None,
            };
            self.inside.push(inside);
        }
        Ok(names)
    }

    fn add_links(&mut self, description: &Description, nodes: &HashMap<String, usize>) -> Result<()> {
        let mut shared = HashMap::new();
        for thing in &description.shared {
            let what = format!("shared '{}', bandwidth_gb_s", thing.name);
            let bandwidth = positive(&what, thing.bandwidth_gb_s)? * 1e9;
            let link = self.add_link(format!("shared {}", thing.name), bandwidth, "shared")?;
            if shared.insert(thing.name.as_str(), link).is_some() {
                return wrong(format!("two shared things are called '{}'", thing.name));
            }
        }
        for link in &description.link {
            let what = format!("link {} - {}", link.between[0], link.between[1]);
            let node = |name: &String| match nodes.get(name) {
                Some(&at) => Ok(at),
                None => wrong(format!("{what}: there is no node '{name}'")),
            };
            let (a, b) = (node(&link.between[0])?, node(&link.between[1])?);
            if a == b {
                return wrong(format!("{what}: joins a node with itself; what joins its ranks is called inside"));
            }
            let latency = at_least_zero(&format!("{what}, latency_us"), link.latency_us)? * 1e-6;
            let bandwidth = positive(&format!("{what}, bandwidth_gb_s"), link.bandwidth_gb_s)? * 1e9;
            let beside = match &link.shared {
                Some(name) => match shared.get(name.as_str()) {
                    Some(&at) => Some(at),
                    None => return wrong(format!("{what}: there is no [[shared]] '{name}'")),
                },
                None => None,
            };
            let kind = link.kind.as_deref().unwrap_or("link");
            let there = self.add_link(format!("{} to {}", link.between[0], link.between[1]), bandwidth, kind)?;
            let back = match link.duplex {
                Duplex::Full => {
                    self.add_link(format!("{} to {}", link.between[1], link.between[0]), bandwidth, kind)?
                }
                Duplex::Half => there,
            };
            for (from, to, own) in [(a, b, there), (b, a, back)] {
                self.edges.push(Edge { from, to, latency, links: std::iter::once(own).chain(beside).collect() });
            }
        }
        Ok(())
    }

    fn add_link(&mut self, name: String, bandwidth: f64, kind: &str) -> Result<u32> {
        let at = match self.kinds.iter().position(|k| k == kind) {
            Some(at) => at,
            None if self.kinds.len() == MOST_KINDS => {
                return wrong(format!("more than {MOST_KINDS} kinds of links; '{kind}' is one too many"));
            }
            None => {
                self.kinds.push(kind.to_owned());
                self.kinds.len() - 1
            }
        };
        self.links.push((name, bandwidth, at as u16));
        Ok(self.links.len() as u32 - 1)
    }

    /// Dijkstra from each node that has ranks.
    fn find_ways(&mut self, nodes: &[Node]) -> Result<()> {
        let mut leaving: Vec<Vec<usize>> = vec![vec![]; nodes.len()];
        for (at, edge) in self.edges.iter().enumerate() {
            leaving[edge.from].push(at);
        }
        let homes: Vec<usize> = (0..nodes.len()).filter(|&at| nodes[at].ranks > 0).collect();
        for &source in &homes {
            let mut best = vec![(f64::INFINITY, usize::MAX); nodes.len()];
            let mut by = vec![None; nodes.len()];
            let mut heap = BinaryHeap::from([Reach { latency: 0.0, hops: 0, node: source }]);
            best[source] = (0.0, 0);
            while let Some(Reach { latency, hops, node }) = heap.pop() {
                if (latency, hops) > best[node] {
                    continue;
                }
                for &at in &leaving[node] {
                    let edge = &self.edges[at];
                    let next = (latency + edge.latency, hops + 1);
                    if next < best[edge.to] {
                        best[edge.to] = next;
                        by[edge.to] = Some(at);
                        heap.push(Reach { latency: next.0, hops: next.1, node: edge.to });
                    }
                }
            }
            if let Some(&lost) = homes.iter().find(|&&home| best[home].0.is_infinite()) {
                return wrong(format!(
                    "no links lead from node '{}' to node '{}', and both have ranks",
                    nodes[source].name, nodes[lost].name
                ));
            }
            self.reached.insert(source, by);
        }
        Ok(())
    }
}

/// A node that was reached; the nearest is the greatest.
#[derive(Debug, PartialEq)]
struct Reach {
    latency: f64,
    hops: usize,
    node: usize,
}

impl Eq for Reach {}

impl Ord for Reach {
    fn cmp(&self, other: &Reach) -> Ordering {
        let key = |r: &Reach| (r.hops, r.node);
        other.latency.total_cmp(&self.latency).then_with(|| key(other).cmp(&key(self)))
    }
}

impl PartialOrd for Reach {
    fn partial_cmp(&self, other: &Reach) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Graph {
    /// The machine with these of its ranks alone, numbered in this order. Those that it does not have are left out.
    pub fn of(&self, ranks: &[usize]) -> Graph {
        Graph { place: ranks.iter().filter_map(|&rank| self.place.get(rank).copied()).collect(), ..self.clone() }
    }

    fn wiring(&self) -> Wiring {
        let link = |at: u32| &self.links[at as usize];
        let inside = |inside: &Option<(f64, u32)>| inside.map(|(_, at)| (link(at).1, link(at).0.clone()));
        // The first link of an edge is its own; the others are shared.
        let own = |edge: &Edge| edge.links.first().map(|&at| (edge.from, edge.to, link(at).1, link(at).0.clone()));
        Wiring {
            place: self.place.clone(),
            inside: self.inside.iter().map(inside).collect(),
            links: self.edges.iter().filter_map(own).collect(),
        }
    }
}

impl Machine for Graph {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ranks(&self) -> usize {
        self.place.len()
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn kinds(&self) -> Vec<String> {
        self.kinds.clone()
    }

    fn bandwidth(&self, link: LinkId) -> f64 {
        self.links[link.at as usize].1
    }

    fn link_name(&self, link: LinkId) -> String {
        self.links[link.at as usize].0.clone()
    }

    fn hosts(&self, ranks: usize) -> Hosts {
        Hosts::of(&self.place[..ranks.min(self.place.len())])
    }

    fn bound(&self, shape: &Shape) -> Option<Bound> {
        bound(&self.wiring(), shape)
    }

    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64 {
        let (source, mut at) = (self.place[from], self.place[to]);
        let id = |link: u32| LinkId { kind: self.links[link as usize].2, at: link };
        if source == at {
            let (latency, link) = self.inside[at].unwrap_or_default();
            links.push(id(link));
            return latency;
        }
        let first = links.len();
        let mut latency = 0.0;
        while at != source {
            // `find_ways` reached every node with ranks, so there is an edge.
            let Some(edge) = self.reached.get(&source).and_then(|by| by[at]).map(|e| &self.edges[e]) else { break };
            latency += edge.latency;
            links.extend(edge.links.iter().rev().map(|&link| id(link)));
            at = edge.from;
        }
        links[first..].reverse();
        latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, ranks: usize) -> Node {
        Node { name: name.to_owned(), ranks, ..Node::default() }
    }

    fn link(a: &str, b: &str, latency_us: f64) -> Link {
        let between = [a.to_owned(), b.to_owned()];
        Link { between, latency_us, bandwidth_gb_s: 10.0, duplex: Duplex::Full, kind: None, shared: None }
    }

    fn described(node: Vec<Node>, link: Vec<Link>) -> Description {
        Description { name: String::new(), costs: CostsDescription::default(), node, link, shared: vec![] }
    }

    fn error(description: &Description) -> String {
        Graph::new(description).unwrap_err().to_string()
    }

    #[test]
    fn the_way_of_least_latency_then_of_fewest_links() {
        let nodes = vec![node("a", 1), node("b", 1), node("x", 0), node("y", 0)];
        let mut links = vec![link("a", "b", 3.0), link("a", "x", 1.0), link("x", "b", 1.0)];
        let way = |links: &Vec<Link>| {
            let graph = Graph::new(&described(nodes.clone(), links.clone())).unwrap();
            let mut found = vec![];
            let latency = graph.route(0, 1, &mut found);
            (latency, found.iter().map(|&l| graph.link_name(l)).collect::<Vec<_>>())
        };
        assert_eq!(way(&links), (2e-6, vec!["a to x".to_owned(), "x to b".to_owned()]));
        links[0].latency_us = 2.0;
        assert_eq!(way(&links), (2e-6, vec!["a to b".to_owned()]));
    }

    #[test]
    fn ranks_may_be_numbered_otherwise_than_their_nodes() {
        let numbered = |name: &str, numbers: &[usize]| Node { numbers: numbers.to_vec(), ..node(name, numbers.len()) };
        let inside = Some(Inside { latency_us: 1.0, bandwidth_gb_s: 1.0 });
        let nodes = vec![Node { inside, ..numbered("a", &[2, 0]) }, numbered("b", &[1])];
        let graph = Graph::new(&described(nodes, vec![link("a", "b", 1.0)])).unwrap();
        assert_eq!(graph.place, [0, 1, 0]);
        let two = |a: &[usize], b: &[usize]| error(&described(vec![numbered("a", a), numbered("b", b)], vec![]));
        assert_eq!(two(&[0], &[2]), "topology: node 'b', numbers: rank 2, expected a rank below 2");
        assert_eq!(two(&[0], &[0]), "topology: node 'b', numbers: rank 0 is there twice");
        let some = error(&described(vec![numbered("a", &[0]), node("b", 1)], vec![]));
        assert_eq!(some, "topology: node 'b', numbers: 0 of them, expected as many as it has ranks, 1");
        assert!(error(&described(vec![node("a", usize::MAX), node("b", 2)], vec![])).contains("at most 1048576"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let two = || vec![node("a", 1), node("b", 1)];
        assert_eq!(error(&described(two(), vec![link("a", "c", 1.0)])), "topology: link a - c: there is no node 'c'");
        assert_eq!(
            error(&described(two(), vec![])),
            "topology: no links lead from node 'a' to node 'b', and both have ranks"
        );
        let slow = Link { bandwidth_gb_s: -1.0, ..link("a", "b", 1.0) };
        assert_eq!(
            error(&described(two(), vec![slow])),
            "topology: link a - b, bandwidth_gb_s: expected more than 0, got -1"
        );
        let back = Link { latency_us: -1.0, ..link("a", "b", 1.0) };
        assert_eq!(
            error(&described(two(), vec![back])),
            "topology: link a - b, latency_us: expected 0 or more, got -1"
        );
        let bus = Link { shared: Some("bus".to_owned()), ..link("a", "b", 1.0) };
        assert_eq!(error(&described(two(), vec![bus])), "topology: link a - b: there is no [[shared]] 'bus'");
        assert!(error(&described(vec![node("a", 2)], vec![])).contains("does not say how they are joined"));
        assert!(error(&described(vec![node("a", 1), node("a", 1)], vec![])).contains("two nodes are called 'a'"));
        assert!(error(&described(vec![node("a", 0)], vec![])).contains("no node has ranks"));
        assert!(error(&described(two(), vec![link("a", "a", 1.0)])).contains("joins a node with itself"));
    }
}
