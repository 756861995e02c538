//! A call from start to end: its steps, and the waits between them.

use std::time::Instant;

use super::allocation::Registry;
use super::board::Board;
use super::one_shot::OneShot;
use super::staged::Staged;
use super::task::{Plan, Task};
use super::turn::{Differs, Outcome, Turn, Wait};
use super::two_shot::TwoShot;
use crate::executor::{Buffers, Supervisor, WaitPolicy, Waiter};
use crate::trace::Recorder;
use crate::verify::op;
use tinynccl_plan::error::{Error, Result, Suspect};
use tinynccl_plan::wire::{Algorithm, Header};
use tinynccl_sys::backoff::Phase;

enum Steps {
    OneShot(OneShot),
    TwoShot(TwoShot),
    Staged(Staged),
}

/// Runs one call to its end.
///
/// # Safety
/// As [`crate::executor::run`]: `buffers` must be readable and writable as the plan's shape and count say, and nothing
/// else may touch that memory until this returns.
#[expect(clippy::too_many_arguments, reason = "a call, and what it runs on")]
pub(crate) unsafe fn run(
    board: &mut Board,
    registry: &Registry,
    plan: &Plan,
    header: Header,
    buffers: Buffers,
    supervisor: &dyn Supervisor,
    policy: &WaitPolicy,
    mut recorder: Option<&mut Recorder>,
) -> Result<Outcome> {
    let mut task = Task { plan, header, buffers, number: 0 };
    let mut steps = match header.algorithm {
        code if code == Algorithm::Staged as u8 => Steps::Staged(Staged::new(board, plan)),
        code => {
            task.number = board.start(1);
            match code == Algorithm::TwoShot as u8 {
                true => Steps::TwoShot(TwoShot::new(registry, &task, board.rank())),
                false => Steps::OneShot(OneShot::default()),
            }
        }
    };
    let mut waiter = Waiter::new(supervisor, policy);
    let mut last = None;
    loop {
        // SAFETY: forwarded from the caller.
        let turn = unsafe {
            match &mut steps {
                Steps::OneShot(steps) => steps.advance(board, &task),
                Steps::TwoShot(steps) => steps.advance(board, &task),
                Steps::Staged(steps) => steps.advance(board, &mut task),
            }
        };
        match turn {
            Turn::Ended(outcome) => {
                waiter.reset();
                return Ok(outcome);
            }
            Turn::Mismatch(peer, theirs) => return Err(supervisor.mismatch(peer, header, theirs)),
            Turn::Corrupt(peer, differs) => {
                let error = corrupt(&header, board.rank(), peer, differs);
                return Err(supervisor.explain(&header, error));
            }
            Turn::Stray(peer) => return Err(stray(supervisor, &header, peer)),
            Turn::Blocked(peer, what) => {
                if last.replace((peer, what)) != Some((peer, what)) {
                    waiter.reset();
                    if let Some(recorder) = &mut recorder {
                        recorder.awaits(peer, matches!(what, Wait::Arrival(_)));
                    }
                }
                wait(&mut waiter, board, &task, supervisor, (peer, what))?;
            }
        }
    }
}

/// The error for data of `peer` that is not what it published.
#[cold]
fn corrupt(header: &Header, rank: usize, peer: usize, differs: Differs) -> Error {
    let path = "memory that all ranks map".to_owned();
    let suspect = match rank == peer {
        true => Suspect::Memory { rank },
        false => Suspect::Link { from: peer, to: rank, path },
    };
    Error::Corrupt {
        op: op(header),
        rank,
        suspect: Box::new(suspect),
        buffer: format!("input of rank {peer}"),
        offset: differs.offset as u64,
        bytes: differs.bytes as u64,
        expected: differs.expected,
        got: differs.got,
    }
}

/// Waits for one iteration until `peer` has come so far: returns soon, or fails.
#[inline]
fn wait(
    waiter: &mut Waiter<'_>,
    board: &Board,
    task: &Task<'_>,
    supervisor: &dyn Supervisor,
    (peer, what): (usize, Wait),
) -> Result<()> {
    if waiter.is_due() { wait_slowly(waiter, board, task, supervisor, (peer, what)) } else { Ok(()) }
}

#[cold]
fn wait_slowly(
    waiter: &mut Waiter<'_>,
    board: &Board,
    task: &Task<'_>,
    supervisor: &dyn Supervisor,
    (peer, what): (usize, Wait),
) -> Result<()> {
    supervisor.alive()?;
    let (phase, waited) = waiter.pause();
    if phase != Phase::Sleep {
        return Ok(());
    }
    if let Some(other) = board.stray() {
        return Err(stray(supervisor, &task.header, other));
    }
    waiter.announce(Some(peer), waited)?;
    if let Some((other, theirs)) = elsewhere(board, task) {
        return Err(supervisor.mismatch(other, task.header, theirs));
    }
    // First whether it has left, then whether it arrived before that.
    if supervisor.has_left(peer) && !board.has(peer, what) {
        return Err(supervisor.left(&task.header, peer));
    }
    let slice = waiter.slice(&task.header, &[peer], waited)?;
    let since = Instant::now();
    let alone = board.sleep(slice, || board.has(peer, what) || supervisor.has_failed());
    // An interrupted sleep ends early; the waker of a message found then may still be under way.
    let slept = since.elapsed();
    if alone && slept >= slice && board.has(peer, what) {
        supervisor.woke_late(peer, slept);
    }
    Ok(())
}

/// The error for a rank that has made other calls than we have; its digest does not show which.
fn stray(supervisor: &dyn Supervisor, header: &Header, peer: usize) -> Error {
    supervisor.mismatch(peer, *header, Header { check: !header.check, ..*header })
}

/// A rank that has not arrived at this call but has announced one over links with the same or a later number.
fn elsewhere(board: &Board, task: &Task<'_>) -> Option<(usize, Header)> {
    (0..board.ranks()).filter(|&r| r != board.rank()).find_map(|rank| {
        // First its announcement, then its arrival: in the other order it could do both in between.
        let theirs = board.announcement(rank)?;
        let later = theirs.seq.wrapping_sub(task.header.seq) < u32::MAX / 2;
        let is_here = board.has_arrived(rank, task.number) || board.has_finished(rank, task.number);
        (later && !is_here).then_some((rank, theirs))
    })
}
