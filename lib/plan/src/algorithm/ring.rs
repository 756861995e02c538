//! Ring: every rank exchanges only with its two neighbours.
//!
//! all_reduce on 4 ranks, one channel. `a+b` is a partial sum of part p over ranks a and b; each line is one hop.
//! ```text
//!            rank 0       rank 1       rank 2       rank 3
//! hop 1      send p0 ->   send p1 ->   send p2 ->   send p3 -> (to rank 0)
//! hop 2      3+0 of p3    0+1 of p0    1+2 of p1    2+3 of p2      recv_reduce_send
//! hop 3      2+3+0 of p2  3+0+1 of p3  0+1+2 of p0  1+2+3 of p1    recv_reduce_send
//!            p1 done      p2 done      p3 done      p0 done        recv_reduce_copy_send
//! hops 4-6   the finished parts go round once more                 recv_copy_send, at last recv
//! ```
//! Each of the n parts is reduced along one path round the ring, so every rank gets the same bits.
//!
//! | collective | hops | bytes sent per rank (S: bytes of a segment) |
//! |---|---|---|
//! | all_reduce, barrier | 2(n-1) | 2(n-1)/n · S |
//! | reduce_scatter, all_gather | n-1 | (n-1) · S |
//! | broadcast, reduce | n-1 (a chain; windows are its pipeline) | S, the end of the chain 0 |
//!
//! Channel c works on its own parts. Odd channels go round in the other direction, to use both directions of every
//! link. Where links lead to a switch they do not ([`super::program_by_switch`]): both directions of each link are in
//!
//! Sources: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009);
//! NCCL `src/device/all_reduce.h` (`runRing`), `all_gather.h`, `reduce_scatter.h`, `broadcast.h`, `reduce.h`.

use super::Shape;
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::Collective;

/// The directions in which the channels go round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ways {
    One,
    /// One for even channels, the other for odd ones.
    Both,
}

/// The program of `rank` among two or more.
pub(super) fn program(shape: &Shape, rank: usize, ways: Ways) -> Option<Program> {
    let lanes = (0..shape.channels)
        .map(|c| Some(Lane { channel: c as u32, steps: Ring::new(shape, rank, c, ways).steps(shape)? }))
        .collect::<Option<Vec<_>>>()?;
    Some(Program { parts: parts(shape), span: 1, scratch_segments: 0, lanes })
}

/// Parts per window: one per rank and channel if the result is assembled from parts.
pub(super) fn parts(shape: &Shape) -> usize {
    if shape.is_all_reduce() { shape.ranks * shape.channels } else { shape.channels }
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    let n = shape.ranks;
    (0..shape.channels)
        .map(|c| {
            let ring = Ring::new(shape, rank, c, Ways::Both);
            match shape.collective {
                Collective::AllReduce | Collective::Barrier => {
                    // All parts twice, except the part that we finish and the part that arrives finished at the end.
                    let part = |k: usize| partition.total_bytes(ring.part(k)..ring.part(k) + 1);
                    2 * partition.total_bytes(c * n..(c + 1) * n) - part(ring.at + 1) - part(ring.at + 2)
                }
                Collective::Broadcast if ring.behind(shape.root) == n - 1 => 0,
                Collective::Reduce if rank == shape.root => 0,
                Collective::Broadcast | Collective::Reduce => partition.total_bytes(c..c + 1),
                _ => (n - 1) as u64 * partition.total_bytes(c..c + 1),
            }
        })
        .sum()
}

/// One channel's ring from the view of one rank. Positions count in the direction of travel.
struct Ring {
    ranks: usize,
    channel: usize,
    backward: bool,
    at: usize,
}

impl Ring {
    fn new(shape: &Shape, rank: usize, channel: usize, ways: Ways) -> Ring {
        let backward = ways == Ways::Both && !channel.is_multiple_of(2);
        let mut ring = Ring { ranks: shape.ranks, channel, backward, at: 0 };
        ring.at = ring.rank(rank); // the map is its own inverse
        ring
    }

    /// The rank at a position, which may be several times round.
    fn rank(&self, position: usize) -> usize {
        let p = position % self.ranks;
        if self.backward { (self.ranks - p) % self.ranks } else { p }
    }

    /// The rank `k` positions before ours (`k` up to n).
    fn before(&self, k: usize) -> usize {
        self.rank(self.at + self.ranks - k)
    }

    /// The part that starts at a position (all_reduce).
    fn part(&self, position: usize) -> usize {
        self.channel * self.ranks + position % self.ranks
    }

    /// Number of positions by which we are behind `root`.
    fn behind(&self, root: usize) -> usize {
        (self.at + self.ranks - self.rank(root)) % self.ranks
    }

    fn steps(&self, shape: &Shape) -> Option<Vec<Step>> {
        let (n, c) = (self.ranks, self.channel);
        let (prev, next) = (self.before(1), self.rank(self.at + 1));
        let mut steps = vec![];
        match shape.collective {
            Collective::AllReduce | Collective::Barrier => {
                let input = |k: usize| Loc::input(0, self.part(self.at + n - k));
                let output = |k: usize| Loc::output(0, self.part(self.at + n - k));
                steps.push(Step::send(next, input(0)));
                steps.extend((1..n - 1).map(|k| Step::recv_reduce_send(prev, next, input(k))));
                steps.push(Step::recv_reduce_copy_send(prev, next, input(n - 1), output(n - 1), true));
                steps.extend((0..n - 2).map(|k| Step::recv_copy_send(prev, next, output(k))));
                steps.push(Step::recv(prev, output(n - 2)));
            }
            Collective::ReduceScatter => {
                let input = |k| Loc::input(self.before(k), c);
                steps.push(Step::send(next, input(1)));
                steps.extend((2..n).map(|k| Step::recv_reduce_send(prev, next, input(k))));
                steps.push(Step::recv_reduce_copy(prev, input(n), Loc::output(0, c), true));
            }
            Collective::AllGather => {
                let output = |k| Loc::output(self.before(k), c);
                steps.push(Step::send(next, Loc::input(0, c)));
                steps.push(Step::Copy { src: Loc::input(0, c), dst: output(0) });
                steps.extend((1..n - 1).map(|k| Step::recv_copy_send(prev, next, output(k))));
                steps.push(Step::recv(prev, output(n - 1)));
            }
            Collective::Broadcast => {
                let (input, output) = (Loc::input(0, c), Loc::output(0, c));
                match self.behind(shape.root) {
                    0 => steps.extend([Step::send(next, input), Step::Copy { src: input, dst: output }]),
                    k if k == n - 1 => steps.push(Step::recv(prev, output)),
                    _ => steps.push(Step::recv_copy_send(prev, next, output)),
                }
            }
            Collective::Reduce => {
                let input = Loc::input(0, c);
                steps.push(match self.behind(shape.root) {
                    0 => Step::recv_reduce_copy(prev, input, Loc::output(0, c), true),
                    1 => Step::send(next, input),
                    _ => Step::recv_reduce_send(prev, next, input),
                });
            }
            _ => return None,
        }
        Some(steps)
    }
}
