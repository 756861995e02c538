//! A rank's position in a hypercube: rank `id` exchanges with `id ^ 1`, `id ^ 2`, `id ^ 4`, ....
//!
//! For n that is not a power of two, with 2^k below it, the first 2(n - 2^k) ranks pair up: the odd one sends its input
//! to the even one, does not take part, and gets the result at the end.
//!
//! Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
//! (2005).

use std::ops::Range;

use crate::schedule::Step;

/// A hypercube, from the view of one rank.
pub(super) struct Cube {
    /// Ranks in it: the largest power of two.
    pub(super) size: usize,
    /// Ranks outside.
    extra: usize,
    pub(super) role: Role,
}

#[derive(Clone, Copy)]
pub(super) enum Role {
    /// In the cube under this id, with the partner whose data is folded in.
    In { id: usize, partner: Option<usize> },
    /// Outside: the partner does the work.
    Out { partner: usize },
}

impl Cube {
    pub(super) fn new(ranks: usize, rank: usize) -> Cube {
        let size = 1 << ranks.ilog2();
        let extra = ranks - size;
        let role = match rank {
            r if r >= 2 * extra => Role::In { id: r - extra, partner: None },
            r if r % 2 == 0 => Role::In { id: r / 2, partner: Some(r + 1) },
            r => Role::Out { partner: r - 1 },
        };
        Cube { size, extra, role }
    }

    /// The rank with an id.
    pub(super) fn rank(&self, id: usize) -> usize {
        if id < self.extra { 2 * id } else { id + self.extra }
    }

    /// The segments of the ranks with these ids and of their partners: pairs are neighbours, so they are a range.
    pub(super) fn segments(&self, ids: Range<usize>) -> Range<usize> {
        self.rank(ids.start)..self.rank(ids.end)
    }

    /// 1, 2, 4, ... size/2.
    pub(super) fn distances(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (0..self.size.ilog2()).map(|bit| 1 << bit)
    }
}

/// The aligned block of `size` (a power of two) that contains `id`.
pub(super) fn block(id: usize, size: usize) -> Range<usize> {
    let start = id & !(size - 1);
    start..start + size
}

/// Interleaves sends and receives with a peer that does the same, two messages ahead, which every link can hold.
pub(super) fn exchange(
    steps: &mut Vec<Step>,
    mut sends: impl Iterator<Item = Step>,
    recvs: impl Iterator<Item = Step>,
) {
    steps.extend(sends.next());
    for recv in recvs {
        steps.extend(sends.next());
        steps.push(recv);
    }
    steps.extend(sends);
}
