//! Which calls go through memory that all ranks map, and how that is opened.

use super::prepare::recent;
use super::{Engine, Inner};
use crate::algorithm::Shape;
use crate::bootstrap::Digests;
use crate::error::Result;
use crate::executor::{Buffers, CallKey, Workspace};
use crate::reduce;
use crate::symmetric::{self, Board, Job, Layout, Outcome, Registry};
use crate::trace::{self, Recorder};
use crate::wire::{Algorithm, Collective, Header};

/// Jobs kept per communicator; the least recently used one goes first.
const JOBS: usize = 64;

/// A communicator's board.
#[derive(Debug, Default)]
pub(super) enum BoardState {
    /// Opened with the first collective.
    #[default]
    Unopened,
    /// Ranks on several hosts, or turned off, or refused by the system.
    Unavailable,
    Open(Box<Board>),
}

impl BoardState {
    /// A collective begins, at the board or over links.
    #[inline]
    pub(super) fn made(&mut self, digests: &Digests) {
        if let BoardState::Open(board) = self {
            board.made(digests.stamp);
        }
    }

    /// Tells ranks that wait at the board which call we make over links. Messages point to point are nobody's business.
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
    /// Opens the board on the first collective call; every rank makes that one.
    #[inline]
    pub(super) fn open_board(&self, engine: &mut Engine) -> Result<()> {
        if matches!(engine.board, BoardState::Unopened) { self.open_board_now(engine) } else { Ok(()) }
    }

    #[cold]
    fn open_board_now(&self, engine: &mut Engine) -> Result<()> {
        let state = &self.state;
        engine.board = BoardState::Unavailable;
        if self.shares_memory() && state.config.one_shot > 0 {
            let layout = Layout::new(self.size(), state.config.one_shot, state.config.stage)?;
            let key = state.key("board");
            let memory =
                state.control.share(&key, &state.members, layout.bytes()).map_err(|error| state.not_all_came(error))?;
            if let Some(memory) = memory {
                let mut board = Board::new(memory, layout, state.rank)?;
                if state.config.checksum {
                    board.check();
                }
                engine.board = BoardState::Open(Box::new(board));
            }
        }
        Ok(())
    }

    /// All ranks map each other's memory.
    pub(super) fn shares_memory(&self) -> bool {
        let state = &self.state;
        self.size() > 1 && state.members.iter().all(|&m| state.control.shares_memory(m))
    }

    /// Place of the job of a call that goes through the slots; `None` when it does not.
    #[inline]
    pub(super) fn find_job(
        &self,
        slot_bytes: usize,
        forced: Option<Algorithm>,
        jobs: &mut Vec<(CallKey, Job)>,
        key: &CallKey,
    ) -> Option<usize> {
        // What is there has been let in before.
        if let Some(place) = recent(jobs, key) {
            return Some(place);
        }
        let segment = key.count.saturating_mul(key.dtype.size());
        let fits = fits_slots(slot_bytes, forced, &self.shape(key.collective, key.root), segment);
        fits.then(|| {
            jobs.truncate(JOBS - 1);
            jobs.insert(0, (*key, self.job(key, Algorithm::OneShot)));
            0
        })
    }

    /// Whether a collective with segments of `bytes` bytes goes through the slots.
    pub(super) fn takes_one_shot(&self, engine: &Engine, shape: &Shape, bytes: usize) -> bool {
        let BoardState::Open(board) = &engine.board else { return false };
        fits_slots(board.slot_bytes(), engine.forced, shape, bytes)
    }

    /// The job of a call that finds out whether all its buffers are symmetric.
    pub(super) fn symmetric(&self, registry: &Registry, forced: Option<Algorithm>, key: &CallKey) -> Option<Job> {
        // Nothing passes that could be checked where ranks use each other's buffers.
        let may = matches!(forced, None | Some(Algorithm::TwoShot))
            && !self.state.config.checksum
            && registry.in_use()
            && !matches!(key.collective, Collective::Scatter | Collective::Barrier | Collective::SendRecv);
        may.then(|| self.job(key, Algorithm::TwoShot))
    }

    /// The job of a call whose buffers pass through the board in chunks.
    pub(super) fn staged(
        &self,
        stage_bytes: usize,
        forced: Option<Algorithm>,
        key: &CallKey,
        lend_from: Option<usize>,
    ) -> Option<Job> {
        let (shape, elem) = (self.shape(key.collective, key.root), key.dtype.size());
        let lent = is_lent(lend_from, key.count.saturating_mul(elem));
        takes_stages(stage_bytes, forced, &shape, elem, lent).then(|| self.job(key, Algorithm::Staged))
    }

    /// Bytes of a segment that pass at once, if a collective that is too large for the slots goes through the board in chunks.
    pub(super) fn takes_stages(&self, engine: &Engine, shape: &Shape, segment: usize) -> Option<usize> {
        let BoardState::Open(board) = &engine.board else { return None };
        let bytes = board.stage_bytes();
        let lent = is_lent(engine.tuned.model.lend_from, segment);
        takes_stages(bytes, engine.forced, shape, 1, lent).then(|| symmetric::largest_chunk(shape, 1, bytes))
    }

    fn job(&self, key: &CallKey, algorithm: Algorithm) -> Job {
        Job {
            shape: self.shape(key.collective, key.root),
            count: key.count,
            elem: key.dtype.size(),
            kernels: reduce::kernels(key.dtype, key.op.unwrap_or(crate::ReduceOp::Sum)),
            divisor: if key.op == Some(crate::ReduceOp::Avg) { self.size() } else { 1 },
            header: key.header(self.state.id, algorithm),
        }
    }

    /// Runs a call at the board.
    ///
    /// # Safety
    /// As [`symmetric::run`].
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "parts of the engine, borrowed apart")]
    pub(super) unsafe fn run_on_board(
        &self,
        board: &mut Board,
        registry: &Registry,
        job: &Job,
        header: Header,
        buffers: Buffers,
        background: bool,
        workspace: &mut Workspace,
    ) -> Result<Outcome> {
        let patience = self.board_patience(background);
        let mut recorder = workspace.recorder.as_deref_mut();
        if let Some(recorder) = &mut recorder {
            recorder.run_begins(0);
        }
        let probe = recorder.as_deref_mut();
        // SAFETY: forwarded from the caller.
        let outcome = unsafe { symmetric::run(board, registry, job, header, buffers, &*self.state, &patience, probe) };
        if let Some(recorder) = recorder {
            record(recorder, job, &header, &outcome);
        }
        outcome
    }
}

/// The rule of one-shot: taken wherever it fits, unless another algorithm is asked for.
fn fits_slots(slot_bytes: usize, forced: Option<Algorithm>, shape: &Shape, bytes: usize) -> bool {
    matches!(forced, None | Some(Algorithm::OneShot))
        && shape.collective != Collective::SendRecv
        && symmetric::slot_bytes(shape, bytes) <= slot_bytes
}

/// Whether a link would lend a segment on ordinary pages: then one copy beats the two through the board.
fn is_lent(lend_from: Option<usize>, segment: usize) -> bool {
    lend_from.is_some_and(|from| segment >= from)
}

/// The rule of staged: large calls of more than two ranks, unless another algorithm is asked for. Two ranks do as well or better
/// over their link, but for a broadcast.
fn takes_stages(stage_bytes: usize, forced: Option<Algorithm>, shape: &Shape, elem: usize, lent: bool) -> bool {
    let wanted = match forced {
        None => shape.ranks > 2 || shape.ranks == 2 && shape.collective == Collective::Broadcast && !lent,
        Some(forced) => forced == Algorithm::Staged && shape.ranks > 1,
    };
    wanted
        && !matches!(shape.collective, Collective::SendRecv | Collective::Barrier)
        && symmetric::largest_chunk(shape, elem, stage_bytes) > 0
}

/// The end of a call at the board, for the trace. A call whose buffers are not symmetric goes on over links.
#[cold]
fn record(recorder: &mut Recorder, job: &Job, header: &Header, outcome: &Result<Outcome>) {
    let call = trace::Call {
        count: header.count,
        seq: header.seq,
        root: header.root,
        windows: 1,
        message: u32::try_from(job.count.saturating_mul(job.elem)).unwrap_or(u32::MAX),
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
