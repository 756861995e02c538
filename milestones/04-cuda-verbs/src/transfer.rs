//! The transfer: chunk by chunk, so that copies and wire overlap.
//!
//! ```text
//! sender     GPU -> slot 0 | GPU -> slot 1 | GPU -> slot 0 | ...
//!                            slot 0 -> wire | slot 1 -> wire | ...
//! receiver                   wire -> slot 0 | wire -> slot 1 | ...
//!                                             slot 0 -> GPU  | slot 1 -> GPU | ...
//! ```
//! Without staging the wire reads and writes the buffer itself, and the two loops only keep enough requests posted.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::buffer::Buffer;
use crate::pinned::Pinned;
use crate::plan::Plan;
use crate::wire::Wire;

/// One side's part in a transfer.
pub struct Transfer<'a> {
    /// The buffer's split into chunks.
    pub plan: Plan,
    /// The bytes.
    pub buffer: &'a dyn Buffer,
    /// The slots between buffer and wire; `None` when the wire uses the buffer itself.
    pub staging: Option<&'a Pinned>,
    /// The connection.
    pub wire: &'a mut dyn Wire,
    /// The longest single wait.
    pub patience: Duration,
}

impl Transfer<'_> {
    /// Sends the whole buffer. After the return, the memory may be reused.
    // EXERCISE 2 (How it works): begin; then for each chunk: start the next chunk's copy into its slot once the wire
    // has sent the slot's previous chunk, finish this chunk's copy, send it. At the end wait until the last chunk is
    // sent.
    pub fn send(&mut self) -> Result<()> {
        let plan = self.plan;
        // With staging, the next chunk's copy runs while this chunk is on the wire.
        let ahead = usize::from(self.staging.is_some());
        self.wire.begin()?;
        self.start_out(0)?;
        for index in 0..plan.chunks() {
            let next = index + ahead;
            if next < plan.chunks() && next >= plan.slots {
                self.wire.sent(next - plan.slots, self.deadline())?;
            }
            if ahead == 1 && next < plan.chunks() {
                self.start_out(next)?;
            }
            if self.staging.is_some() {
                self.buffer.finish(plan.slot(index), self.deadline())?;
            }
            self.wire.send(index, self.place(index), self.deadline())?;
        }
        self.wire.sent(plan.chunks() - 1, self.deadline())
    }

    /// Receives the whole buffer. After the return, all of it is in place.
    // EXERCISE 3 (How it works): begin, and post a place for as many chunks as there are slots; then for each received
    // chunk: start its copy into the buffer, finish the previous copy, post that copy's slot again. At the end finish
    // the last copy, or settle.
    pub fn receive(&mut self) -> Result<()> {
        let plan = self.plan;
        let chunks = plan.chunks();
        self.wire.begin()?;
        for index in 0..chunks.min(plan.slots) {
            self.wire.post(index, self.place(index), self.deadline())?;
        }
        for index in 0..chunks {
            self.wire.received(index, self.deadline())?;
            let free = match self.staging {
                None => Some(index),
                Some(staging) => {
                    self.buffer.start_in(plan.range(index), staging, plan.staged(index).start, plan.slot(index))?;
                    // The previous copy had a whole chunk's time; this one runs while the next chunk arrives.
                    index.checked_sub(1)
                }
            };
            let Some(free) = free else { continue };
            if self.staging.is_some() {
                self.buffer.finish(plan.slot(free), self.deadline())?;
            }
            if free + plan.slots < chunks {
                let next = free + plan.slots;
                self.wire.post(next, self.place(next), self.deadline())?;
            }
        }
        match self.staging {
            Some(_) => self.buffer.finish(plan.slot(chunks - 1), self.deadline()),
            None => self.buffer.settle(),
        }
    }

    fn start_out(&self, index: usize) -> Result<()> {
        let Some(staging) = self.staging else { return Ok(()) };
        let plan = self.plan;
        self.buffer.start_out(plan.range(index), staging, plan.staged(index).start, plan.slot(index))
    }

    /// The place of chunk `index` in the wire's memory.
    fn place(&self, index: usize) -> Range<usize> {
        if self.staging.is_some() { self.plan.staged(index) } else { self.plan.range(index) }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.patience
    }
}

#[cfg(test)]
mod tests;
