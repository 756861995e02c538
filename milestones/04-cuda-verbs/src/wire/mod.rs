//! The wire: moves chunks in order, in one direction, from the sender's memory to the receiver's.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

pub mod tcp;
pub mod verbs;

/// One side of a connection for chunks. Each side has memory (staging slots or the buffer); `place` is a range of it.
pub trait Wire {
    /// Begins a new transfer: chunk numbers restart at 0.
    fn begin(&mut self) -> Result<()>;

    /// Sender: sends chunk `index` from `place`, which may not change until [`Wire::sent`].
    fn send(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()>;

    /// Sender: waits until chunk `index` and all earlier ones have left the sender's memory.
    fn sent(&mut self, index: usize, deadline: Instant) -> Result<()>;

    /// Receiver: posts `place` for chunk `index`.
    fn post(&mut self, index: usize, place: Range<usize>, deadline: Instant) -> Result<()>;

    /// Receiver: waits until chunk `index` is in its posted buffer.
    fn received(&mut self, index: usize, deadline: Instant) -> Result<()>;
}
