//! A stream of a connection as the agreement of both ends sees it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

/// State of a stream. It only moves down, until another stream begins in its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(in crate::rails) enum State {
    /// Accepted in the position of a lost one, and the sender has not confirmed yet that it has it, too.
    New,
    Alive,
    /// The peer has closed it, between two fragments.
    Ended,
    /// This end has failed it over, and the peer has not reported yet what came over it. Its socket is open still,
    /// unless it has failed: for the peer the end of a socket is that of the connection, and this may be all that it
    /// has left.
    Retiring,
    /// Both ends know.
    Retired,
}

/// The state of a stream or of a queue pair, which the data path reads without a lock.
#[derive(Debug)]
pub(in crate::rails) struct StateCell(AtomicU8);

impl StateCell {
    pub(in crate::rails) fn new(state: State) -> StateCell {
        StateCell(AtomicU8::new(state as u8))
    }

    #[inline]
    pub(in crate::rails) fn is(&self, state: State) -> bool {
        self.0.load(Ordering::Acquire) == state as u8
    }

    /// Moves to `state`; true if the state was an earlier one.
    pub(in crate::rails) fn advance(&self, state: State) -> bool {
        self.0.fetch_max(state as u8, Ordering::AcqRel) < state as u8
    }
}

/// Number, state and suspicion of the stream that has a position of the connection's.
#[derive(Debug)]
pub(in crate::rails) struct Slot {
    /// Number of the stream, from which its position among the connection's streams follows.
    number: AtomicUsize,
    state: StateCell,
    /// It is stalled, and carries nothing more as long as another one works.
    suspected: AtomicBool,
}

impl Slot {
    pub(in crate::rails) fn new(number: usize, state: State) -> Slot {
        Slot { number: AtomicUsize::new(number), state: StateCell::new(state), suspected: AtomicBool::new(false) }
    }

    /// Begins again, for a stream of another number in the position of one that is gone.
    pub(in crate::rails) fn renew(&self, number: usize, state: State) {
        self.suspected.store(false, Ordering::Release);
        self.number.store(number, Ordering::Release);
        self.state.0.store(state as u8, Ordering::Release);
    }

    #[inline]
    pub(in crate::rails) fn number(&self) -> usize {
        self.number.load(Ordering::Acquire)
    }

    #[inline]
    pub(in crate::rails) fn is(&self, state: State) -> bool {
        self.state.is(state)
    }

    /// Moves to `state`; true if the state was an earlier one.
    pub(in crate::rails) fn advance(&self, state: State) -> bool {
        self.state.advance(state)
    }

    /// Returns true while the stream is taken to stall.
    #[inline]
    pub(in crate::rails) fn is_suspect(&self) -> bool {
        self.suspected.load(Ordering::Acquire)
    }

    /// Sets whether the stream is taken to stall; true if that is new.
    pub(in crate::rails) fn suspect(&self, suspected: bool) -> bool {
        self.suspected.swap(suspected, Ordering::AcqRel) != suspected
    }
}
