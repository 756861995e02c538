//! The shared region: memory that all ranks of a host map. Opens it, and runs calls in it.

use std::sync::{Arc, Weak};

use crate::executor::{Buffers, Workspace};
use crate::reduce::Combination;
use crate::symmetric::{self, Alarm, Board, Layout, Outcome, Plan, Registry};
use crate::trace::{self, Recorder};
use crate::verify::Chosen;
use crate::{Attached, Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_transport::bootstrap::Digests;

/// Ends the sleep of a call in the shared region when the communicator fails.
impl Attached for Alarm {
    fn failed(&self, _error: &Error) {
        self.ring();
    }
}

/// A communicator's shared region.
#[derive(Debug, Default)]
pub(crate) enum BoardState {
    /// Opened with the first collective.
    #[default]
    Unopened,
    /// Ranks on several hosts, or turned off, or refused by the system.
    Unavailable,
    Open(Box<Board>),
}

impl BoardState {
    /// A collective begins, in the shared region or over links.
    #[inline]
    pub(crate) fn made(&mut self, digests: &Digests) {
        if let BoardState::Open(board) = self {
            board.made(digests.stamp);
        }
    }

    /// Announces our call over links to ranks that wait at the shared region. Point-to-point messages are not
    /// announced.
    #[inline]
    pub(super) fn announce(&self, header: &Header) {
        if let BoardState::Open(board) = self
            && header.collective != Collective::SendRecv as u8
        {
            board.announce(header);
        }
    }
}

impl Inner {
    /// Opens the shared region on the first collective call, which every rank makes.
    #[inline]
    pub(crate) fn open_board(&self, engine: &mut Engine) -> Result<()> {
        if matches!(engine.board, BoardState::Unopened) { self.open_board_now(engine) } else { Ok(()) }
    }

    #[cold]
    fn open_board_now(&self, engine: &mut Engine) -> Result<()> {
        let state = &self.state;
        engine.board = BoardState::Unavailable;
        if let Some(layout) = self.board_layout()? {
            let key = state.key("shared-region");
            let memory = state.share(&key, layout.bytes()).map_err(|error| state.not_all_came(error))?;
            if let Some(memory) = memory {
                let mut board = Board::new(memory, layout, state.rank)?;
                let alarm = Arc::new(Alarm::new(&board));
                let weak: Weak<Alarm> = Arc::downgrade(&alarm);
                state.attach(weak);
                engine.alarm = Some(alarm);
                if let Some(chosen) = Chosen::of(&state.config) {
                    board.check(chosen);
                }
                engine.board = BoardState::Open(Box::new(board));
            }
        }
        Ok(())
    }

    /// The shared region's layout, where there is to be one.
    pub(super) fn board_layout(&self) -> Result<Option<Layout>> {
        let config = &self.state.config;
        let wanted = self.shares_memory() && config.one_shot > 0;
        wanted.then(|| Layout::new(self.size(), config.one_shot, config.stage)).transpose()
    }

    /// All ranks map each other's memory.
    pub(super) fn shares_memory(&self) -> bool {
        let state = &self.state;
        self.size() > 1 && state.members.iter().all(|&m| state.control.shares_memory(m))
    }

    /// A call in the shared region by this algorithm.
    pub(super) fn board_plan(&self, call: &Call, algorithm: Algorithm) -> Plan {
        let Combination { kernels, average, exact } =
            Combination::new(call.dtype, call.op, self.size(), self.sums_exactly(call));
        Plan {
            shape: self.shape(call.collective, call.root),
            count: call.count,
            elem: call.dtype.size(),
            kernels,
            average,
            exact,
            header: call.header(self.state.id, algorithm),
        }
    }

    /// Runs a call in the shared region.
    ///
    /// # Safety
    /// As [`symmetric::run`].
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "parts of the engine, borrowed apart")]
    pub(super) unsafe fn run_on_board(
        &self,
        board: &mut Board,
        registry: &Registry,
        plan: &Plan,
        header: Header,
        buffers: Buffers,
        background: bool,
        workspace: &mut Workspace,
    ) -> Result<Outcome> {
        let policy = self.board_wait_policy(background);
        let mut recorder = workspace.recorder.as_deref_mut();
        if let Some(recorder) = &mut recorder {
            recorder.run_begins(0);
        }
        let probe = recorder.as_deref_mut();
        // SAFETY: forwarded from the caller.
        let outcome = unsafe { symmetric::run(board, registry, plan, header, buffers, &*self.state, &policy, probe) };
        if let Some(recorder) = recorder {
            record(recorder, plan, &header, &outcome);
        }
        outcome
    }
}

/// The end of a call in the shared region, for the trace. A call whose buffers are not symmetric continues over links.
#[cold]
fn record(recorder: &mut Recorder, plan: &Plan, header: &Header, outcome: &Result<Outcome>) {
    let call = trace::Call {
        count: header.count,
        seq: header.seq,
        root: header.root,
        windows: 1,
        message: u32::try_from(plan.count.saturating_mul(plan.elem)).unwrap_or(u32::MAX),
        collective: header.collective,
        dtype: header.dtype,
        op: header.op,
        algorithm: header.algorithm,
    };
    match outcome {
        Ok(Outcome::NotSymmetric) => recorder.run_continues(),
        Ok(Outcome::Done) => recorder.run_ends([(call, 0)].into_iter()),
        Err(error) => {
            recorder.run_ends([(call, 0)].into_iter());
            recorder.flush(Some(&error.to_string()));
        }
    }
}
