//! A rank's message in the shared region, and the result of one step of a call that looks for messages.

use tinynccl_plan::wire::Header;
use tinynccl_transport::shm::{agree, to_words};

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

/// The event of a rank that is awaited, in the call with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Arrival(u64),
    Finished(u64),
}

/// End of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Some rank's buffers are not in symmetric memory. All ranks know it, and nothing was written.
    NotSymmetric,
}

/// The result of one step.
#[derive(Debug)]
pub(super) enum Turn {
    Ended(Outcome),
    /// Waits for this rank.
    Blocked(usize, Wait),
    /// This rank makes another call.
    Mismatch(usize, Header),
    /// This rank has made other calls before.
    Stray(usize),
    /// This rank's data is not what it published.
    Corrupt(usize, Differs),
}

/// Bytes of a call whose sum is not the one that their owner published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Differs {
    /// Offset in the owner's input.
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) expected: u64,
    pub(super) got: u64,
}
