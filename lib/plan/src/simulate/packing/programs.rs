//! The steps of packed trees: sums along them to their roots, then copies along them from their roots.
//!
//! A rank has as few dependencies between its steps as links allow. Trees that do not share a neighbour in one
//! direction have lanes of their own, so that a long tree does not hold up the next window of a short one.

use super::order::Message;
use super::trees::Tree;
use crate::schedule::{Lane, Loc, Program, Shape, Step, joined};
use crate::wire::Collective;

/// Trees, and their messages in an order that all ranks keep, from parents to children.
#[derive(Debug, Clone)]
pub(super) struct Way {
    pub(super) trees: Vec<Tree>,
    pub(super) messages: Vec<Message>,
}

/// Places of a tree's part in the buffers of a rank.
struct Places {
    input: Loc,
    /// Sum of what has arrived at a rank that is not the root.
    partial: Loc,
    /// Result of the root, and of others if they get it.
    result: Loc,
}

/// A packing: what its trees carry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing<'a> {
    pub(super) shape: &'a Shape,
    /// Trees of each root.
    pub(super) each: usize,
    /// Sums go this way, against its direction.
    pub(super) home: Option<&'a Way>,
    /// Copies go this way.
    pub(super) there: Option<&'a Way>,
}

/// A step, with the part of the lanes' work that it belongs to.
struct Placed {
    tree: usize,
    copies: bool,
    step: Step,
}

impl Packing<'_> {
    /// The programs of all ranks.
    pub(super) fn programs(&self) -> Vec<Program> {
        (0..self.shape.ranks).map(|rank| self.program(rank)).collect()
    }

    fn program(&self, rank: usize) -> Program {
        let trees = self.home.or(self.there).map_or(0, |way| way.trees.len());
        let parts = if self.shape.collective == Collective::AllReduce { trees } else { self.each };
        let scratch_segments = match self.shape.collective {
            Collective::ReduceScatter => self.shape.ranks,
            Collective::Reduce | Collective::AllReduce => 1,
            _ => 0,
        };
        let mut steps = Vec::new();
        self.sum(rank, &mut steps);
        self.copy(rank, &mut steps);
        Program { parts, span: 1, scratch_segments, lanes: self.lanes(rank, trees, steps) }
    }

    fn places(&self, tree: &Tree, at: usize) -> Places {
        let (root, part) = (tree.root, at % self.each);
        match self.shape.collective {
            Collective::AllGather => {
                let result = Loc::output(root, part);
                Places { input: Loc::input(0, part), partial: result, result }
            }
            Collective::ReduceScatter => Places {
                input: Loc::input(root, part),
                partial: Loc::scratch(root, part),
                result: Loc::output(0, part),
            },
            Collective::AllReduce => {
                Places { input: Loc::input(0, at), partial: Loc::scratch(0, at), result: Loc::output(0, at) }
            }
            _ => Places { input: Loc::input(0, part), partial: Loc::scratch(0, part), result: Loc::output(0, part) },
        }
    }

    /// Returns true if a tree's copies begin with its root's own input.
    fn copies_input(&self) -> bool {
        self.home.is_none()
    }

    fn copy(&self, rank: usize, steps: &mut Vec<Placed>) {
        let Some(Way { trees, messages }) = self.there else { return };
        for (tree, of) in trees.iter().enumerate().filter(|(_, tree)| self.copies_input() && tree.root == rank) {
            let places = self.places(of, tree);
            steps.push(Placed { tree, copies: true, step: Step::Copy { src: places.input, dst: places.result } });
        }
        for (leaves, message) in in_order(rank, messages) {
            let tree = &trees[message.tree];
            let places = self.places(tree, message.tree);
            let step = match leaves {
                true if self.copies_input() && tree.root == rank => Step::send(message.to, places.input),
                true => Step::send(message.to, places.result),
                false => Step::recv(message.from, places.result),
            };
            steps.push(Placed { tree: message.tree, copies: true, step });
        }
    }

    fn sum(&self, rank: usize, steps: &mut Vec<Placed>) {
        let Some(Way { trees, messages }) = self.home else { return };
        // The other way round in time, too.
        let end = messages.iter().map(|message| message.end).fold(0.0, f64::max);
        let turned = |m: &Message| Message { from: m.to, to: m.from, begin: end - m.end, end: end - m.begin, ..*m };
        let messages: Vec<Message> = messages.iter().map(turned).collect();
        let mut arrived = vec![0; trees.len()];
        for (leaves, message) in in_order(rank, &messages) {
            let tree = &trees[message.tree];
            let places = self.places(tree, message.tree);
            let sum = if tree.root == rank { places.result } else { places.partial };
            let before = arrived[message.tree];
            let own = if before == 0 { places.input } else { sum };
            let step = if leaves {
                Step::send(message.to, own)
            } else {
                arrived[message.tree] += 1;
                let children = tree.edges().filter(|edge| edge.0 == rank).count();
                Step::recv_reduce_copy(message.from, own, sum, tree.root == rank && before + 1 == children)
            };
            steps.push(Placed { tree: message.tree, copies: false, step });
        }
    }

    /// Lanes of steps that depend on each other, or use the same link.
    fn lanes(&self, rank: usize, trees: usize, steps: Vec<Placed>) -> Vec<Lane> {
        let channels = self.shape.channels.clamp(1, trees.max(1));
        let group = |tree: usize, copies: bool| 2 * tree + usize::from(copies);
        let mut lane: Vec<usize> = (0..2 * trees).collect();
        let mut join = |a: usize, b: usize| {
            let (from, to) = (lane[a].max(lane[b]), lane[a].min(lane[b]));
            lane.iter_mut().filter(|lane| **lane == from).for_each(|lane| *lane = to);
        };
        // The root's result is what it sends.
        for (tree, of) in self.there.iter().flat_map(|way| way.trees.iter().enumerate()) {
            if of.root == rank && self.home.is_some() {
                join(group(tree, false), group(tree, true));
            }
        }
        let mut users = std::collections::HashMap::new();
        for Placed { tree, copies, step } in &steps {
            for link in [step.source().map(|peer| (peer, false)), step.destination().map(|peer| (peer, true))] {
                let ours = group(*tree, *copies);
                let other = link.map(|link| *users.entry((link, tree % channels)).or_insert(ours));
                join(ours, other.unwrap_or(ours));
            }
        }
        let mut lanes: Vec<(usize, Lane)> = Vec::new();
        for Placed { tree, copies, step } in steps {
            let number = lane[group(tree, copies)];
            match lanes.iter_mut().find(|(of, _)| *of == number) {
                Some((_, lane)) => lane.steps.push(step),
                None => lanes.push((number, Lane { channel: (tree % channels) as u32, steps: vec![step] })),
            }
        }
        lanes.into_iter().map(|(_, lane)| Lane { steps: joined(lane.steps, |_, _| true), ..lane }).collect()
    }
}

/// Messages of `rank`, what arrives before what leaves at the same time; true: it leaves.
fn in_order(rank: usize, messages: &[Message]) -> impl Iterator<Item = (bool, Message)> {
    let mine = messages.iter().flat_map(|message| {
        let leaves = (message.from == rank).then_some((message.begin, true, *message));
        let arrives = (message.to == rank).then_some((message.end, false, *message));
        leaves.into_iter().chain(arrives)
    });
    let mut mine: Vec<_> = mine.collect();
    mine.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    mine.into_iter().map(|(_, leaves, message)| (leaves, message))
}
