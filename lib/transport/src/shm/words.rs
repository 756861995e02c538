//! The words by which both ends of a ring agree, with their memory orderings: all of the protocol's are in this file.

use std::sync::atomic::Ordering;

use tinynccl_sys::sync::{AtomicU32, AtomicU64, Step, order};

/// Asleep, ring the doorbell.
const WAITING: u32 = 1;
/// This end was dropped.
const CLOSED: u32 = 2;

/// Number of the message in a line, from 1, once it is complete; before, that of the message one lap earlier. (In
/// the shared region of `symmetric`: of the call.)
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Sequence(AtomicU64);

impl Sequence {
    /// Publishes message `number`: what was written to the line and the ring before belongs to it.
    #[inline(always)]
    pub fn publish(&self, number: u64) {
        self.0.store(number, order(Step::Publish, Ordering::Release));
    }

    /// Returns the number in the line. If it is the one awaited, the whole message is there to be read.
    #[inline(always)]
    pub fn published(&self) -> u64 {
        self.0.load(order(Step::SeePublished, Ordering::Acquire))
    }
}

/// Count of the lines, or of the bytes of the ring, that the receiver has freed.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Freed(AtomicU64);

impl Freed {
    /// Nothing below `count` is read any more.
    #[inline(always)]
    pub(super) fn free(&self, count: u64) {
        self.0.store(count, order(Step::Free, Ordering::Release));
    }

    /// Returns the count of what is freed: what is below may be written again.
    #[inline(always)]
    pub(super) fn freed(&self) -> u64 {
        self.0.load(order(Step::SeeFreed, Ordering::Acquire))
    }
}

/// State of one end, as the other end sees it.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct EndState(AtomicU32);

/// The flags of an [`EndState`].
#[derive(Debug, Clone, Copy)]
pub(super) struct EndFlags(u32);

impl EndFlags {
    /// The other end neither sleeps nor is gone.
    #[inline(always)]
    pub(super) fn is_plain(self) -> bool {
        self.0 == 0
    }

    #[inline(always)]
    pub(super) fn waiting(self) -> bool {
        self.0 & WAITING != 0
    }

    #[inline(always)]
    pub(super) fn closed(self) -> bool {
        self.0 & CLOSED != 0
    }
}

impl EndState {
    /// A glance, after a fence. It orders nothing: what follows from it is decided by [`EndState::is_closed`] and
    /// [`EndState::take_waiting`].
    #[inline(always)]
    pub(super) fn glance(&self) -> EndFlags {
        EndFlags(self.0.load(Ordering::Relaxed))
    }

    /// The other end is gone; everything that it had published before can be seen.
    #[inline(always)]
    pub(super) fn is_closed(&self) -> bool {
        self.0.load(order(Step::SeeClosed, Ordering::Acquire)) & CLOSED != 0
    }

    /// Announces that this end is gone; the last write of this end.
    pub(super) fn close(&self) {
        self.0.fetch_or(CLOSED, order(Step::Close, Ordering::AcqRel));
    }

    /// Asks to be woken. The sleeper's fence must follow, and then another look for what is awaited.
    pub(super) fn ask_to_be_woken(&self) {
        self.0.fetch_or(WAITING, order(Step::Wake, Ordering::AcqRel));
    }

    /// Takes the request to be woken back.
    pub(super) fn awake(&self) {
        self.0.fetch_and(!WAITING, order(Step::Wake, Ordering::AcqRel));
    }

    /// Takes the peer's request to be woken; true for the caller that has to ring.
    pub(super) fn take_waiting(&self) -> bool {
        self.0.fetch_and(!WAITING, order(Step::Wake, Ordering::AcqRel)) & WAITING != 0
    }
}
