//! The atomic words of the shared region, with their memory orderings. All orderings of the protocol are in this file
//! and in [`Sequence`](tinynccl_transport::shm::Sequence), the number of a line.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tinynccl_sys::sync::{AtomicU32, AtomicU64, Futex, Step, fence, order};

/// Last call that a rank has finished.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Finished(AtomicU64);

impl Finished {
    /// We read nothing more of `call` and the calls before it, and have written all that others await of them.
    #[inline(always)]
    pub(super) fn set(&self, call: u64) {
        self.0.store(call, order(Step::Finish, Ordering::Release));
    }

    /// Data that was read may be written again, and written data may be read.
    #[inline(always)]
    pub(super) fn get(&self) -> u64 {
        self.0.load(order(Step::SeeFinished, Ordering::Acquire))
    }
}

/// Number and digest of the last call that a rank has begun, to detect different calls. It orders nothing: a rank that
/// sees the end of a call also sees its stamp, or a later one.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Stamp(AtomicU64);

impl Stamp {
    #[inline(always)]
    pub(super) fn set(&self, stamp: u64) {
        self.0.store(stamp, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A rank's state of its calls, in one cache line: a check for credit reads both words.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Ends {
    pub(super) finished: Finished,
    pub(super) stamp: Stamp,
}

/// Number of ranks that sleep, or are about to.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Sleepers(AtomicU32);

impl Sleepers {
    /// A relaxed read, after a fence.
    #[inline(always)]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// One more. The sleeper's fence must follow, and then another check of the awaited condition.
    pub(super) fn enter(&self) {
        self.0.fetch_add(1, order(Step::Wake, Ordering::AcqRel));
    }

    pub(super) fn leave(&self) {
        self.0.fetch_sub(1, order(Step::Wake, Ordering::AcqRel));
    }
}

/// Sleep state of a rank: 1 from before it sleeps until it is woken or wakes by itself. All changes are atomic
/// exchanges, so sleeper and wakers agree on their order without reasoning about plain stores.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Asleep(Futex);

impl Asleep {
    /// Before [`Sleepers::enter`].
    pub(super) fn lie_down(&self) {
        self.0.word().swap(1, order(Step::Wake, Ordering::AcqRel));
    }

    /// Until woken, at most for `slice`; not at all when woken since [`Asleep::lie_down`].
    pub(super) fn sleep(&self, slice: Duration) {
        self.0.wait(1, slice);
    }

    /// True when no rank has woken us.
    pub(super) fn get_up(&self) -> bool {
        self.0.word().swap(0, order(Step::Wake, Ordering::AcqRel)) != 0
    }

    /// Wakes the rank if it sleeps.
    pub(super) fn wake(&self) {
        if self.0.word().swap(0, order(Step::Wake, Ordering::AcqRel)) != 0 {
            self.0.wake();
        }
    }
}

/// Four words under a sequence lock: the header of the last call which a rank makes over links.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Announcement {
    /// Odd while the words are being written.
    number: AtomicU64,
    words: [AtomicU64; 4],
}

impl Announcement {
    /// By one rank only. Announcements are rare compared with calls, so a full fence is cheap.
    pub(super) fn write(&self, words: [u64; 4]) {
        let number = self.number.load(Ordering::Relaxed);
        self.number.store(number + 1, Ordering::Relaxed);
        fence(order(Step::Announcing, Ordering::SeqCst));
        for (to, word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.number.store(number + 2, order(Step::Announce, Ordering::Release));
    }

    /// The last one that is complete; `None` when there is none, or while the next one is being written.
    pub(super) fn read(&self) -> Option<[u64; 4]> {
        let before = self.number.load(order(Step::SeeAnnounced, Ordering::Acquire));
        let words = [0, 1, 2, 3].map(|i: usize| self.words[i].load(Ordering::Relaxed));
        fence(order(Step::LookTwice, Ordering::SeqCst));
        let same = self.number.load(Ordering::Relaxed) == before;
        (before > 0 && before.is_multiple_of(2) && same).then_some(words)
    }
}
