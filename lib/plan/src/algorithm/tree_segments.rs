//! Segments through a tree: all_gather and reduce_scatter, in which each rank has, or gets, its own segment.
//!
//! all_gather on 4 ranks; the tree is 0 - 2 - (1, 3), and the table lists what each rank sends:
//! ```text
//!            rank 0      rank 1      rank 2              rank 3
//! up                     1 to 2      2, 1, 3 to 0        3 to 2       a subtree's segments go to its parent
//! down       0 to 2                  2, 3, 0 to 1                     a child gets the segments of the others
//!                                    2, 1, 0 to 3
//! ```
//! Each of the n segments crosses each of the n-1 edges once, away from its rank, so no scheme sends fewer bytes in
//! total. (A gather and then a broadcast of everything would send a child's own segments back to it.) Inner nodes send
//! the most bytes.
//!
//! reduce_scatter is the same in reverse: partial sums of a segment move from all sides towards its rank. A child sends
//! up its subtree's contributions to the segments of the others, the farthest first. A parent sends down the
//! contributions of all others to the segments of the subtree. So every rank sends n-1 segments, and inner nodes add
//! more.
//!
//! A rank has one lane: it sends nothing down before everything from below has passed, which orders its memory
//! accesses. The segments of a window follow each other through the tree and keep it busy, so one window suffices.
//!
//! Bytes, hops and sources: [`super::tree`] and [`super::double_tree`]. NCCL has no tree here. Its PAT
//! (`src/device/all_gather.h`, S. Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at
//! scale", 2025) uses binomial trees, one per rank, and needs links to log₂n ranks; a tree needs three.

use super::binary_tree::{Laid, Node, first, subtree};
use crate::schedule::{Loc, Step};

/// Holds sums for the ranks below until the rest comes down. Only ranks with two children need it.
pub(super) fn scratch_segments(tree: &Laid, rank: usize) -> usize {
    subtree(tree.n, tree.label(rank)).len() - 1
}

/// The steps of `rank`, for part `c`.
pub(super) fn all_gather(tree: &Laid, rank: usize, c: usize) -> Vec<Step> {
    let place = Place::new(tree, rank);
    let (own, segment) = (Loc::input(0, c), |label| Loc::output(tree.rank(label), c));
    let copy = Step::Copy { src: own, dst: segment(place.label) };
    let below = below(tree.n, place.label).into_iter().skip(1);
    let Some(parent) = place.parent() else {
        let mut steps: Vec<Step> = place.children().map(|child| Step::send(child, own)).collect();
        steps.push(copy);
        steps.extend(below.map(|label| Step::recv(place.towards(label), segment(label))));
        return steps;
    };
    let mut steps = vec![Step::send(parent, own), copy];
    steps.extend(below.map(|label| Step::recv_copy_send(place.towards(label), parent, segment(label))));
    // Children get their parent's segment, then each other's, then those from farther away.
    steps.extend(place.children().map(|child| Step::send(child, own)));
    if let [Some(a), Some(b)] = place.node.children {
        let (to_a, to_b) = (self::below(tree.n, b), self::below(tree.n, a));
        let send = |to: usize, label: usize| Step::send(tree.rank(to), segment(label));
        steps.extend(alternate(to_a.into_iter().map(|l| send(a, l)), to_b.into_iter().map(|l| send(b, l))));
    }
    for label in outside(tree.n, place.label) {
        let mut children = place.children();
        steps.push(match children.next() {
            None => Step::recv(parent, segment(label)),
            Some(a) => Step::recv_copy_send(parent, a, segment(label)),
        });
        steps.extend(children.map(|b| Step::send(b, segment(label))));
    }
    steps
}

/// The steps of `rank`, for part `c`: those of [`all_gather`] backwards.
pub(super) fn reduce_scatter(tree: &Laid, rank: usize, c: usize) -> Vec<Step> {
    let place = Place::new(tree, rank);
    let (input, output) = (|label| Loc::input(tree.rank(label), c), Loc::output(0, c));
    let own = input(place.label);
    let down = below(tree.n, place.label).into_iter().skip(1).rev();
    let Some(parent) = place.parent() else {
        let mut steps: Vec<Step> = down.map(|label| Step::send(place.towards(label), input(label))).collect();
        steps.extend(place.children().map(|child| Step::recv_reduce_copy(child, own, output, true)));
        return steps;
    };
    let up = outside(tree.n, place.label).into_iter().rev();
    let pass = |label, sum| Step::recv_reduce_send(parent, place.towards(label), sum);
    let mut steps = vec![];
    match place.node.children {
        [Some(a), Some(b)] => {
            let start = subtree(tree.n, place.label).start;
            let sum = |label| Loc::scratch(label - start - usize::from(label > place.label), c);
            let tmp = Loc::scratch(0, c);
            let (left, right) = (tree.rank(a), tree.rank(b));
            for label in up {
                steps.push(Step::recv_reduce_copy(left, input(label), tmp, false));
                steps.push(Step::recv_reduce_send(right, parent, tmp));
            }
            let add = |from, label| Step::recv_reduce_copy(from, input(label), sum(label), false);
            steps.extend(below(tree.n, b).into_iter().rev().map(|label| add(left, label)));
            steps.push(Step::recv_reduce_copy(left, own, output, false));
            steps.extend(below(tree.n, a).into_iter().rev().map(|label| add(right, label)));
            steps.push(Step::recv_reduce_copy(right, output, output, false));
            steps.extend(down.map(|label| pass(label, sum(label))));
            steps.push(Step::recv_reduce_copy(parent, output, output, true));
        }
        [Some(a), None] | [None, Some(a)] => {
            let child = tree.rank(a);
            steps.extend(up.map(|label| Step::recv_reduce_send(child, parent, input(label))));
            steps.push(Step::recv_reduce_copy(child, own, output, false));
            steps.extend(down.map(|label| pass(label, input(label))));
            steps.push(Step::recv_reduce_copy(parent, output, output, true));
        }
        [None, None] => {
            steps.extend(up.map(|label| Step::send(parent, input(label))));
            steps.push(Step::recv_reduce_copy(parent, own, output, true));
        }
    }
    steps
}

/// A rank's position.
struct Place<'a> {
    tree: &'a Laid,
    label: usize,
    /// Its neighbours' labels.
    node: Node,
}

impl<'a> Place<'a> {
    fn new(tree: &'a Laid, rank: usize) -> Place<'a> {
        let label = tree.label(rank);
        Place { tree, label, node: first(tree.n, label) }
    }

    fn parent(&self) -> Option<usize> {
        self.node.parent.map(|label| self.tree.rank(label))
    }

    fn children(&self) -> impl Iterator<Item = usize> {
        self.node.children().map(|label| self.tree.rank(label))
    }

    /// The child on the path down to `label`.
    fn towards(&self, label: usize) -> usize {
        let on_the_way = |child: &usize| subtree(self.tree.n, *child).contains(&label);
        self.tree.rank(self.node.children().find(on_the_way).unwrap_or(label))
    }
}

/// The labels of the subtree below `label` in the order in which they arrive at its top: its own, then its children's
/// in turn.
fn below(n: usize, label: usize) -> Vec<usize> {
    let mut children = first(n, label).children().map(|child| below(n, child).into_iter());
    let (a, b) = (children.next().unwrap_or_default(), children.next().unwrap_or_default());
    std::iter::once(label).chain(alternate(a, b)).collect()
}

/// The other labels in the order in which they arrive at `label`: its parent, the parent's other subtree, and so on up.
fn outside(n: usize, label: usize) -> Vec<usize> {
    let (mut labels, mut at) = (vec![], label);
    while let Some(parent) = first(n, at).parent {
        labels.push(parent);
        labels.extend(first(n, parent).children().filter(|&child| child != at).flat_map(|child| below(n, child)));
        at = parent;
    }
    labels
}

/// One of each in turn, then the rest of the longer one.
fn alternate<T>(mut a: impl Iterator<Item = T>, mut b: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
    std::iter::from_fn(move || Some([a.next(), b.next()]))
        .take_while(|pair| pair.iter().any(Option::is_some))
        .flatten()
        .flatten()
}
