//! The route of a call: decided when the call is first made, cached, and explained by the same function.

use std::sync::Arc;

use super::board::BoardState;
use crate::executor::Plan;
use crate::symmetric::{self, Registry};
use crate::topology::Choice;
use crate::{Comm, Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Algorithm, Collective};
use tinynccl_sys::threads::lock;

/// Routes cached per communicator; the least recently used one is evicted first.
const ROUTES: usize = 512;

/// Entries at the front that keep their position when used, so that alternating calls move nothing.
const FRONT: usize = 8;

/// A call that was made before.
pub(super) struct Route {
    /// Its plan in memory that is symmetric already, taken if all its buffers are.
    two_shot: Option<Box<symmetric::Plan>>,
    /// Its plan in the shared region, if it takes that.
    board: Option<symmetric::Plan>,
    /// Its plan over links, compiled on first use.
    plan: Option<Arc<Plan>>,
}

impl Route {
    /// Plans in memory that all ranks map, in the order in which they are tried.
    #[inline]
    pub(super) fn in_memory(&self, registry: &Registry) -> impl Iterator<Item = &symmetric::Plan> {
        self.two_shot.as_deref().filter(|_| registry.in_use()).into_iter().chain(&self.board)
    }

    /// Its plan over links; an error before [`Inner::prepare`].
    #[inline]
    pub(super) fn plan(&self) -> Result<&Arc<Plan>> {
        self.plan.as_ref().ok_or_else(|| Error::invalid("comm", "a call over links that was not prepared"))
    }
}

/// Algorithms of a call in memory that all ranks map.
#[derive(Default)]
struct InMemory {
    /// Two-shot is taken if all buffers are symmetric, which only the call itself shows.
    two_shot: bool,
    /// Algorithm for any buffers, and the bytes of a segment per step; `None`: over links.
    any: Option<(Algorithm, usize)>,
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

    /// Compiles the plan over links of a route on first use.
    #[inline]
    pub(super) fn prepare(&self, engine: &mut Engine, place: usize) -> Result<()> {
        if engine.routes[place].1.plan.is_none() {
            let call = engine.routes[place].0;
            let plan = self.new_plan(engine, &call)?;
            engine.routes[place].1.plan = Some(Arc::new(plan));
        }
        Ok(())
    }

    #[cold]
    fn new_route(&self, engine: &mut Engine, call: &Call) -> usize {
        let InMemory { two_shot, any } = self.in_memory(engine, call);
        let route = Route {
            two_shot: two_shot.then(|| Box::new(self.board_plan(call, Algorithm::TwoShot))),
            board: any.map(|(algorithm, _)| self.board_plan(call, algorithm)),
            plan: None,
        };
        engine.routes.truncate(ROUTES - 1);
        engine.routes.insert(0, (*call, route));
        0
    }

    /// The algorithms of a call in the shared region and in symmetric memory.
    fn in_memory(&self, engine: &Engine, call: &Call) -> InMemory {
        let layout = match &engine.board {
            BoardState::Open(board) => Some(board.layout()),
            // Queried before the first collective, by one rank perhaps, which opens nothing.
            BoardState::Unopened => self.board_layout().ok().flatten(),
            BoardState::Unavailable => None,
        };
        // A program of the caller's runs over links, as it says.
        let Some(layout) = layout.filter(|_| call.program == 0 && algorithm::through_memory(call.collective)) else {
            return InMemory::default();
        };
        let (shape, segment, elem) = (self.shape(call.collective, call.root), call.bytes(), call.dtype.size());
        // Taken wherever it fits, unless another algorithm is requested.
        if matches!(engine.forced, None | Some(Algorithm::OneShot))
            && symmetric::slot_bytes(&shape, segment) <= layout.slot_bytes
        {
            return InMemory { two_shot: false, any: Some((Algorithm::OneShot, segment)) };
        }
        let two_shot = matches!(engine.forced, None | Some(Algorithm::TwoShot))
            && !matches!(call.collective, Collective::Scatter | Collective::Barrier);
        // A link with zero copy copies a segment on ordinary pages once; staging copies it twice.
        let zero_copy = engine.tuned.model.zero_copy_from.is_some_and(|from| segment >= from);
        let wanted = match engine.forced {
            // Two ranks are as fast or faster over their link, except for a broadcast.
            None => shape.ranks > 2 || shape.ranks == 2 && shape.collective == Collective::Broadcast && !zero_copy,
            Some(forced) => forced == Algorithm::Staged && shape.ranks > 1,
        };
        let chunk = symmetric::largest_chunk(&shape, elem, layout.stage_bytes) * elem;
        let staged = wanted && shape.collective != Collective::Barrier && chunk > 0;
        InMemory { two_shot, any: staged.then_some((Algorithm::Staged, chunk)) }
    }
}

impl Comm {
    /// The algorithm that a collective would use, and what the others were estimated to cost. It is local: one rank
    /// alone may ask, also before the first collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank.
    pub fn explain(&self, call: &Call) -> Result<Choice> {
        let inner = &self.inner;
        inner.peer_in_range(call.collective.name(), "root", call.root)?;
        inner.state.origin.check(|| "explain".to_owned(), inner.state.rank)?;
        let mut engine = lock(&inner.engine);
        let mut choice = inner.choice(&engine, call, call.bytes())?;
        let InMemory { two_shot, any } = inner.in_memory(&engine, call);
        if let Some((algorithm, chunk)) = any {
            let shape = inner.shape(call.collective, call.root);
            choice.prefer(algorithm, &shape, call.bytes(), chunk, &engine.tuned.model);
        } else {
            choice.packed = inner.packed_for(&mut engine, call, &choice).is_some();
        }
        choice.symmetric = two_shot.then_some(Algorithm::TwoShot);
        choice.limit = engine
            .tuned
            .described
            .as_ref()
            .and_then(|described| described.limit(&inner.shape(call.collective, call.root), call.bytes()));
        Ok(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_plan::{DType, ReduceOp};
    use tinynccl_sys::Config;

    /// In one thread: rank 1 makes no call.
    #[test]
    fn one_rank_alone_may_ask_and_is_told_what_comes() {
        let comms = Comm::threads(3, Config::default()).unwrap();
        let sum = |count| Call::new(Collective::AllReduce, DType::F64, ReduceOp::Sum, 0, count);
        let asked = |comm: &Comm| {
            [1, 1 << 17].map(|count| {
                let choice = comm.explain(&sum(count)).unwrap();
                (choice.algorithm, choice.symmetric)
            })
        };
        let before = asked(&comms[0]);
        assert_eq!(before, [(Algorithm::OneShot, None), (Algorithm::Staged, Some(Algorithm::TwoShot))]);
        std::thread::scope(|scope| comms.iter().for_each(|comm| drop(scope.spawn(|| comm.barrier().unwrap()))));
        assert_eq!(asked(&comms[0]), before);
    }
}
