//! One call from start to end: numbered and compared with the other ranks', then run in the shared region or over
//! links.

use super::board::BoardState;
use super::message;
use super::raw_call::RawCall;
use crate::executor::{self, Buffers, Task};
use crate::symmetric::Outcome;
use crate::trace::{Span, now};
use crate::{Comm, Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_sys::threads::lock;

/// A call's place among the others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    /// Its number among the calls of its kind.
    pub(super) seq: u32,
    /// Digest of the collectives before it; 0 for a message.
    pub(super) before: u32,
}

impl Turn {
    /// The header of this call's messages, made from the template of its key.
    #[inline]
    pub(super) fn of(self, header: &Header) -> Header {
        Header { seq: self.seq, check: self.before, ..*header }
    }
}

impl Inner {
    /// Runs a checked call after everything that was queued before it.
    pub(crate) fn run(&self, call: Result<RawCall>) -> Result<()> {
        let call = call?;
        self.drain();
        // SAFETY: the constructors in `call` and `uneven` checked the lengths against the call, from slices which the
        // caller of this function still holds borrowed.
        unsafe { self.execute(&call, false) }
    }

    /// Runs a checked call.
    ///
    /// # Safety
    /// The memory which the call was made from must be valid, and untouched by others, until this returns.
    pub unsafe fn execute(&self, call: &RawCall, background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe {
            match &call.ranges {
                None => self.collective(&call.call, call.buffers, background),
                Some(_) => self.batch(call.collective.name(), std::slice::from_ref(call), background),
            }
        }
    }

    /// Waits for the asynchronous calls made so far.
    #[inline]
    pub fn drain(&self) {
        if !self.queue.is_drained() {
            self.drain_slowly();
        }
    }

    #[cold]
    fn drain_slowly(&self) {
        let begin = now();
        self.queue.drain();
        if let Some(trace) = &self.state.trace {
            trace.span(begin, Span::Drain);
        }
    }

    /// Runs one collective, or one message, in the caller's thread.
    ///
    /// # Safety
    /// As [`executor::run`]: `buffers` must be as large as the collective and `call.count` say.
    pub unsafe fn collective(&self, call: &Call, buffers: Buffers, background: bool) -> Result<()> {
        self.state.check(|| call.collective.to_string())?;
        let mut engine = lock(&self.engine);
        let seq = engine.next_seq(call, self.state.rank);
        if call.collective == Collective::SendRecv {
            self.state.progress.message(&message::recorded(call, self.state.rank, seq));
            let (place, turn) = (self.route(&mut engine, call), Turn { seq, before: 0 });
            // SAFETY: forwarded from the caller.
            unsafe { self.over_links(&mut engine, place, turn, buffers, background) }?;
        } else {
            let header = Header { seq, ..call.header(self.state.id, Algorithm::OneShot) };
            let digests = self.state.progress.start(&header);
            self.open_board(&mut engine)?;
            engine.board.made(&digests);
            let turn = Turn { seq, before: digests.before };
            // SAFETY: forwarded from the caller.
            unsafe {
                if engine.links.verifies(&header) {
                    self.carry_out_verified(&mut engine, call, turn, buffers, background)?;
                } else {
                    self.carry_out(&mut engine, call, turn, buffers, background)?;
                }
            }
        }
        self.state.progress.done(u64::from(engine.seq));
        Ok(())
    }

    /// # Safety
    /// As [`Inner::collective`].
    // Its three callers would share one copy; the one of every call is to have its own.
    #[inline(always)]
    pub(super) unsafe fn carry_out(
        &self,
        engine: &mut Engine,
        call: &Call,
        turn: Turn,
        buffers: Buffers,
        background: bool,
    ) -> Result<()> {
        let place = self.route(engine, call);
        let Engine { board, routes, registry, workspace, .. } = &mut *engine;
        if let BoardState::Open(board) = board {
            for plan in routes[place].1.in_memory(registry) {
                let header = turn.of(&plan.header);
                // SAFETY: forwarded from the caller.
                let outcome =
                    unsafe { self.run_on_board(board, registry, plan, header, buffers, background, workspace) }?;
                if outcome == Outcome::Done {
                    return Ok(());
                }
            }
        }
        // SAFETY: forwarded from the caller.
        unsafe { self.over_links(engine, place, turn, buffers, background) }
    }

    /// Runs the call of a route over links.
    ///
    /// # Safety
    /// As [`Inner::collective`].
    #[inline]
    pub(super) unsafe fn over_links(
        &self,
        engine: &mut Engine,
        place: usize,
        turn: Turn,
        buffers: Buffers,
        background: bool,
    ) -> Result<()> {
        self.prepare(engine, place)?;
        let Engine { links, workspace, routes, board, .. } = engine;
        let plan = routes[place].1.plan()?;
        let header = turn.of(&plan.header);
        board.announce(&header);
        let task = Task { plan, buffers, header };
        // SAFETY: forwarded from the caller.
        unsafe {
            if header.collective == Collective::SendRecv as u8
                && workspace.recorder.is_none()
                && executor::one_message(&task, links, self.quick_turns(background))
            {
                return Ok(());
            }
            executor::run(&[task], links, workspace, &*self.state, &self.wait_policy(background))
        }
    }
}

impl Comm {
    /// A collective that another component runs for the same ranks (on their devices) counts as ours and is compared
    /// alike.
    pub fn note(&self, call: &Call) {
        let Inner { state, engine, .. } = &*self.inner;
        let mut engine = lock(engine);
        let seq = engine.next_seq(call, state.rank);
        let digests = state.progress.start(&Header { seq, ..call.header(state.id, Algorithm::Direct) });
        engine.board.made(&digests);
        state.progress.done(u64::from(seq));
    }
}
