//! Links that differ: the order of a ring, and trees, for a machine that a file describes. The library's simulator
//! times what they make.

use std::path::Path;

use anyhow::{Context as _, Result};
use tinynccl::algorithm::program;
use tinynccl::schedule::verify::VerifyError;
use tinynccl::schedule::{Lane, Loc, Program, Schedule, Shape, Step};
use tinynccl::simulate::machine::Graph;
use tinynccl::simulate::{Cut, Machine, simulate_schedule};
use tinynccl::wire::{Algorithm, Collective};

/// Ranks whose orders can all be tried.
const MOST: usize = 8;

/// The links of a machine, by numbers.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) ranks: usize,
    /// Seconds per byte of each link.
    pub(crate) price: Vec<f64>,
    /// The links that a message takes, by sender and receiver.
    route: Vec<Vec<usize>>,
}

impl Links {
    pub(crate) fn new(machine: &dyn Machine) -> Links {
        let ranks = machine.ranks();
        let (mut known, mut price, mut route) = (Vec::new(), Vec::new(), Vec::new());
        for (from, to) in (0..ranks * ranks).map(|at| (at / ranks, at % ranks)) {
            let mut links = Vec::new();
            if from != to {
                machine.route(from, to, &mut links);
            }
            let number = |link| {
                known.iter().position(|other| *other == link).unwrap_or_else(|| {
                    known.push(link);
                    price.push(1.0 / machine.bandwidth(link));
                    known.len() - 1
                })
            };
            route.push(links.into_iter().map(number).collect());
        }
        Links { ranks, price, route }
    }

    /// The links that a message of `from` to `to` takes.
    pub(crate) fn route(&self, from: usize, to: usize) -> &[usize] {
        &self.route[from * self.ranks + to]
    }
}

/// The order in which a ring visits the ranks, beginning with rank 0.
// EXERCISE 5 (Links that differ): the order in which the fullest link of the ring is the least full. The hops of a ring
// all carry the same bytes; a hop takes the links of `links.route`, in its direction alone, and a byte takes
// `links.price` of each. There are few ranks: try all orders.
fn order(links: &Links) -> Vec<usize> {
    let fullest = |order: &[usize]| {
        let mut time = vec![0.0; links.price.len()];
        for (at, &from) in order.iter().enumerate() {
            for &link in links.route(from, order[(at + 1) % order.len()]) {
                time[link] += links.price[link];
            }
        }
        time.into_iter().fold(0.0, f64::max)
    };
    let mut best: Vec<usize> = (0..links.ranks).collect();
    // Orders that are not complete yet.
    let mut begun = vec![vec![0]];
    while let Some(order) = begun.pop() {
        if order.len() == links.ranks && fullest(&order) < fullest(&best) {
            best = order;
            continue;
        }
        for next in (1..links.ranks).filter(|rank| !order.contains(rank)) {
            begun.push([&order[..], &[next]].concat());
        }
    }
    best
}

/// For each root the tree that its part of an all_gather takes: the rank that each rank receives from, the root itself.
// EXERCISE 6 (Links that differ): trees whose fullest link is not much fuller than the bound says. Grow them in turn,
// rank by rank. Of all ranks that a tree has not reached, and all that it has, take the pair that is cheapest: a link
// costs the square of its time with this message, its load so far, and one, times its price.
fn trees(links: &Links) -> Vec<Vec<usize>> {
    let mut load = vec![0.0; links.price.len()];
    let mut trees: Vec<Vec<Option<usize>>> = vec![vec![None; links.ranks]; links.ranks];
    (0..links.ranks).for_each(|root| trees[root][root] = Some(root));
    for _ in 1..links.ranks {
        for tree in &mut trees {
            let reached = |rank: &usize| tree[*rank].is_some();
            let pairs = (0..links.ranks)
                .filter(reached)
                .flat_map(|from| (0..links.ranks).filter(|to| !reached(to)).map(move |to| (from, to)));
            let cost = |&(from, to): &(usize, usize)| -> f64 {
                links.route(from, to).iter().map(|&link| ((load[link] + 1.0) * links.price[link]).powi(2)).sum()
            };
            let best = pairs.min_by(|a, b| cost(a).total_cmp(&cost(b)));
            if let Some((from, to)) = best {
                links.route(from, to).iter().for_each(|&link| load[link] += 1.0);
                tree[to] = Some(from);
            }
        }
    }
    let root = |root: usize, tree: Vec<Option<usize>>| tree.into_iter().map(|from| from.unwrap_or(root)).collect();
    trees.into_iter().enumerate().map(|(at, tree)| root(at, tree)).collect()
}

/// The library's ring, in another order of the ranks.
fn ring_in(order: &[usize]) -> Result<Schedule, VerifyError> {
    let shape = Shape { collective: Collective::AllReduce, ranks: order.len(), root: 0, channels: 1 };
    let mut programs = Vec::new();
    for rank in 0..order.len() {
        // The program of its place, with the names of those that are there.
        let place = order.iter().position(|&there| there == rank).unwrap_or(rank);
        let named = |step: &Step| {
            let Ok(step) = step.map(|at| Ok::<_, std::convert::Infallible>(order[at as usize] as u32), |loc| loc);
            step
        };
        programs.extend(program(Algorithm::Ring, &shape, place).map(|ring| {
            let lanes = ring.lanes.iter().map(|lane| {
                let steps = lane.steps.iter().map(named).collect();
                Lane { channel: lane.channel, steps }
            });
            Program { lanes: lanes.collect(), ..ring.clone() }
        }));
    }
    Schedule::new(shape, programs)
}

/// An all_gather along a tree for each root, each with a lane and a channel of its own.
fn gather(trees: &[Vec<usize>]) -> Result<Schedule, VerifyError> {
    let ranks = trees.len();
    let shape = Shape { collective: Collective::AllGather, ranks, root: 0, channels: ranks };
    let lane = |rank: usize, root: usize| {
        let part = Loc::output(root, 0);
        let mut steps = match rank == root {
            true => vec![Step::Copy { src: Loc::input(0, 0), dst: part }],
            false => vec![Step::recv(trees[root][rank], part)],
        };
        let children = (0..ranks).filter(|&to| to != root && trees[root][to] == rank);
        steps.extend(children.map(|to| Step::send(to, part)));
        Lane { channel: root as u32, steps }
    };
    let program = |rank| {
        let lanes = (0..ranks).map(|root| lane(rank, root)).collect();
        Program { parts: 1, span: 1, scratch_segments: 0, lanes }
    };
    Schedule::new(shape, (0..ranks).map(program).collect())
}

/// The seconds that a schedule takes on a machine for 64 MiB a segment, and the least that the machine's links allow.
fn seconds(schedule: &Schedule, machine: &dyn Machine) -> tinynccl::Result<(f64, f64)> {
    let cut = Cut { count: 16 << 20, elem_size: 4, max_message: 256 << 10 };
    let time = simulate_schedule(schedule, cut, machine, &Default::default())?.time;
    let bound = machine.bound(schedule.shape()).map_or(0.0, |bound| bound.seconds_per_byte);
    Ok((time, bound * (cut.count * cut.elem_size) as f64))
}

/// Prints what the ring and the trees take on the machine of a file.
pub(crate) fn show(path: &Path) -> Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let described = toml::from_str(&text).with_context(|| format!("{} is not a topology", path.display()))?;
    let machine = Graph::new(&described)?;
    let links = Links::new(&machine);
    anyhow::ensure!(
        (2..=MOST).contains(&links.ranks),
        "expected 2 to {MOST} ranks, {} has {}",
        path.display(),
        links.ranks
    );
    let words = |order: &[usize]| order.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    let (ours, ranks) = (order(&links), (0..links.ranks).collect::<Vec<_>>());
    println!("{}: simulated, 64 MiB of each rank\n", machine.name());
    println!("{:<34} {:>9} {:>14}", "", "ms", "of the bound");
    let row = |name: String, schedule: &Schedule| -> Result<()> {
        let (time, bound) = seconds(schedule, &machine)?;
        println!("{name:<34} {:>9.1} {:>14.2}", time * 1e3, bound / time);
        Ok(())
    };
    row(format!("all_reduce, ring {}", words(&ranks)), &ring_in(&ranks)?)?;
    row(format!("all_reduce, ring {}", words(&ours)), &ring_in(&ours)?)?;
    let stars: Vec<Vec<usize>> = ranks.iter().map(|&root| vec![root; links.ranks]).collect();
    row("all_gather, each rank to all".to_owned(), &gather(&stars)?)?;
    row("all_gather, trees".to_owned(), &gather(&trees(&links))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts with their legs, and the links between switches.
    fn machine(legs: &[(&str, f64)], between: &[(&str, &str, f64)]) -> Graph {
        let mut text = String::new();
        let mut switches: Vec<&str> = legs.iter().map(|leg| leg.0).collect();
        switches.sort_unstable();
        switches.dedup();
        for (at, _) in legs.iter().enumerate() {
            text += &format!("[[node]]\nname = \"host{at}\"\nranks = 1\n");
        }
        for switch in switches {
            text += &format!("[[node]]\nname = \"{switch}\"\n");
        }
        let hosts = legs.iter().enumerate().map(|(at, leg)| (format!("host{at}"), leg.0.to_owned(), leg.1));
        let between = between.iter().map(|(a, b, rate)| ((*a).to_owned(), (*b).to_owned(), *rate));
        for (a, b, rate) in hosts.chain(between) {
            text += &format!("[[link]]\nbetween = [\"{a}\", \"{b}\"]\nlatency_us = 5.0\nbandwidth_gb_s = {rate:?}\n");
        }
        Graph::new(&toml::from_str(&text).unwrap()).unwrap()
    }

    /// Rank order crosses the slow links more often than any need to, on each.
    fn machines() -> Vec<Graph> {
        let described = toml::from_str(include_str!("../../../docs/topologies/dumb-bell.toml")).unwrap();
        vec![
            Graph::new(&described).unwrap(),
            machine(&[("a", 2.0), ("b", 2.0), ("b", 2.0), ("a", 2.0), ("b", 2.0)], &[("a", "b", 0.5)]),
            machine(
                &[("a", 4.0), ("b", 4.0), ("c", 4.0), ("a", 4.0), ("b", 4.0), ("c", 4.0)],
                &[("a", "b", 1.0), ("b", "c", 1.0)],
            ),
        ]
    }

    fn time(schedule: &Schedule, machine: &Graph) -> (f64, f64) {
        seconds(schedule, machine).unwrap()
    }

    /// All orders that begin with rank 0.
    fn orders(ranks: usize) -> Vec<Vec<usize>> {
        let mut all = vec![vec![0]];
        for _ in 1..ranks {
            let longer = |order: &Vec<usize>| -> Vec<Vec<usize>> {
                (1..ranks).filter(|rank| !order.contains(rank)).map(|rank| [&order[..], &[rank]].concat()).collect()
            };
            all = all.iter().flat_map(longer).collect();
        }
        all
    }

    #[test]
    fn order_is_as_fast_as_the_best_of_all() {
        for machine in machines() {
            let ours = order(&Links::new(&machine));
            let mut sorted = ours.clone();
            sorted.sort_unstable();
            let ranks: Vec<usize> = (0..machine.ranks()).collect();
            assert_eq!((sorted, ours[0]), (ranks.clone(), 0), "{ours:?} visits every rank once, from rank 0 on");
            let all = orders(ranks.len());
            let times = all.iter().map(|order| time(&ring_in(order).unwrap(), &machine).0);
            let best = times.fold(f64::INFINITY, f64::min);
            let in_rank_order = time(&ring_in(&ranks).unwrap(), &machine).0;
            assert!(in_rank_order > 1.4 * best, "{} tells orders apart: {in_rank_order} and {best}", machine.name());
            let taken = time(&ring_in(&ours).unwrap(), &machine).0;
            assert!(taken <= 1.02 * best, "{ours:?} takes {taken} s, the best order {best}");
        }
    }

    #[test]
    fn trees_reach_every_rank_and_are_near_the_bound() {
        for machine in machines() {
            let ours = trees(&Links::new(&machine));
            let schedule = gather(&ours).unwrap_or_else(|error| panic!("{ours:?}: {error}"));
            let (taken, bound) = time(&schedule, &machine);
            let stars: Vec<Vec<usize>> = (0..machine.ranks()).map(|root| vec![root; machine.ranks()]).collect();
            let (star, _) = time(&gather(&stars).unwrap(), &machine);
            assert!(star > 1.4 * bound, "{} tells trees apart: {star} and {bound}", machine.name());
            assert!(taken < 1.15 * bound, "{ours:?} take {taken} s, the links allow {bound}");
        }
    }
}
