//! Trees that share the links evenly: each in turn takes the cheapest way, where full links are dear.
//!
//! The price of a link grows exponentially with its load (Aspnes et al., "On-line routing of virtual circuits", 1997).
//! Trees are chosen anew several times, each against the load of all others, and the best packing is kept.

use std::collections::HashMap;

use super::arborescence::{Costs, cheapest};
use crate::simulate::machine::{LinkId, Machine};

/// Times that every tree is chosen.
const PASSES: usize = 12;
/// Growth of a full link's price beside that of an empty one: e to this power.
const STEEPNESS: f64 = 12.0;

/// A tree from a rank to all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) root: usize,
    /// Rank that each rank receives from; the root's is itself.
    pub(super) parents: Vec<usize>,
}

impl Tree {
    /// Edges, from parent to child.
    pub(super) fn edges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.parents.iter().enumerate().filter(|(to, _)| *to != self.root).map(|(to, &from)| (from, to))
    }
}

/// The links between the ranks of a group, numbered.
#[derive(Debug, Clone)]
pub(super) struct Routes {
    pub(super) ranks: usize,
    /// Links of a message, by sender and receiver.
    table: Vec<Vec<usize>>,
    /// Seconds per byte of each link, also of those that only other groups use.
    pub(super) price: Vec<f64>,
}

impl Routes {
    /// The routes of each of `groups`, whose ranks are named by their numbers in the machine; from receiver to sender
    /// if `reversed`. A link has the same number in all of them.
    pub(super) fn of(machine: &dyn Machine, groups: &[Vec<usize>], reversed: bool) -> Vec<Routes> {
        let mut numbers: HashMap<LinkId, usize> = HashMap::new();
        let (mut price, mut links) = (Vec::new(), Vec::new());
        let mut table = |members: &Vec<usize>| {
            let ranks = members.len();
            let links = (0..ranks * ranks).map(|at| {
                let (from, to) = if reversed { (at % ranks, at / ranks) } else { (at / ranks, at % ranks) };
                links.clear();
                if from != to {
                    machine.route(members[from], members[to], &mut links);
                }
                let number = |link: &LinkId| {
                    *numbers.entry(*link).or_insert_with(|| {
                        price.push(1.0 / machine.bandwidth(*link));
                        price.len() - 1
                    })
                };
                links.iter().map(number).collect()
            });
            links.collect::<Vec<_>>()
        };
        let tables: Vec<Vec<Vec<usize>>> = groups.iter().map(&mut table).collect();
        let routes = groups.iter().zip(tables);
        routes.map(|(members, table)| Routes { ranks: members.len(), table, price: price.clone() }).collect()
    }

    /// Routes there and back.
    pub(super) fn both_ways(&self) -> Routes {
        let both = |at: usize| {
            let (from, to) = (at / self.ranks, at % self.ranks);
            [self.links(from, to), self.links(to, from)].concat()
        };
        Routes { table: (0..self.table.len()).map(both).collect(), ..self.clone() }
    }

    pub(super) fn links(&self, from: usize, to: usize) -> &[usize] {
        &self.table[from * self.ranks + to]
    }
}

/// Seconds that the fullest link takes for a byte of each tree.
fn most(routes: &Routes, load: &[f64]) -> f64 {
    load.iter().zip(&routes.price).map(|(load, price)| load * price).fold(0.0, f64::max)
}

fn add(routes: &Routes, tree: &Tree, bytes: f64, load: &mut [f64]) {
    tree.edges().flat_map(|(from, to)| routes.links(from, to)).for_each(|&link| load[link] += bytes);
}

/// Trees of ranks that use the links at the same time.
pub(super) struct Group<'a> {
    pub(super) routes: &'a Routes,
    /// One for each tree.
    pub(super) roots: Vec<usize>,
    /// Bytes of a tree, in any unit that all groups have.
    pub(super) bytes: f64,
}

/// For each group one tree for each of its roots, such that the fullest link is as empty as can be found.
pub(super) fn choose(groups: &[Group<'_>]) -> Vec<Vec<Tree>> {
    let mut trees: Vec<Vec<Tree>> = groups.iter().map(|_| Vec::new()).collect();
    // All have the same links.
    let Some(Group { routes: links, .. }) = groups.first() else { return trees };
    let mut load = vec![0.0; links.price.len()];
    let mut best: Option<(f64, Vec<Vec<Tree>>)> = None;
    for pass in 0..PASSES {
        for (Group { routes, roots, bytes }, trees) in groups.iter().zip(&mut trees) {
            for (at, &root) in roots.iter().enumerate() {
                if let Some(tree) = trees.get(at) {
                    add(routes, tree, -bytes, &mut load);
                }
                // Full is what the packing before had; in the first pass what the trees so far have.
                let full = best.as_ref().map_or_else(|| most(links, &load), |(full, _)| *full).max(f64::MIN_POSITIVE);
                let dear: Vec<f64> = (load.iter().zip(&links.price))
                    .map(|(load, price)| price * (STEEPNESS * ((load + bytes) * price / full).min(2.0)).exp())
                    .collect();
                let costs = Costs::new(routes.ranks, |from, to| routes.links(from, to).iter().map(|&l| dear[l]).sum());
                let tree = Tree { root, parents: cheapest(&costs, root) };
                add(routes, &tree, *bytes, &mut load);
                match trees.get_mut(at) {
                    Some(place) => *place = tree,
                    None => trees.push(tree),
                }
            }
        }
        let full = most(links, &load);
        if pass == 0 || best.as_ref().is_some_and(|(least, _)| full < *least) {
            best = Some((full, trees.clone()));
        }
    }
    best.map_or(trees, |(_, trees)| trees)
}

/// Moves the root of each tree to where the farthest rank is nearest.
pub(super) fn centred(trees: Vec<Tree>) -> Vec<Tree> {
    trees.into_iter().map(|tree| centre(&tree)).collect()
}

fn centre(tree: &Tree) -> Tree {
    let ranks = tree.parents.len();
    let mut beside = vec![Vec::new(); ranks];
    tree.edges().for_each(|(a, b)| {
        beside[a].push(b);
        beside[b].push(a);
    });
    let rooted = |root: usize| {
        let (mut parents, mut depth) = (vec![root; ranks], vec![0; ranks]);
        let mut next = vec![root];
        while let Some(at) = next.pop() {
            let before = parents[at];
            for &to in beside[at].iter().filter(|&&to| to != before) {
                (parents[to], depth[to]) = (at, depth[at] + 1);
                next.push(to);
            }
        }
        (depth.into_iter().max(), Tree { root, parents })
    };
    let all = (0..ranks).map(rooted);
    all.min_by_key(|(depth, _)| *depth).map_or_else(|| tree.clone(), |(_, tree)| tree)
}
