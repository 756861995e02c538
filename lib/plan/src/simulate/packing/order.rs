//! An order of all messages of a packing that every rank keeps: by the time at which each could begin if a link carried
//! one after the other.
//!
//! Each rank's steps in this order wait for nothing that comes later, so there is no deadlock. The times are those of
//! parts of one length without latency: the order matters, not the clock.

use super::trees::{Routes, Tree};

/// A message of a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Message {
    pub(super) tree: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) begin: f64,
    pub(super) end: f64,
}

/// All messages of `trees`, by their beginning.
pub(super) fn messages(routes: &Routes, trees: &[Tree]) -> Vec<Message> {
    let heights: Vec<Vec<usize>> = trees.iter().map(heights).collect();
    let mut free = vec![0.0f64; routes.price.len()];
    // Messages that may begin, once their sender has the part.
    let mut open: Vec<(usize, usize, usize, f64)> = Vec::new();
    let children = |tree: usize, rank: usize, ready: f64| {
        trees[tree].edges().filter(move |edge| edge.0 == rank).map(move |(from, to)| (tree, from, to, ready))
    };
    for (at, tree) in trees.iter().enumerate() {
        open.extend(children(at, tree.root, 0.0));
    }
    let mut all = Vec::new();
    loop {
        let begin = |&(_, from, to, ready): &(usize, usize, usize, f64)| {
            routes.links(from, to).iter().map(|&link| free[link]).fold(ready, f64::max)
        };
        // The earliest; of several the one that most others wait for, then the first tree.
        let key = |message: &(usize, usize, usize, f64)| (begin(message), usize::MAX - heights[message.0][message.2]);
        let next = open.iter().enumerate().min_by(|(_, a), (_, b)| {
            let ((begin, waiting), (other, others)) = (key(a), key(b));
            begin.total_cmp(&other).then(waiting.cmp(&others)).then((a.0, a.2).cmp(&(b.0, b.2)))
        });
        let Some((at, &message)) = next else { break };
        let begin = begin(&message);
        open.swap_remove(at);
        let (tree, from, to, _) = message;
        let mut end = begin;
        for &link in routes.links(from, to) {
            free[link] = begin + routes.price[link];
            end = end.max(free[link]);
        }
        all.push(Message { tree, from, to, begin, end });
        open.extend(children(tree, to, end));
    }
    all
}

/// Number of hops below each rank.
fn heights(tree: &Tree) -> Vec<usize> {
    let mut heights = vec![0; tree.parents.len()];
    for rank in 0..tree.parents.len() {
        let (mut at, mut height) = (rank, 0);
        while at != tree.root {
            at = tree.parents[at];
            height += 1;
            heights[at] = heights[at].max(height);
        }
    }
    heights
}
