//! Control frames for the peer that any free stream takes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::net::data::frame::Frame;
use crate::threads::lock;

/// Control frames, of which the last one goes first. `take` on an empty outbox does not lock.
#[derive(Debug, Default)]
pub(in crate::net) struct Outbox {
    any: AtomicBool,
    frames: Mutex<Vec<Frame>>,
}

impl Outbox {
    pub(in crate::net) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    pub(in crate::net) fn put(&self, frames: impl IntoIterator<Item = Frame>) {
        lock(&self.frames).extend(frames);
        self.any.store(true, Ordering::Release);
    }

    pub(in crate::net) fn take(&self) -> Option<Frame> {
        if self.is_empty() {
            return None;
        }
        let mut frames = lock(&self.frames);
        let frame = frames.pop();
        self.any.store(!frames.is_empty(), Ordering::Release);
        frame
    }
}
