//! How chunks move: in order, in one direction, from the sender's memory to the receiver's.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

pub mod tcp;
#[cfg(feature = "verbs")]
pub mod verbs;

/// One side of a connection for chunks. Each has memory, staging slots or the buffer, and `place` is a range of it.
pub trait Wire {
    /// A new transfer begins: chunks count from 0 again.
    fn begin(&mut self) -> Result<()>;

    /// Sender: chunk `index` goes out. Its place may not change until [`Wire::sent`].
    fn send(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()>;

    /// Sender: waits until chunk `index` and all before it have left their places.
    fn sent(&mut self, index: usize, deadline: Instant) -> Result<()>;

    /// Receiver: chunk `index` shall come to `place`.
    fn post(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()>;

    /// Receiver: waits until chunk `index` is in its place.
    fn received(&mut self, index: usize, deadline: Instant) -> Result<()>;
}
