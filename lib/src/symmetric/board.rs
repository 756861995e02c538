//! One rank's view of the board: publish, see who has arrived, finish.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use super::layout::{DEPTH, LINES, Layout, Line, STAGES};
use super::run::Wait;
use crate::error::Result;
use crate::transport::fence::Fence;
use crate::transport::mapping::Mapping;
use crate::transport::ring::{agree, to_words};
use crate::wire::Header;

/// A message's first line as it was read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    pub(super) header: [u64; 4],
    pub(super) inline: [u64; 3],
}

impl Message {
    pub(super) fn agrees_with(&self, ours: &Header) -> bool {
        agree(&self.header, &to_words(ours))
    }

    pub(super) fn header(&self) -> Header {
        bytemuck::cast(self.header)
    }
}

/// A rank at the board.
#[derive(Debug)]
pub(crate) struct Board {
    memory: Arc<Mapping>,
    layout: Layout,
    rank: usize,
    fence: Fence,
    /// Calls started.
    call: u64,
    /// All ranks are known to have finished this call.
    everyone_finished: u64,
}

impl Board {
    /// `memory` is as large as the layout says and was zero when the first rank came.
    pub(crate) fn new(memory: Arc<Mapping>, layout: Layout, rank: usize, fence: Fence) -> Result<Board> {
        if memory.len() < layout.bytes() || rank >= layout.ranks {
            let detail = format!("expected {} bytes, got {}; rank {rank}", layout.bytes(), memory.len());
            return Err(crate::error::Error::invalid("board", detail));
        }
        Ok(Board { memory, layout, rank, fence, call: 0, everyone_finished: 0 })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.layout.ranks
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

    /// The payload area of `rank` for `call`: `slot_bytes` bytes, 64-byte aligned.
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

    fn finished(&self, rank: usize) -> &AtomicU64 {
        self.at(self.layout.finished(rank))
    }

    fn asleep(&self, rank: usize) -> &AtomicU32 {
        self.at(self.layout.asleep(rank))
    }

    fn announced(&self, rank: usize) -> &Line {
        self.at(self.layout.announced(rank))
    }

    fn sleepers(&self) -> &AtomicU32 {
        self.at(0)
    }

    /// Number of the next call, which takes as many as it has steps.
    #[inline]
    pub(super) fn start(&mut self, steps: usize) -> u64 {
        let first = self.call + 1;
        self.call += steps as u64;
        first
    }

    /// What keeps us from writing the line of `call`: the rank that has not finished the call which used it before.
    #[inline]
    pub(super) fn no_line(&mut self, call: u64) -> Option<(usize, Wait)> {
        self.no_credit(call, LINES)
    }

    /// The same for the line and the payload area.
    #[inline]
    pub(super) fn no_area(&mut self, call: u64) -> Option<(usize, Wait)> {
        self.no_credit(call, DEPTH)
    }

    /// The same for the line and the stage.
    pub(super) fn no_stage(&mut self, call: u64) -> Option<(usize, Wait)> {
        self.no_credit(call, STAGES)
    }

    #[inline]
    fn no_credit(&mut self, call: u64, depth: usize) -> Option<(usize, Wait)> {
        let needed = call.checked_sub(depth as u64)?;
        if self.everyone_finished >= needed {
            return None;
        }
        let mut lowest = u64::MAX;
        for rank in (0..self.ranks()).filter(|&r| r != self.rank) {
            let finished = self.finished(rank).load(Ordering::Acquire);
            if finished < needed {
                return Some((rank, Wait::Finished(needed)));
            }
            lowest = lowest.min(finished);
        }
        self.everyone_finished = lowest;
        None
    }

    /// Everybody was seen at `call`, so that everybody has finished the calls before.
    #[inline]
    pub(super) fn everyone_arrived(&mut self, call: u64) {
        self.everyone_finished = self.everyone_finished.max(call - 1);
    }

    /// Completes our line of `call`; the payload was written before.
    #[inline]
    pub(super) fn publish(&self, call: u64, header: &Header, inline: [u64; 3]) {
        let line = self.line(self.rank, call);
        for (to, from) in line.header.iter().zip(to_words(header)) {
            to.store(from, Ordering::Relaxed);
        }
        for (to, from) in line.inline.iter().zip(inline) {
            to.store(from, Ordering::Relaxed);
        }
        line.number.store(call, Ordering::Release);
        self.wake();
    }

    /// Whether `rank`'s line of `call` is complete.
    #[inline]
    pub(super) fn has_arrived(&self, rank: usize, call: u64) -> bool {
        self.line(rank, call).number.load(Ordering::Acquire) == call
    }

    /// `rank`'s line of `call`, which has arrived.
    #[inline]
    pub(super) fn read(&self, rank: usize, call: u64) -> Message {
        let line = self.line(rank, call);
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Message {
            header: [load(&line.header[0]), load(&line.header[1]), load(&line.header[2]), load(&line.header[3])],
            inline: [load(&line.inline[0]), load(&line.inline[1]), load(&line.inline[2])],
        }
    }

    /// We need nothing of `call` any more, and have written what others await.
    #[inline]
    pub(super) fn finish(&self, call: u64) {
        self.finished(self.rank).store(call, Ordering::Release);
        self.wake();
    }

    /// Whether `rank` has finished `call`.
    #[inline]
    pub(super) fn has_finished(&self, rank: usize, call: u64) -> bool {
        self.finished(rank).load(Ordering::Acquire) >= call
    }

    /// Whether what is awaited of `rank` has happened.
    pub(super) fn has(&self, rank: usize, what: Wait) -> bool {
        match what {
            Wait::Arrival(call) => self.has_arrived(rank, call),
            Wait::Finished(call) => self.has_finished(rank, call),
        }
    }

    /// Tells the others which call we make over links, for those who wait for us here with another one.
    pub(crate) fn announce(&self, header: &Header) {
        let line = self.announced(self.rank);
        // Odd while it is being written. Announcements are rare next to what follows them, so a full fence is cheap.
        let number = line.number.load(Ordering::Relaxed);
        line.number.store(number + 1, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        for (to, from) in line.header.iter().zip(to_words(header)) {
            to.store(from, Ordering::Relaxed);
        }
        line.number.store(number + 2, Ordering::Release);
    }

    /// The call that `rank` has announced last.
    pub(super) fn announcement(&self, rank: usize) -> Option<Header> {
        let line = self.announced(rank);
        let before = line.number.load(Ordering::Acquire);
        let words = [0, 1, 2, 3].map(|i| line.header[i].load(Ordering::Relaxed));
        std::sync::atomic::fence(Ordering::SeqCst);
        let same = line.number.load(Ordering::Relaxed) == before;
        (before > 0 && before.is_multiple_of(2) && same).then(|| bytemuck::cast(words))
    }

    /// Wakes who sleeps, after a store that may be awaited.
    #[inline]
    fn wake(&self) {
        self.fence.light();
        if self.sleepers().load(Ordering::Relaxed) != 0 {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        for rank in (0..self.ranks()).filter(|&r| r != self.rank) {
            let asleep = self.asleep(rank);
            if asleep.swap(0, Ordering::AcqRel) != 0 {
                // The word lies in mapped memory: this can only fail for an address that is not.
                let _ = futex::wake(asleep, futex::Flags::empty(), 1);
            }
        }
    }

    /// Sleeps until somebody writes something, at most for `slice`, unless `ready` says that it is there already.
    pub(super) fn sleep(&self, slice: Duration, ready: impl FnOnce() -> bool) {
        let asleep = self.asleep(self.rank);
        asleep.store(1, Ordering::Relaxed);
        self.sleepers().fetch_add(1, Ordering::AcqRel);
        self.fence.heavy();
        if !ready() {
            let timeout = futex::Timespec { tv_sec: slice.as_secs() as _, tv_nsec: slice.subsec_nanos() as _ };
            // Woken, too late to sleep (the word is 0 already), interrupted, or the slice is over: look again.
            let _ = futex::wait(asleep, futex::Flags::empty(), 1, Some(&timeout));
        }
        asleep.store(0, Ordering::Relaxed);
        self.sleepers().fetch_sub(1, Ordering::AcqRel);
    }
}
