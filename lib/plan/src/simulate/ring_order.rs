//! An order of the ranks in which a ring loads the fullest link of a machine as little as can be found.
//!
//! Neighbours of the ring send to each other over the machine's routes, in both directions (odd channels go the other
//! way round). The search begins with the best of three orders: by number, host by host, and from each rank to the
//! nearest that is left. Then it turns sections round (2-opt) and moves short ones elsewhere (Or-opt) as long as that
//! helps, for a bounded number of trials. What helps is measured by the sum of the links' loads to a high power, in
//! which the fullest link counts most and the others still count: moves that empty the second of two equally full links
//! are steps, too.
//!
//! Sources: G. A. Croes, "A method for solving traveling salesman problems" (1958) for 2-opt; I. Or (1976) for the move
//! of sections; S. Lin and B. W. Kernighan (1973) for lists of near neighbours.

use std::collections::HashMap;

use super::machine::{LinkId, Machine};
use crate::algorithm::Order;

/// Most ranks of a search: it keeps the routes of all pairs.
pub const MOST_RANKS: usize = 1024;
/// Neighbours of a rank that are tried.
const NEAR: usize = 10;
/// Most moves that are tried.
const TRIALS: usize = 1_000_000;
/// Longest section that is moved; any may be turned round.
const SECTION: usize = 3;
/// Power of the loads.
const POWER: i32 = 8;
/// Least part by which a move must help.
const GAIN: f64 = 1e-9;

/// An order in which a ring of the first `ranks` ranks loads the fullest link less than in the order of their numbers;
/// `None` where none is found, or for more than [`MOST_RANKS`] ranks.
pub fn ring_order(machine: &dyn Machine, ranks: usize) -> Option<Order> {
    if !(4..=MOST_RANKS).contains(&ranks) || ranks > machine.ranks() {
        return None;
    }
    let routes = Routes::new(machine, ranks);
    let natural: Vec<usize> = (0..ranks).collect();
    let hosts = machine.hosts(ranks);
    let by_host = hosts.order().map(|order| order.ranks().to_vec());
    let today = routes.loads(&natural);
    let mut starts = vec![natural, routes.nearest()];
    starts.extend(by_host);
    let start = starts.into_iter().min_by(|a, b| routes.loads(a).better(&routes.loads(b)))?;
    let mut search = Search::new(&routes, start);
    search.improve();
    let found = routes.loads(&search.order);
    (found.fullest < today.fullest * (1.0 - 1e-6)).then(|| Order::new(search.order)).flatten()
}

/// Seconds per byte of the ring's edges that the fullest link takes, and all links together.
#[derive(Debug, Clone, Copy)]
struct Loads {
    fullest: f64,
    sum: f64,
}

impl Loads {
    fn better(&self, other: &Loads) -> std::cmp::Ordering {
        self.fullest.total_cmp(&other.fullest).then(self.sum.total_cmp(&other.sum))
    }
}

/// The links between each two ranks, there and back.
struct Routes {
    ranks: usize,
    /// Place in `links` at which those of a pair begin, by the lower and the higher rank.
    begin: Vec<u32>,
    links: Vec<u32>,
    /// Seconds per byte of each link.
    price: Vec<f64>,
}

impl Routes {
    fn new(machine: &dyn Machine, ranks: usize) -> Routes {
        let mut numbers: HashMap<LinkId, u32> = HashMap::new();
        let mut routes = Routes { ranks, begin: vec![0], links: vec![], price: vec![] };
        let mut way = Vec::new();
        for a in 0..ranks {
            for b in 0..a {
                way.clear();
                machine.route(a, b, &mut way);
                machine.route(b, a, &mut way);
                for &link in &way {
                    let number = *numbers.entry(link).or_insert_with(|| {
                        routes.price.push(1.0 / machine.bandwidth(link));
                        routes.price.len() as u32 - 1
                    });
                    routes.links.push(number);
                }
                routes.begin.push(routes.links.len() as u32);
            }
        }
        routes
    }

    fn between(&self, a: usize, b: usize) -> &[u32] {
        let (high, low) = (a.max(b), a.min(b));
        if high == low {
            return &[];
        }
        let at = high * (high - 1) / 2 + low;
        &self.links[self.begin[at] as usize..self.begin[at + 1] as usize]
    }

    fn distance(&self, a: usize, b: usize) -> f64 {
        self.between(a, b).iter().map(|&link| self.price[link as usize]).sum()
    }

    fn loads(&self, order: &[usize]) -> Loads {
        let mut load = vec![0.0; self.price.len()];
        for (at, &rank) in order.iter().enumerate() {
            let next = order[(at + 1) % order.len()];
            self.between(rank, next).iter().for_each(|&link| load[link as usize] += self.price[link as usize]);
        }
        Loads { fullest: load.iter().copied().fold(0.0, f64::max), sum: load.iter().sum() }
    }

    /// From each rank to the nearest that is left.
    fn nearest(&self) -> Vec<usize> {
        let mut left: Vec<usize> = (1..self.ranks).collect();
        let mut order = vec![0];
        let mut at = 0;
        while !left.is_empty() {
            let near =
                (0..left.len()).min_by(|&a, &b| self.distance(at, left[a]).total_cmp(&self.distance(at, left[b])));
            // The others keep their order, in which equals are taken.
            at = left.remove(near.unwrap_or(0));
            order.push(at);
        }
        order
    }
}

struct Search<'a> {
    routes: &'a Routes,
    order: Vec<usize>,
    position: Vec<usize>,
    near: Vec<Vec<usize>>,
    /// Edges of the ring over each link.
    load: Vec<u32>,
    /// Load of the fullest link at the beginning: the unit of the sum.
    full: f64,
    sum: f64,
    trials: usize,
}

impl<'a> Search<'a> {
    fn new(routes: &'a Routes, order: Vec<usize>) -> Search<'a> {
        let ranks = order.len();
        let mut position = vec![0; ranks];
        order.iter().enumerate().for_each(|(at, &rank)| position[rank] = at);
        let near = |rank: usize| {
            let mut others: Vec<usize> = (0..ranks).filter(|&other| other != rank).collect();
            let key =
                |a: &usize, b: &usize| routes.distance(rank, *a).total_cmp(&routes.distance(rank, *b)).then(a.cmp(b));
            if others.len() > NEAR {
                others.select_nth_unstable_by(NEAR, key);
                others.truncate(NEAR);
            }
            others.sort_unstable_by(key);
            others
        };
        let near = (0..ranks).map(near).collect();
        let full = routes.loads(&order).fullest.max(f64::MIN_POSITIVE);
        let load = vec![0; routes.price.len()];
        let mut search = Search { routes, order, position, near, load, full, sum: 0.0, trials: 0 };
        for at in 0..ranks {
            search.change(search.at(at), search.at(at + 1), 1);
        }
        search
    }

    /// The rank at a position, once round at most.
    fn at(&self, position: usize) -> usize {
        self.order[position % self.order.len()]
    }

    fn weight(&self, link: usize) -> f64 {
        (f64::from(self.load[link]) * self.routes.price[link] / self.full).powi(POWER)
    }

    /// Adds an edge to the links, or takes it away.
    fn change(&mut self, a: usize, b: usize, by: i32) {
        let routes = self.routes;
        for &link in routes.between(a, b) {
            let link = link as usize;
            self.sum -= self.weight(link);
            self.load[link] = self.load[link].saturating_add_signed(by);
            self.sum += self.weight(link);
        }
    }

    /// Replaces edges if that helps.
    fn try_edges(&mut self, old: &[(usize, usize)], new: &[(usize, usize)]) -> bool {
        self.trials += 1;
        let before = self.sum;
        old.iter().for_each(|&(a, b)| self.change(a, b, -1));
        new.iter().for_each(|&(a, b)| self.change(a, b, 1));
        let helps = self.sum < before * (1.0 - GAIN);
        if !helps {
            new.iter().for_each(|&(a, b)| self.change(a, b, -1));
            old.iter().for_each(|&(a, b)| self.change(a, b, 1));
            self.sum = before;
        }
        helps
    }

    fn improve(&mut self) {
        let ranks = self.order.len();
        loop {
            let mut helped = false;
            for rank in 0..ranks {
                for near in 0..self.near[rank].len() {
                    let other = self.near[rank][near];
                    helped |= self.turn(rank, other) || self.shift(rank, other);
                    if self.trials >= TRIALS {
                        return;
                    }
                }
            }
            if !helped {
                return;
            }
        }
    }

    /// Makes `other` follow `rank`: turns round the section between them, on either side.
    fn turn(&mut self, rank: usize, other: usize) -> bool {
        let (i, j) = (self.position[rank], self.position[other]);
        let (low, high) = (i.min(j), i.max(j));
        let ranks = self.order.len();
        // Edges (low, low + 1) and (high, high + 1), then the ones before.
        for back in [0, 1] {
            let (from, to) = ((low + ranks - back) % ranks, (high + ranks - back) % ranks);
            let [a, b, c, d] = [self.at(from), self.at(from + 1), self.at(to), self.at(to + 1)];
            if b == c || d == a {
                continue;
            }
            if self.try_edges(&[(a, b), (c, d)], &[(a, c), (b, d)]) {
                // From b to c; where that goes over the end, the rest is turned instead: the same ring.
                let (first, last) = (from.min(to) + 1, from.max(to));
                self.order[first..=last].reverse();
                self.renumber(first, last);
                return true;
            }
        }
        false
    }

    /// Moves a short section that begins or ends with `other` to behind `rank`, either way round.
    fn shift(&mut self, rank: usize, other: usize) -> bool {
        let ranks = self.order.len();
        for len in 1..=SECTION.min(ranks - 3) {
            for ends in [false, true] {
                let begin = self.position[other] + if ends { ranks + 1 - len } else { 0 };
                let inside = |position: usize| (position + 2 * ranks - begin % ranks) % ranks < len;
                let at = self.position[rank];
                // Not from itself to itself, nor behind the rank before it.
                if inside(at) || inside(at + 1) {
                    continue;
                }
                let [before, first, last, after] =
                    [self.at(begin + ranks - 1), self.at(begin), self.at(begin + len - 1), self.at(begin + len)];
                let next = self.at(at + 1);
                let old = [(before, first), (last, after), (rank, next)];
                for turned in [false, true] {
                    let (head, tail) = if turned { (last, first) } else { (first, last) };
                    if self.try_edges(&old, &[(before, after), (rank, head), (tail, next)]) {
                        let mut section: Vec<usize> = (0..len).map(|k| self.at(begin + k)).collect();
                        if turned {
                            section.reverse();
                        }
                        self.order.retain(|rank| !section.contains(rank));
                        let to = self.order.iter().position(|&other| other == rank).map_or(0, |at| at + 1);
                        self.order.splice(to..to, section);
                        self.renumber(0, ranks - 1);
                        return true;
                    }
                }
            }
        }
        false
    }

    fn renumber(&mut self, first: usize, last: usize) {
        for at in first..=last {
            self.position[self.order[at]] = at;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::simulate::machine::Graph;

    /// Hosts with these ranks below switches, which are on a line.
    fn switched(hosts: &[(usize, usize)], legs: f64, spine: f64) -> Graph {
        let switches = hosts.iter().map(|host| host.0).max().unwrap_or(0) + 1;
        let inside = json!({"latency_us": 0.2, "bandwidth_gb_s": 20.0});
        let host = |at: usize| json!({"name": format!("h{at}"), "ranks": hosts[at].1, "inside": inside});
        let nodes = (0..hosts.len()).map(host).chain((0..switches).map(|at| json!({"name": format!("s{at}")})));
        let link =
            |a: String, b: String, gb_s: f64| json!({"between": [a, b], "latency_us": 1.0, "bandwidth_gb_s": gb_s});
        let links = hosts.iter().enumerate().map(|(at, host)| link(format!("h{at}"), format!("s{}", host.0), legs));
        let spines = (1..switches).map(|at| link(format!("s{}", at - 1), format!("s{at}"), spine));
        let (nodes, links): (Vec<_>, Vec<_>) = (nodes.collect(), links.chain(spines).collect());
        Graph::new(&serde_json::from_value(json!({"node": nodes, "link": links})).unwrap()).unwrap()
    }

    /// Ring edges between the halves of a machine.
    fn crossing(order: &Order, side: impl Fn(usize) -> bool) -> usize {
        let ranks = order.ranks().len();
        (0..ranks).filter(|&at| side(order.rank(at)) != side(order.rank((at + 1) % ranks))).count()
    }

    #[test]
    fn two_switches_are_crossed_once_each_way() {
        for hosts in [4, 8, 16, 30] {
            let alternating: Vec<(usize, usize)> = (0..hosts).map(|host| (host % 2, 1)).collect();
            let machine = switched(&alternating, 2.0, 1.0);
            let order = ring_order(&machine, hosts).expect("there is a better one");
            assert_eq!(crossing(&order, |rank| rank % 2 == 0), 2, "{order:?}");
            // The same search again.
            assert_eq!(ring_order(&machine, hosts).as_ref(), Some(&order));
        }
        let sorted: Vec<(usize, usize)> = (0..8).map(|host| (host / 4, 1)).collect();
        assert!(ring_order(&switched(&sorted, 2.0, 1.0), 8).is_none(), "no order is better");
    }

    #[test]
    fn a_ring_of_hosts_is_found() {
        // Joined 0-2-4-...-5-3-1-0.
        let ranks = 12;
        let around: Vec<usize> = (0..ranks).step_by(2).chain((1..ranks).step_by(2).rev()).collect();
        let node = |rank: usize| json!({"name": rank.to_string(), "ranks": 1});
        let link = |at: usize| {
            let ends = [around[at].to_string(), around[(at + 1) % ranks].to_string()];
            json!({"between": ends, "latency_us": 1.0, "bandwidth_gb_s": 1.0})
        };
        let (nodes, links): (Vec<_>, Vec<_>) = ((0..ranks).map(node).collect(), (0..ranks).map(link).collect());
        let machine = Graph::new(&serde_json::from_value(json!({"node": nodes, "link": links})).unwrap()).unwrap();
        let order = ring_order(&machine, ranks).unwrap();
        let routes = Routes::new(&machine, ranks);
        assert_eq!(routes.loads(order.ranks()).fullest, routes.loads(&around).fullest);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn an_order_is_better_and_the_loads_are_those_of_its_edges(
            hosts in proptest::collection::vec((0usize..4, 1usize..3), 4..12), legs in 1u32..5, spine in 1u32..5,
        ) {
            let machine = switched(&hosts, f64::from(legs), f64::from(spine));
            let ranks = machine.ranks();
            let routes = Routes::new(&machine, ranks);
            let natural: Vec<usize> = (0..ranks).collect();
            if let Some(order) = ring_order(&machine, ranks) {
                prop_assert!(routes.loads(order.ranks()).fullest < routes.loads(&natural).fullest);
            }
            // Moves keep the loads as they would be counted, and every rank.
            let mut search = Search::new(&routes, natural);
            search.improve();
            let counted = Search::new(&routes, search.order.clone());
            prop_assert_eq!(&counted.load, &search.load);
            prop_assert!(Order::new(search.order).is_some());
        }
    }

    /// Prints how long searches take; no time is asserted.
    #[test]
    fn a_thousand_ranks_are_searched() {
        for (hosts, each) in [(16, 1), (128, 8)] {
            let shuffled: Vec<(usize, usize)> = (0..hosts).map(|host| (host * 5 % 8, each)).collect();
            let machine = switched(&shuffled, 4.0, 4.0);
            let started = std::time::Instant::now();
            let order = ring_order(&machine, machine.ranks());
            println!("{} ranks: {:?}", machine.ranks(), started.elapsed());
            assert_eq!(crossing(&order.unwrap(), |rank| shuffled[rank / each].0 < 4), 2);
        }
    }
}
