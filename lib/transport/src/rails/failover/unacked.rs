//! Fragments of a stream that the receiver has not acknowledged, and the receiver's count of them.

use std::collections::VecDeque;

/// Short fragments that are acknowledged together.
const SHORT_ONES: u64 = 16;

/// Fragments that were begun on a stream, oldest first, and the number of those that went before and were acknowledged.
#[derive(Debug)]
pub(in crate::rails) struct Unacked<F> {
    sent: VecDeque<F>,
    acked: u64,
}

impl<F> Default for Unacked<F> {
    fn default() -> Self {
        Unacked { sent: VecDeque::new(), acked: 0 }
    }
}

impl<F> Unacked<F> {
    pub(in crate::rails) fn push(&mut self, fragment: F) {
        self.sent.push_back(fragment);
    }

    /// Takes in that the receiver has read `fragments` of them in all, and returns those that are over. `begun`: the
    /// newest one is not written whole. The error is the largest number that the receiver can have read.
    pub(in crate::rails) fn handle_ack(&mut self, fragments: u64, begun: bool) -> Result<impl Iterator<Item = F>, u64> {
        let written = self.acked + self.sent.len() as u64 - u64::from(begun);
        if fragments > written {
            return Err(written);
        }
        // An older number, which a slower stream has brought, says nothing new.
        let over = fragments.saturating_sub(self.acked);
        self.acked += over;
        Ok(self.sent.drain(..over as usize))
    }

    pub(in crate::rails) fn iter(&self) -> impl Iterator<Item = &F> {
        self.sent.iter()
    }

    /// Gives all of them back, for other streams.
    pub(in crate::rails) fn take(&mut self) -> VecDeque<F> {
        std::mem::take(&mut self.sent)
    }
}

/// Fragments that were read from a stream, and how many of them were acknowledged.
#[derive(Debug, Default, Clone, Copy)]
pub(in crate::rails) struct Counted {
    fragments: u64,
    acknowledged: u64,
}

impl Counted {
    /// Counts a fragment, which is acknowledged with others if it is short; returns the number to acknowledge if that
    /// is due.
    pub(in crate::rails) fn read(&mut self, short: bool) -> Option<u64> {
        self.fragments += 1;
        let due = !short || self.fragments - self.acknowledged >= SHORT_ONES;
        if due {
            self.acknowledged = self.fragments;
        }
        due.then_some(self.fragments)
    }

    /// Number of fragments that were read.
    pub(in crate::rails) fn fragments(self) -> u64 {
        self.fragments
    }
}
