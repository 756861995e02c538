//! Algorithms with their ranks in another order.
//!
//! A ring over ranks 0 1 2 3 of two hosts, `a b a b`, leaves a host at every hop; in the order 0 2 1 3 at two of four.
//! The result is the same, and so are the bytes of each rank: the position of a rank takes its number.

use std::convert::Infallible;

use super::{Algorithm, Shape, program};
use crate::schedule::{Buf, Loc, Program};
use crate::wire::Collective;

/// An order of all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Order {
    ranks: Vec<usize>,
    /// The position of each rank.
    positions: Vec<usize>,
}

impl Order {
    /// The ranks by position; `None` unless each of 0 to n-1 is there once.
    pub fn new(ranks: Vec<usize>) -> Option<Order> {
        let mut positions = vec![usize::MAX; ranks.len()];
        for (position, &rank) in ranks.iter().enumerate() {
            let place = positions.get_mut(rank).filter(|place| **place == usize::MAX)?;
            *place = position;
        }
        Some(Order { ranks, positions })
    }

    /// The ranks by position.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The rank at `position`: itself where there is no order.
    #[inline]
    pub fn rank(&self, position: usize) -> usize {
        self.ranks.get(position).copied().unwrap_or(position)
    }

    /// The position of `rank`.
    #[inline]
    pub fn position(&self, rank: usize) -> usize {
        self.positions.get(rank).copied().unwrap_or(rank)
    }

    /// True if every rank has its own number as position.
    pub fn is_natural(&self) -> bool {
        self.ranks.iter().enumerate().all(|(position, &rank)| position == rank)
    }
}

/// [`program`] of `rank` if the algorithm's positions are taken by the ranks in this order. `None` too for collectives
/// whose result depends on the order (scan).
pub fn program_in_order(algorithm: Algorithm, shape: &Shape, order: &Order, rank: usize) -> Option<Program> {
    if shape.collective == Collective::Scan && !order.is_natural() {
        return None;
    }
    let mut program = program(algorithm, &Shape { root: order.position(shape.root), ..*shape }, order.position(rank))?;
    // Buffers with a segment for each rank.
    let (inputs, outputs) = match shape.collective {
        Collective::ReduceScatter | Collective::Scatter => (true, false),
        Collective::AllGather | Collective::Gather => (false, true),
        Collective::AllToAll => (true, true),
        _ => (false, false),
    };
    let loc = |loc: Loc| match loc.buf {
        Buf::Input if inputs => Loc { segment: order.rank(loc.segment as usize) as u32, ..loc },
        Buf::Output if outputs => Loc { segment: order.rank(loc.segment as usize) as u32, ..loc },
        _ => loc,
    };
    for step in program.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
        let Ok(renamed) = step.map(|peer| Ok::<_, Infallible>(order.rank(peer as usize) as u32), loc);
        *step = renamed;
    }
    Some(program)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::supports;
    use crate::schedule::verify::verify;

    #[test]
    fn an_order_has_every_rank_once() {
        assert!(Order::new(vec![0, 2]).is_none() && Order::new(vec![1, 1]).is_none());
        let order = Order::new(vec![2, 0, 1]).unwrap();
        assert_eq!((order.rank(0), order.position(0), order.is_natural()), (2, 1, false));
        assert!(Order::new(vec![0, 1, 2]).unwrap().is_natural() && Order::default().is_natural());
        assert_eq!((Order::default().rank(7), Order::default().position(7)), (7, 7));
    }

    proptest! {
        #[test]
        fn every_algorithm_is_right_in_every_order(
            ranks in Just((0..9usize).collect::<Vec<_>>()).prop_shuffle(), size in 2usize..10,
            algorithm in 0..Algorithm::ALL.len(), collective in 0..Collective::ALL.len(), root in 0usize..9,
            channels in 1usize..3,
        ) {
            let order = Order::new(ranks.into_iter().filter(|&rank| rank < size).collect()).unwrap();
            let (algorithm, collective) = (Algorithm::ALL[algorithm], Collective::ALL[collective]);
            let shape = Shape { collective, ranks: size, root: root % size, channels };
            if !supports(algorithm, &shape) {
                return Ok(());
            }
            let programs: Option<Vec<_>> =
                (0..size).map(|rank| program_in_order(algorithm, &shape, &order, rank)).collect();
            match programs {
                Some(programs) => {
                    for in_place in [false, true] {
                        let proved = verify(&programs, &shape, 2, 2, in_place);
                        prop_assert!(proved.is_ok(), "{algorithm} {shape:?} {order:?}: {proved:?}");
                    }
                }
                None => prop_assert_eq!(collective, Collective::Scan),
            }
        }
    }
}
