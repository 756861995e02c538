//! The shapes of the trees: parents and children.
//!
//! In-order binary tree over 1..n under a root 0, the shape of NCCL's `ncclGetBtree` (`src/graph/trees.cc`): the lowest
//! set bit of a label is its height. Leaves are odd, so inner nodes and leaves alternate. n = 14:
//! ```text
//! 0---------------8
//!          ______/ \______
//!         4               12
//!       /   \            /  \
//!     2       6       10     \
//!    / \     / \     /  \     \
//!   1   3   5   7   9   11    13
//! ```
//! The second tree of a pair has the same shape over other labels, so that no node is an inner node of both: mirrored
//! (label x becomes n-x) when n is odd, shifted by one when n is even. Unlike in NCCL's pair, both have the same root,
//! with one child in each. So the pair also serves broadcast and reduce from any root, as in P. Sanders, J. Speck and
//! J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009), section 2.

use std::ops::Range;

/// The neighbours of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// `None` at the root.
    pub parent: Option<usize>,
    /// Up to two; the first entries are filled first.
    pub children: [Option<usize>; 2],
}

impl Node {
    /// The existing children.
    pub fn children(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        self.children.into_iter().flatten()
    }

    fn map(self, f: impl Fn(usize) -> usize) -> Node {
        Node { parent: self.parent.map(&f), children: self.children.map(|c| c.map(&f)) }
    }
}

/// The neighbours of `label` in the tree over `0..n`, rooted at 0.
pub fn first(n: usize, label: usize) -> Node {
    if label == 0 {
        // The largest power of two below n.
        let child = (n > 1).then(|| 1 << (n - 1).ilog2());
        return Node { parent: None, children: [child, None] };
    }
    let bit = label & label.wrapping_neg();
    // The parent of a left or right child is the node between them; if that does not exist, the next one down.
    let between = (label ^ bit) | (bit << 1);
    let parent = if between < n { between } else { label ^ bit };
    let left = (bit > 1).then(|| label - bit / 2);
    // The right subtree may be cut off: its top is the highest node that exists.
    let right = (0..bit.trailing_zeros()).rev().map(|h| label + (1 << h)).find(|&child| child < n);
    let children = if left.is_some() { [left, right] } else { [right, None] };
    Node { parent: Some(parent), children }
}

/// The neighbours of `label` in the second tree over `0..n`, rooted at 0.
pub fn second(n: usize, label: usize) -> Node {
    first(n, Tree::Second.in_first(n, label)).map(|label| Tree::Second.of_first(n, label))
}

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tree {
    /// [`first`].
    First,
    /// [`second`].
    Second,
}

impl Tree {
    /// The label that the node `label` of this tree has in the first one; 0 stays.
    fn in_first(self, n: usize, label: usize) -> usize {
        match (self, label) {
            (Tree::First, x) => x,
            (Tree::Second, 0) => 0,
            (Tree::Second, x) if n % 2 == 1 => n - x,
            (Tree::Second, 1) => n - 1,
            (Tree::Second, x) => x - 1,
        }
    }

    /// The opposite of [`Tree::in_first`].
    fn of_first(self, n: usize, label: usize) -> usize {
        match (self, label) {
            (Tree::First, x) => x,
            (Tree::Second, 0) => 0,
            (Tree::Second, x) if n % 2 == 1 => n - x,
            (Tree::Second, x) if x == n - 1 => 1,
            (Tree::Second, x) => x + 1,
        }
    }
}

/// A tree laid over the ranks from `root` on.
#[derive(Debug, Clone, Copy)]
pub struct Laid {
    /// The first or the second tree of the pair.
    pub tree: Tree,
    /// Ranks.
    pub n: usize,
    /// The rank under label 0.
    pub root: usize,
}

impl Laid {
    /// The neighbours of `rank`.
    pub fn node(&self, rank: usize) -> Node {
        first(self.n, self.label(rank)).map(|label| self.rank(label))
    }

    /// Label of `rank` in the first tree, whose labels are in order.
    pub fn label(&self, rank: usize) -> usize {
        self.tree.in_first(self.n, (rank + self.n - self.root) % self.n)
    }

    /// The rank with this label.
    pub fn rank(&self, label: usize) -> usize {
        (self.tree.of_first(self.n, label) + self.root) % self.n
    }
}

/// The labels of the subtree below `label` of the first tree, `label` among them: the order makes them neighbours.
pub fn subtree(n: usize, label: usize) -> Range<usize> {
    let bit = label & label.wrapping_neg();
    if label == 0 { 0..n } else { label + 1 - bit..n.min(label + bit) }
}

/// Hops from the root of [`first`] to its farthest leaf.
pub fn depth(n: usize) -> u32 {
    if n <= 1 { 0 } else { (n - 1).ilog2() + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth_of(tree: impl Fn(usize, usize) -> Node, n: usize, mut label: usize) -> u32 {
        let mut hops = 0;
        while let Some(parent) = tree(n, label).parent {
            label = parent;
            hops += 1;
            assert!(hops as usize <= n, "a cycle");
        }
        assert_eq!(label, 0);
        hops
    }

    #[test]
    fn the_picture_above() {
        let node = |parent, a, b| Node { parent, children: [a, b] };
        assert_eq!(first(14, 0), node(None, Some(8), None));
        assert_eq!(first(14, 8), node(Some(0), Some(4), Some(12)));
        assert_eq!(first(14, 12), node(Some(8), Some(10), Some(13)));
        assert_eq!(first(14, 13), node(Some(12), None, None));
        assert_eq!(first(14, 5), node(Some(6), None, None));
    }

    #[test]
    fn parents_and_children_agree_and_depth_is_logarithmic() {
        for n in (1..200).chain([1023, 1024, 1025]) {
            for tree in [first, second] {
                let mut edges = 0;
                for x in 0..n {
                    let node = tree(n, x);
                    for child in node.children() {
                        assert_eq!(tree(n, child).parent, Some(x), "n {n}, child {child} of {x}");
                        edges += 1;
                    }
                    assert!(depth_of(tree, n, x) <= depth(n));
                }
                assert_eq!(edges, n - 1);
            }
            assert_eq!((0..n).map(|x| depth_of(first, n, x)).max(), Some(depth(n)));
        }
    }

    #[test]
    fn no_node_is_an_inner_node_of_both() {
        for n in 2..200 {
            for x in 1..n {
                let inner = |node: Node| node.children().count() > 0;
                assert!(!(inner(first(n, x)) && inner(second(n, x))), "n {n}, node {x}");
            }
        }
    }

    #[test]
    fn a_subtree_is_a_range_of_labels() {
        for n in 1..200 {
            for label in 0..n {
                let mut below: Vec<usize> = vec![label];
                let mut at = 0;
                while let Some(&next) = below.get(at) {
                    below.extend(first(n, next).children());
                    at += 1;
                }
                below.sort_unstable();
                assert_eq!(below, subtree(n, label).collect::<Vec<_>>(), "n {n}, label {label}");
            }
        }
    }

    #[test]
    fn any_rank_can_be_the_root() {
        for n in 1..40 {
            for root in 0..n {
                for tree in [Tree::First, Tree::Second] {
                    let laid = Laid { tree, n, root };
                    assert_eq!(laid.node(root).parent, None);
                    for rank in 0..n {
                        assert_eq!(laid.rank(laid.label(rank)), rank);
                        for child in laid.node(rank).children() {
                            assert_eq!(laid.node(child).parent, Some(rank));
                        }
                    }
                }
            }
        }
    }
}
