//! One rank's view of the shared region: publish, see which ranks have arrived, finish.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::checks::{Checks, Payload};
use super::layout::{DEPTH, LINES, Layout, Line, STAGES};
use super::turn::{Message, Turn, Wait};
use super::words::{Announcement, Asleep, Ends, Sleepers};
use crate::verify::Chosen;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::{Algorithm, Header};
use tinynccl_transport::fence;
use tinynccl_transport::mapping::Mapping;
use tinynccl_transport::shm::to_words;

/// A rank's view of the shared region.
#[derive(Debug)]
pub(crate) struct Board {
    memory: Arc<Mapping>,
    layout: Layout,
    rank: usize,
    /// Calls started.
    call: u64,
    /// Last call that all ranks are known to have finished.
    everyone_finished: u64,
    /// Stamps of our last collectives, by number.
    stamps: [u64; STAMPS],
    /// Set if some calls are verified.
    checks: Option<Checks>,
}

/// Calls whose stamps are compared: the largest distance of ranks that check for credit.
const STAMPS: usize = 2 * LINES;

impl Board {
    /// `memory` has the layout's size and was zero when the first rank mapped it.
    pub(crate) fn new(memory: Arc<Mapping>, layout: Layout, rank: usize) -> Result<Board> {
        if memory.len() < layout.bytes() || rank >= layout.ranks {
            let detail = format!("expected {} bytes, got {}; rank {rank}", layout.bytes(), memory.len());
            return Err(tinynccl_plan::error::Error::invalid("shared region", detail));
        }
        Ok(Board { memory, layout, rank, call: 0, everyone_finished: 0, stamps: [0; STAMPS], checks: None })
    }

    /// Makes these calls verified; all ranks do so before their first call.
    pub(crate) fn check(&mut self, chosen: Chosen) {
        self.checks = Some(Checks::new(self.ranks(), chosen));
    }

    /// True if this call is verified: a rank reads even its own line through [`Board::verify`].
    #[inline]
    pub(super) fn verifies(&self, header: &Header) -> bool {
        self.checks.as_ref().is_some_and(|checks| checks.has(header))
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.layout.ranks
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Payload bytes that a call may have.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    /// Bytes that a chunk may have.
    pub(crate) fn stage_bytes(&self) -> usize {
        self.layout.stage_bytes
    }

    #[inline(always)]
    fn at<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= self.memory.len());
        let place: NonNull<T> = {
            // SAFETY: offsets come from the layout, which fits into the mapping (see `new`), and are multiples of 64.
            unsafe { self.memory.base().add(offset).cast() }
        };
        // SAFETY: valid as long as `memory`; only used with types made of atomics, which may be shared with anyone.
        unsafe { place.as_ref() }
    }

    #[inline(always)]
    fn line(&self, rank: usize, call: u64) -> &Line {
        self.at(self.layout.line(rank, call))
    }

    /// The slot of `rank` for `call`: `slot_bytes` bytes, 64-byte aligned.
    #[inline(always)]
    pub(super) fn payload(&self, rank: usize, call: u64) -> *mut u8 {
        // SAFETY: as `at`.
        unsafe { self.memory.base().add(self.layout.area(rank, call)).as_ptr() }
    }

    /// The stage of `rank` for `call`: `stage_bytes` bytes, page-aligned.
    #[inline]
    pub(super) fn stage(&self, rank: usize, call: u64) -> *mut u8 {
        // SAFETY: as `at`.
        unsafe { self.memory.base().add(self.layout.stage(rank, call)).as_ptr() }
    }

    fn ends(&self, rank: usize) -> &Ends {
        self.at(self.layout.ends(rank))
    }

    /// Begins the collective with this stamp: here, or over links.
    #[inline]
    pub(crate) fn made(&mut self, stamp: u64) {
        self.stamps[(stamp >> 32) as usize % STAMPS] = stamp;
        self.ends(self.rank).stamp.set(stamp);
    }

    /// True if `rank`'s last stamp shows that it has made other calls than we have.
    #[inline]
    fn strayed(&self, rank: usize) -> bool {
        let theirs = self.ends(rank).stamp.get();
        let ours = self.stamps[(theirs >> 32) as usize % STAMPS];
        ours >> 32 == theirs >> 32 && ours != theirs
    }

    /// A rank that has made other calls than we have.
    pub(super) fn stray(&self) -> Option<usize> {
        (0..self.ranks()).find(|&rank| rank != self.rank && self.strayed(rank))
    }

    fn asleep(&self, rank: usize) -> &Asleep {
        self.at(self.layout.asleep(rank))
    }

    fn announced(&self, rank: usize) -> &Announcement {
        self.at(self.layout.announced(rank))
    }

    fn sleepers(&self) -> &Sleepers {
        self.at(0)
    }

    /// Number of the next call, which takes as many as it has steps.
    #[inline]
    pub(super) fn start(&mut self, steps: usize) -> u64 {
        let first = self.call + 1;
        self.call += steps as u64;
        first
    }

    /// The rank that keeps us from writing the line of `call`: it has not finished the call that used the line before,
    /// or has made other calls.
    #[inline]
    pub(super) fn no_line(&mut self, call: u64) -> Option<Turn> {
        self.no_credit(call, LINES)
    }

    /// Returns the rank that keeps us from writing the line and the slot of `call`, as [`Board::no_line`].
    #[inline]
    pub(super) fn no_area(&mut self, call: u64) -> Option<Turn> {
        self.no_credit(call, DEPTH)
    }

    /// Returns the rank that keeps us from writing the line and the stage of `call`, as [`Board::no_line`].
    pub(super) fn no_stage(&mut self, call: u64) -> Option<Turn> {
        self.no_credit(call, STAGES)
    }

    #[inline]
    fn no_credit(&mut self, call: u64, depth: usize) -> Option<Turn> {
        let needed = call.checked_sub(depth as u64)?;
        if self.everyone_finished >= needed {
            return None;
        }
        let mut lowest = u64::MAX;
        for rank in (0..self.ranks()).filter(|&r| r != self.rank) {
            let finished = self.ends(rank).finished.get();
            if self.strayed(rank) {
                return Some(Turn::Stray(rank));
            }
            if finished < needed {
                return Some(Turn::Blocked(rank, Wait::Finished(needed)));
            }
            lowest = lowest.min(finished);
        }
        self.everyone_finished = lowest;
        None
    }

    /// All ranks were seen at `call`, so all have finished the calls before it.
    #[inline]
    pub(super) fn everyone_arrived(&mut self, call: u64) {
        self.everyone_finished = self.everyone_finished.max(call - 1);
    }

    /// Completes our line of `call`; the payload, if it is not in the line, was written before.
    #[inline(always)]
    pub(super) fn publish(&self, call: u64, header: &Header, inline: [u64; 3], bytes: usize) {
        if let Some(checks) = &self.checks
            && checks.has(header)
        {
            self.write_sum(checks, call, header, inline, bytes);
        }
        let line = self.line(self.rank, call);
        line.header.store(to_words(header));
        line.inline.store(inline);
        line.number.publish(call);
        self.wake();
    }

    /// Writes the sum of a line that is to be published, and of its payload.
    #[cold]
    fn write_sum(&self, checks: &Checks, call: u64, header: &Header, inline: [u64; 3], bytes: usize) {
        let message = Message { header: to_words(header), inline };
        let payload = Payload { bytes, ..self.payload_of(self.rank, call, header) };
        // SAFETY: ours, and written; not longer than the room for this call's payload.
        unsafe { checks.write(self.at(self.layout.sum(self.rank, call)), call, &message, payload) };
    }

    /// True once `rank`'s line of `call` is complete.
    #[inline]
    pub(super) fn has_arrived(&self, rank: usize, call: u64) -> bool {
        self.line(rank, call).number.published() == call
    }

    /// `rank`'s line of `call`, which has arrived.
    #[inline]
    pub(super) fn read(&self, rank: usize, call: u64) -> Message {
        let line = self.line(rank, call);
        Message { header: line.header.load(), inline: line.inline.load() }
    }

    /// Location of the payload of `rank`'s line, and its capacity in bytes.
    fn payload_of(&self, rank: usize, call: u64, header: &Header) -> Payload {
        match header.algorithm {
            code if code == Algorithm::Staged as u8 => {
                Payload { at: self.stage(rank, call), bytes: self.stage_bytes() }
            }
            // In two-shot calls that are verified, the sums of the input.
            code if code == Algorithm::OneShot as u8 || code == Algorithm::TwoShot as u8 => {
                Payload { at: self.payload(rank, call), bytes: self.slot_bytes() }
            }
            _ => Payload::NONE,
        }
    }

    /// Checks `rank`'s line of `call`, which has arrived as `message`, and its payload, if calls are verified.
    #[cold]
    pub(super) fn verify(&self, rank: usize, call: u64, message: Message) -> Result<(), Turn> {
        let Some(checks) = &self.checks else { return Ok(()) };
        let (sum, payload) = (self.at(self.layout.sum(rank, call)), self.payload_of(rank, call, &message.header()));
        // SAFETY: within the mapping; it was written before the line's number, and stays until we finish the call.
        unsafe { checks.check(sum, rank, call, &message, payload) }.map_err(|differs| Turn::Corrupt(rank, differs))
    }

    /// We need nothing of `call` any more, and have written all that others await.
    #[inline]
    pub(super) fn finish(&self, call: u64) {
        self.ends(self.rank).finished.set(call);
        self.wake();
    }

    /// True once `rank` has finished `call`.
    #[inline]
    pub(super) fn has_finished(&self, rank: usize, call: u64) -> bool {
        self.ends(rank).finished.get() >= call
    }

    /// True once the awaited event of `rank` has happened.
    pub(super) fn has(&self, rank: usize, what: Wait) -> bool {
        match what {
            Wait::Arrival(call) => self.has_arrived(rank, call),
            Wait::Finished(call) => self.has_finished(rank, call),
        }
    }

    /// Announces our call over links, for ranks that wait for us here with another call.
    pub(crate) fn announce(&self, header: &Header) {
        self.announced(self.rank).write(to_words(header));
    }

    /// The call that `rank` has announced last.
    pub(super) fn announcement(&self, rank: usize) -> Option<Header> {
        self.announced(rank).read().map(bytemuck::cast)
    }

    /// Wakes sleeping ranks, after a store that may be awaited.
    #[inline]
    fn wake(&self) {
        fence::of_waker();
        if self.sleepers().any() {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        for rank in (0..self.ranks()).filter(|&r| r != self.rank) {
            self.asleep(rank).wake();
        }
    }

    /// Sleeps until another rank writes, at most for `slice`, unless `ready` is true already. True when it slept and
    /// was not woken.
    pub(super) fn sleep(&self, slice: Duration, ready: impl FnOnce() -> bool) -> bool {
        let asleep = self.asleep(self.rank);
        asleep.lie_down();
        self.sleepers().enter();
        fence::of_sleeper();
        let sleeps = !ready();
        if sleeps {
            asleep.sleep(slice);
        }
        let alone = asleep.get_up();
        self.sleepers().leave();
        sleeps && alone
    }
}

/// Wakes the thread of a rank's own process that sleeps in the shared region.
#[derive(Debug)]
pub(crate) struct Alarm {
    memory: Arc<Mapping>,
    /// Offset of the rank's [`Asleep`].
    asleep: usize,
}

impl Alarm {
    /// Returns the alarm of this board's rank.
    pub(crate) fn new(board: &Board) -> Alarm {
        Alarm { memory: board.memory.clone(), asleep: board.layout.asleep(board.rank) }
    }

    /// Wakes the thread, which finds out why.
    pub(crate) fn ring(&self) {
        fence::of_waker();
        // SAFETY: the board's offset, which fits into the mapping and is a multiple of 64 ([`Board::new`]).
        let asleep: NonNull<Asleep> = unsafe { self.memory.base().add(self.asleep).cast() };
        // SAFETY: valid as long as `memory`, and made of atomics, which may be shared with anyone.
        unsafe { asleep.as_ref() }.wake();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn boards() -> [Board; 2] {
        let layout = Layout::new(2, 1 << 10, 4 << 10).unwrap();
        let memory = Arc::new(Mapping::anonymous(layout.bytes()).unwrap());
        [0, 1].map(|rank| Board::new(memory.clone(), layout, rank).unwrap())
    }

    #[test]
    fn an_alarm_wakes_a_sleeper_of_its_own_rank() {
        let [ours, _] = boards();
        let alarm = Alarm::new(&ours);
        std::thread::scope(|scope| {
            let woken = scope.spawn(move || !ours.sleep(Duration::from_secs(60), || false));
            while !woken.is_finished() {
                alarm.ring();
                std::thread::yield_now();
            }
            assert!(woken.join().unwrap());
        });
    }

    #[test]
    fn a_sleeper_knows_whether_it_was_woken() {
        let [ours, theirs] = boards();
        assert!(ours.sleep(Duration::from_millis(1), || false), "nobody woke it");
        assert!(!ours.sleep(Duration::from_secs(60), || true), "it did not sleep");
        let woken = std::thread::scope(|scope| {
            let sleeper = scope.spawn(move || !ours.sleep(Duration::from_secs(60), || false));
            while !sleeper.is_finished() {
                theirs.wake_all();
                std::thread::yield_now();
            }
            sleeper.join().unwrap()
        });
        assert!(woken);
    }
}
