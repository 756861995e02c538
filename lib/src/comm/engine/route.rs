//! The route of a call: decided when the call is first made, cached, and explained by the same function.

use std::sync::Arc;

use super::board::BoardState;
use crate::Call;
use crate::algorithm::{self, Shape};
use crate::comm::{Comm, Engine, Inner};
use crate::error::{Error, Result};
use crate::executor::Plan;
use crate::symmetric::{self, Registry};
use crate::threads::lock;
use crate::topology::Choice;
use crate::wire::{Algorithm, Collective};

/// Routes cached per communicator; the least recently used one is evicted first.
const ROUTES: usize = 512;

/// Entries at the front that keep their position when used, so that alternating calls move nothing.
const FRONT: usize = 8;

/// A call that was made before.
pub(super) struct Route {
    /// Its plan in the shared region, if it takes that.
    pub(super) board: Option<symmetric::Plan>,
    /// Its plan over links, compiled on first use.
    plan: Option<Arc<Plan>>,
}

impl Route {
    /// An error before [`Inner::prepare`].
    #[inline]
    pub(super) fn plan(&self) -> Result<&Arc<Plan>> {
        self.plan.as_ref().ok_or_else(|| Error::invalid("comm", "a call over links that was not prepared"))
    }

    /// True if the call takes the slots of the shared region, whatever its buffers are.
    #[inline]
    pub(super) fn is_one_shot(&self) -> bool {
        self.board.as_ref().is_some_and(|plan| plan.header.algorithm == Algorithm::OneShot as u8)
    }
}

impl Inner {
    /// Index of the route of `call`. Usually it is one of the last calls.
    #[inline]
    pub(super) fn route(&self, engine: &mut Engine, call: &Call) -> usize {
        match engine.routes.iter().position(|(known, _)| known == call) {
            Some(place) if place < FRONT => place,
            Some(place) => {
                engine.routes[..=place].rotate_right(1);
                0
            }
            None => self.new_route(engine, call),
        }
    }

    /// Index of the route of a call over links, whose plan is compiled on first use.
    #[inline]
    pub(super) fn prepare(&self, engine: &mut Engine, call: &Call) -> Result<usize> {
        let place = self.route(engine, call);
        if engine.routes[place].1.plan.is_none() {
            let plan = self.new_plan(engine, call)?;
            engine.routes[place].1.plan = Some(Arc::new(plan));
        }
        Ok(place)
    }

    #[cold]
    fn new_route(&self, engine: &mut Engine, call: &Call) -> usize {
        let elem = call.dtype.size();
        let shape = self.shape(call.collective, call.root);
        // A program of the caller's runs over links, as it says.
        let library = call.program == 0;
        let board =
            library.then(|| self.through_board(engine, &shape, call.count.saturating_mul(elem), elem)).flatten();
        let route = Route { board: board.map(|(algorithm, _)| self.board_plan(call, algorithm)), plan: None };
        engine.routes.truncate(ROUTES - 1);
        engine.routes.insert(0, (*call, route));
        0
    }

    /// The shared-region algorithm of a collective with segments of `segment` bytes, and the bytes of a segment per
    /// step; `None`: over links.
    fn through_board(&self, engine: &Engine, shape: &Shape, segment: usize, elem: usize) -> Option<(Algorithm, usize)> {
        let layout = match &engine.board {
            BoardState::Open(board) => board.layout(),
            // Queried before the first collective, by one rank perhaps, which opens nothing.
            BoardState::Unopened => self.board_layout().ok().flatten()?,
            BoardState::Unavailable => return None,
        };
        if !algorithm::through_memory(shape.collective) {
            return None;
        }
        // Taken wherever it fits, unless another algorithm is requested.
        if matches!(engine.forced, None | Some(Algorithm::OneShot))
            && symmetric::slot_bytes(shape, segment) <= layout.slot_bytes
        {
            return Some((Algorithm::OneShot, segment));
        }
        // A link with zero copy copies a segment on ordinary pages once; staging copies it twice.
        let zero_copy = engine.tuned.model.zero_copy_from.is_some_and(|from| segment >= from);
        let wanted = match engine.forced {
            // Two ranks are as fast or faster over their link, except for a broadcast.
            None => shape.ranks > 2 || shape.ranks == 2 && shape.collective == Collective::Broadcast && !zero_copy,
            Some(forced) => forced == Algorithm::Staged && shape.ranks > 1,
        };
        let chunk = symmetric::largest_chunk(shape, elem, layout.stage_bytes);
        (wanted && shape.collective != Collective::Barrier && chunk > 0).then_some((Algorithm::Staged, chunk))
    }

    /// The plan of a call that finds out whether all its buffers are symmetric.
    pub(super) fn two_shot(
        &self,
        registry: &Registry,
        forced: Option<Algorithm>,
        call: &Call,
    ) -> Option<symmetric::Plan> {
        // Ranks that use each other's buffers move no bytes that could be checked.
        let may = call.program == 0
            && matches!(forced, None | Some(Algorithm::TwoShot))
            && !self.state.config.checksum
            && registry.in_use()
            && algorithm::through_memory(call.collective)
            && !matches!(call.collective, Collective::Scatter | Collective::Barrier);
        may.then(|| self.board_plan(call, Algorithm::TwoShot))
    }
}

impl Comm {
    /// The algorithm that a collective of `bytes` per segment would use (with root 0, if it has one), and what the
    /// others were estimated to cost. It is local: one rank alone may ask, also before the first collective.
    pub fn explain(&self, collective: Collective, bytes: usize) -> Result<Choice> {
        self.explain_from(collective, 0, bytes)
    }

    /// [`Comm::explain`] for another root.
    pub fn explain_from(&self, collective: Collective, root: usize, bytes: usize) -> Result<Choice> {
        self.inner.peer_in_range(collective.name(), "root", root)?;
        let inner = &self.inner;
        inner.state.origin.check(|| "explain".to_owned(), inner.state.rank)?;
        let engine = lock(&inner.engine);
        let mut choice = inner.choice(&engine, collective, root, bytes)?;
        let shape = inner.shape(collective, root);
        if let Some((algorithm, chunk)) = inner.through_board(&engine, &shape, bytes, 1) {
            choice.prefer(algorithm, &shape, bytes, chunk, &engine.tuned.model);
        }
        Ok(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    /// In one thread: rank 1 makes no call.
    #[test]
    fn one_rank_alone_may_ask_and_is_told_what_comes() {
        let comms = Comm::threads(3, Config::default()).unwrap();
        let asked =
            |comm: &Comm| [8, 1 << 20].map(|bytes| comm.explain(Collective::AllReduce, bytes).unwrap().algorithm);
        let before = asked(&comms[0]);
        assert_eq!(before, [Algorithm::OneShot, Algorithm::Staged]);
        std::thread::scope(|scope| comms.iter().for_each(|comm| drop(scope.spawn(|| comm.barrier().unwrap()))));
        assert_eq!(asked(&comms[0]), before);
    }
}
