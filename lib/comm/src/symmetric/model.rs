//! The shared region under the model checker loom: whole calls as [`run`] makes them, over 2 lines, 1 slot and 2 stages
//! per rank.
//!
//! `transport::explore` runs the scenarios and weakens orderings. Run with `scripts/loom.sh`.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::allocation::{Allocation, Registry};
use super::board::Board;
use super::layout::{DEPTH, LINES, Layout, Line, STAGES};
use super::run::run;
use super::task::Plan;
use super::turn::Outcome;
use super::words::{Announcement, Asleep, Ends, Sleepers};
use crate::executor::{Buffers, Supervisor, WaitPolicy};
use crate::reduce::{Average, Kernels};
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::error::Error;
use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_sys::backoff::Backoff;
use tinynccl_sys::sync::{Step, Words, touches, watch};
use tinynccl_transport::explore::{must_fail, must_hold};
use tinynccl_transport::mapping::Mapping;
use tinynccl_transport::shm::Sequence;

/// Elements that fit into a line, and elements that need a slot.
const SHORT: usize = 1;
const LONG: usize = 4;
/// Elements of a symmetric buffer per rank: a cache line.
const SHARE: usize = 8;
/// Elements that a stage holds: of two ranks, a cache line for each part.
const STAGE: usize = 2 * SHARE;
const ELEM: usize = size_of::<u64>();

/// A rank at a shared region, with a symmetric buffer of one part per rank.
struct Rank {
    board: Board,
    registry: Registry,
    allocation: Arc<Allocation>,
    rank: usize,
    ranks: usize,
    seq: u32,
}

/// Puts a word of the model where the layout has it.
fn put<T>(memory: &Mapping, offset: usize, value: T) {
    assert!(offset + size_of::<T>() <= memory.len() && offset.is_multiple_of(align_of::<T>()));
    // SAFETY: within the mapping and aligned (checked); no other thread has it yet.
    unsafe { memory.base().add(offset).cast().write(value) };
}

fn world(ranks: usize) -> Vec<Rank> {
    let layout = Layout::new(ranks, LONG * ELEM, STAGE * ELEM).unwrap();
    let memory = Arc::new(Mapping::anonymous(layout.bytes()).unwrap());
    let region = ranks * SHARE * ELEM;
    let symmetric = Arc::new(Mapping::anonymous(ranks * region).unwrap());
    put(&memory, 0, Sleepers::default());
    for rank in 0..ranks {
        put(&memory, layout.ends(rank), Ends::default());
        put(&memory, layout.asleep(rank), Asleep::default());
        put(&memory, layout.announced(rank), Announcement::default());
        for call in 0..LINES as u64 {
            let line = Line { number: Sequence::default(), header: Words::new(), inline: Words::new() };
            put(&memory, layout.line(rank, call), line);
        }
        for call in 0..DEPTH as u64 {
            watch(memory.base().as_ptr().wrapping_add(layout.area(rank, call)), LONG * ELEM);
        }
        for call in 0..STAGES as u64 {
            for part in 0..STAGE / SHARE {
                let at = layout.stage(rank, call) + part * SHARE * ELEM;
                watch(memory.base().as_ptr().wrapping_add(at), SHARE * ELEM);
            }
        }
        for share in 0..ranks {
            let at = rank * region + share * SHARE * ELEM;
            watch(symmetric.base().as_ptr().wrapping_add(at), SHARE * ELEM);
        }
    }
    let rank = |rank| {
        let board = Board::new(memory.clone(), layout, rank).unwrap();
        let mut registry = Registry::default();
        let allocation = Arc::new(Allocation::new(symmetric.clone(), registry.next_id(), rank, region));
        registry.add(&allocation);
        Rank { board, registry, allocation, rank, ranks, seq: 0 }
    };
    (0..ranks).map(rank).collect()
}

/// Each rank does the same, in a separate thread.
fn together(ranks: usize, each: impl Fn(&mut Rank) + Copy + Send + 'static) {
    let mut world = world(ranks);
    let mut first = world.remove(0);
    let others: Vec<_> = world
        .into_iter()
        .map(|mut rank| {
            loom::thread::spawn(move || {
                each(&mut rank);
                rank
            })
        })
        .collect();
    each(&mut first);
    // The memory stays until all are done.
    let _ranks: Vec<Rank> = others.into_iter().map(|thread| thread.join().unwrap()).collect();
}

/// Sums of `u64`; the model is notified of what they read and write.
///
/// # Safety
/// As [`crate::reduce::ReduceFn`].
unsafe fn reduce(a: *const u8, b: *const u8, out: *mut u8, n: usize) {
    touches(a, n * ELEM, false);
    touches(b, n * ELEM, false);
    touches(out, n * ELEM, true);
    let (a, b, out) = (a.cast::<u64>(), b.cast::<u64>(), out.cast::<u64>());
    for i in 0..n {
        // SAFETY: by the caller.
        unsafe { out.add(i).write(*a.add(i) + *b.add(i)) };
    }
}

/// # Safety
/// As [`crate::reduce::ReduceDualFn`].
unsafe fn reduce_dual(a: *const u8, b: *const u8, out: *mut u8, copy: *mut u8, n: usize) {
    // SAFETY: by the caller. An output may be an input, so the sum is made once.
    unsafe {
        reduce(a, b, out, n);
        touches(copy, n * ELEM, true);
        std::ptr::copy(out, copy, n * ELEM);
    }
}

/// Nothing goes wrong in these worlds.
struct Calm;

impl Supervisor for Calm {
    fn failure(&self) -> Option<Error> {
        None
    }
    fn has_failed(&self) -> bool {
        false
    }
    fn doorbell(&self) -> RawFd {
        -1
    }
    fn silence(&self) {}
    fn woke_late(&self, _: usize, _: Duration) {}
    fn waiting_on(&self, _: Option<usize>) {}
    fn timed_out(&self, header: &Header, peers: &[usize], _: Duration) -> Error {
        panic!("{header} timed out, waiting for {peers:?}")
    }
    fn explain(&self, _: &Header, error: Error) -> Error {
        error
    }
    fn has_left(&self, _: usize) -> bool {
        false
    }
    fn left(&self, header: &Header, peer: usize) -> Error {
        panic!("{header}: rank {peer} has left")
    }
    fn interrupted(&self, header: &Header) -> Error {
        panic!("{header} was interrupted")
    }
    fn mismatch(&self, peer: usize, ours: Header, theirs: Header) -> Error {
        panic!("rank {peer} makes {theirs}, expected {ours}")
    }
}

/// The step of a rank that cannot advance.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wait {
    Yield,
    Sleep,
}

impl Rank {
    /// Element `i` of `rank`'s input to our current call.
    fn element(&self, rank: usize, i: usize) -> u64 {
        u64::from(self.seq) * 1000 + rank as u64 * 100 + i as u64
    }

    fn call(&mut self, collective: Collective, algorithm: Algorithm, count: usize, wait: Wait, buffers: Buffers) {
        let header = Header {
            count: count as u64,
            seq: self.seq,
            collective: collective as u8,
            algorithm: algorithm as u8,
            ..Header::default()
        };
        let plan = Plan {
            shape: Shape { collective, ranks: self.ranks, root: 0, channels: 1 },
            count,
            elem: ELEM,
            kernels: Kernels { reduce, reduce_dual, scale: None, scaled_sum: None, divide: None },
            average: Average::default(),
            exact: None,
            header,
        };
        // The same on all ranks, so no rank ever sees a mismatch, whatever it reads and when.
        self.board.made(u64::from(self.seq) << 32 | u64::from(!self.seq));
        let yields = if wait == Wait::Sleep { Duration::ZERO } else { Duration::MAX };
        let policy =
            WaitPolicy { turns: 1, backoff: Backoff { spin: Duration::ZERO, yields }, deadline: Duration::MAX };
        // SAFETY: the callers' buffers hold `count` elements, and only the call uses them.
        let outcome =
            unsafe { run(&mut self.board, &self.registry, &plan, header, buffers, &Calm, &policy, None) }.unwrap();
        assert_eq!(outcome, Outcome::Done);
    }

    /// Sums over the ranks, through the slots.
    fn all_reduce(&mut self, count: usize, wait: Wait) {
        self.all_reduce_by(Algorithm::OneShot, count, wait);
    }

    /// Sums over the ranks by `algorithm`.
    fn all_reduce_by(&mut self, algorithm: Algorithm, count: usize, wait: Wait) {
        self.seq += 1;
        let input: Vec<u64> = (0..count).map(|i| self.element(self.rank, i)).collect();
        let mut output = vec![0; count];
        let buffers = Buffers { input: input.as_ptr().cast(), output: output.as_mut_ptr().cast() };
        self.call(Collective::AllReduce, algorithm, count, wait, buffers);
        let expected: Vec<u64> = (0..count).map(|i| (0..self.ranks).map(|r| self.element(r, i)).sum()).collect();
        assert_eq!(output, expected, "all_reduce {}", self.seq);
    }

    /// From rank 0, through the slots.
    fn broadcast(&mut self, count: usize, wait: Wait) {
        self.broadcast_by(Algorithm::OneShot, count, wait);
    }

    /// Sends from rank 0 by `algorithm`.
    fn broadcast_by(&mut self, algorithm: Algorithm, count: usize, wait: Wait) {
        self.seq += 1;
        let mine = |i| if self.rank == 0 { self.element(0, i) } else { 0 };
        let mut buffer: Vec<u64> = (0..count).map(mine).collect();
        let buffers = Buffers { input: buffer.as_ptr().cast(), output: buffer.as_mut_ptr().cast() };
        self.call(Collective::Broadcast, algorithm, count, wait, buffers);
        let expected: Vec<u64> = (0..count).map(|i| self.element(0, i)).collect();
        assert_eq!(buffer, expected, "broadcast {}", self.seq);
    }

    /// Sums over the ranks, in place in symmetric memory.
    fn two_shot(&mut self, wait: Wait) {
        self.seq += 1;
        let (base, count) = (self.allocation.base(self.rank), self.ranks * SHARE);
        touches(base, count * ELEM, true);
        for i in 0..count {
            // SAFETY: the region has `count` elements, which are ours between calls; that is what is being checked.
            unsafe { base.cast::<u64>().add(i).write(self.element(self.rank, i)) };
        }
        let buffers = Buffers { input: base.cast_const(), output: base };
        self.call(Collective::AllReduce, Algorithm::TwoShot, count, wait, buffers);
        touches(base, count * ELEM, false);
        for i in 0..count {
            let expected: u64 = (0..self.ranks).map(|r| self.element(r, i)).sum();
            // SAFETY: as above.
            assert_eq!(unsafe { base.cast::<u64>().add(i).read() }, expected, "two-shot {}, element {i}", self.seq);
        }
    }
}

/// The job of acquire and release for lines, without any help of a fence.
const LINE: [&[Step]; 2] = [&[Step::WakerFence, Step::Publish], &[Step::WakerFence, Step::SeePublished]];
/// And for the ends of calls.
const END: [&[Step]; 2] = [&[Step::WakerFence, Step::Finish], &[Step::WakerFence, Step::SeeFinished]];

/// A line's words are read after they are published, and written again when all ranks have arrived at the next call: no
/// rank's end of a call is read then.
#[test]
fn lines_arrive_whole_and_are_reused_by_arrival() {
    let scenario = || together(2, |rank| (0..LINES + 1).for_each(|_| rank.all_reduce(SHORT, Wait::Yield)));
    must_hold("short all_reduces", Some(3), &[Step::WakerFence, Step::Finish, Step::SeeFinished], scenario);
    LINE.into_iter().for_each(|steps| must_fail("short all_reduces", Some(3), steps, scenario));
}

/// A root that receives nothing writes a line again when the others have finished the call that used it.
#[test]
fn lines_are_reused_by_credit() {
    let scenario = || together(2, |rank| (0..LINES + 1).for_each(|_| rank.broadcast(SHORT, Wait::Yield)));
    must_hold("short broadcasts", None, &[Step::WakerFence], scenario);
    LINE.into_iter().chain(END).for_each(|steps| must_fail("short broadcasts", None, steps, scenario));
}

/// A slot is read after its line is published, and written again when all ranks have finished its call.
#[test]
fn areas_are_reused_by_credit() {
    let scenario = || together(2, |rank| (0..DEPTH + 1).for_each(|_| rank.all_reduce(LONG, Wait::Yield)));
    must_hold("long all_reduces", Some(3), &[Step::WakerFence], scenario);
    LINE.into_iter().chain(END).for_each(|steps| must_fail("long all_reduces", Some(3), steps, scenario));
}

/// Calls of all kinds in sequence: a rank's knowledge of the others from one kind holds for the next.
#[test]
fn kinds_of_calls_mix() {
    must_hold("mixed calls", Some(3), &[Step::WakerFence], || {
        together(2, |rank| {
            rank.broadcast(LONG, Wait::Yield);
            rank.all_reduce(SHORT, Wait::Yield);
            rank.two_shot(Wait::Yield);
            rank.all_reduce(LONG, Wait::Yield);
        });
    });
}

/// No rank reads or writes a buffer before its owner has arrived, or after its owner has departed.
#[test]
fn symmetric_buffers_belong_to_the_call() {
    let scenario = || together(2, |rank| (0..2).for_each(|_| rank.two_shot(Wait::Yield)));
    must_hold("two-shot", Some(3), &[Step::WakerFence], scenario);
    LINE.into_iter().chain(END).for_each(|steps| must_fail("two-shot", Some(3), steps, scenario));
}

/// Chunks through stages, more of them than there are stages: each is read before it is written again.
#[test]
fn stages_are_reused_by_credit() {
    let scenario = || together(2, |rank| rank.broadcast_by(Algorithm::Staged, (STAGES + 1) * STAGE, Wait::Yield));
    must_hold("staged broadcast", Some(3), &[Step::WakerFence], scenario);
    LINE.into_iter().chain(END).for_each(|steps| must_fail("staged broadcast", Some(3), steps, scenario));
}

/// A stage is reused by credit also where each step passes on the data that the step before has reduced.
#[test]
fn reduced_parts_follow_the_chunks() {
    let scenario = || together(2, |rank| rank.all_reduce_by(Algorithm::Staged, (STAGES + 1) * STAGE, Wait::Yield));
    must_hold("staged all_reduce", Some(2), &[Step::WakerFence], scenario);
    LINE.into_iter().chain(END).for_each(|steps| must_fail("staged all_reduce", Some(2), steps, scenario));
    needs_both_fences("staged all_reduce", Some(1), || {
        together(2, |rank| rank.all_reduce_by(Algorithm::Staged, STAGE, Wait::Sleep));
    });
}

/// The scenario holds with the fences, and loses a wake-up without one of them.
fn needs_both_fences(name: &str, preemptions: Option<usize>, scenario: impl Fn() + Sync + Send + Copy + 'static) {
    must_hold(name, preemptions, &[], scenario);
    must_fail(name, preemptions, &[Step::WakerFence], scenario);
    must_fail(name, preemptions, &[Step::SleeperFence], scenario);
    // The words that ask to be woken need not order anything by themselves: the fences do.
    must_hold(name, preemptions, &[Step::Wake], scenario);
}

/// A rank that sleeps until the other arrives is woken.
#[test]
fn a_sleeper_is_woken_by_an_arrival() {
    needs_both_fences("arrival", Some(3), || together(2, |rank| rank.all_reduce(SHORT, Wait::Sleep)));
}

/// A root that sleeps until its line is free is woken by the end of the call that used it, whatever else it sees.
#[test]
fn a_sleeper_is_woken_by_credit() {
    needs_both_fences("credit of a line", Some(2), || {
        together(2, |rank| (0..LINES + 1).for_each(|_| rank.broadcast(SHORT, Wait::Sleep)));
    });
    needs_both_fences("credit of an area", Some(2), || {
        together(2, |rank| (0..DEPTH + 1).for_each(|_| rank.all_reduce(LONG, Wait::Sleep)));
    });
}

/// A rank that sleeps until the other has finished the call, after both have arrived.
#[test]
fn a_sleeper_is_woken_by_an_end() {
    needs_both_fences("end of two-shot", Some(3), || together(2, |rank| rank.two_shot(Wait::Sleep)));
}

/// Three ranks, two of which may sleep for different reasons when the third writes.
#[test]
fn several_sleepers_are_woken() {
    needs_both_fences("three ranks, one-shot", Some(1), || together(3, |rank| rank.all_reduce(SHORT, Wait::Sleep)));
    must_hold("three ranks, two-shot", Some(1), &[], || together(3, |rank| rank.two_shot(Wait::Sleep)));
}

/// An announcement is read whole or not at all, and the latest that is known.
#[test]
fn announcements_are_read_whole() {
    let scenario = || {
        let mut world = world(2);
        let (reader, writer) = (world.remove(0), world.remove(0));
        let thread = loom::thread::spawn(move || {
            for seq in 1..3 {
                writer.board.announce(&Header {
                    seq,
                    count: u64::from(seq),
                    root: seq,
                    check: seq,
                    ..Header::default()
                });
            }
            writer
        });
        let mut last = 0;
        for _ in 0..2 {
            if let Some(Header { seq, count, root, check, .. }) = reader.board.announcement(1) {
                assert!(u64::from(seq) == count && seq == root && seq == check, "torn: {seq} {count} {root} {check}");
                assert!((last..3).contains(&seq), "{seq} after {last}");
                last = seq;
            }
        }
        thread.join().unwrap();
        assert_eq!(reader.board.announcement(1).map(|h| h.seq), Some(2));
    };
    must_hold("announcements", Some(2), &[], scenario);
    for steps in [&[Step::Announcing][..], &[Step::Announce], &[Step::SeeAnnounced], &[Step::LookTwice]] {
        must_fail("announcements", Some(2), steps, scenario);
    }
}

/// A rank that waits for one which has arrived at the call and announced its next one over links is not misled.
#[test]
fn an_announcement_of_a_later_call_is_no_mismatch() {
    must_hold("later announcement", Some(3), &[], || {
        together(2, |rank| {
            rank.all_reduce(SHORT, Wait::Sleep);
            if rank.rank == 1 {
                rank.board.announce(&Header { seq: rank.seq + 1, ..Header::default() });
            }
        });
    });
}
