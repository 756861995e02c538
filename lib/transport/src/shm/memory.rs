//! Layout of a ring in memory: its words and its payloads.

use std::any::Any;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::single_copy::Probe;
use super::words::{EndState, Freed, Sequence};
use crate::LinkOptions;
use crate::memory::mapping::Mapping;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::sync::{Words, touches};

/// Lines per direction, unless `depth` is larger.
pub(crate) const LINES: usize = 32;
const PAGE: usize = 4096;

/// A message's line.
#[repr(C, align(64))]
pub(super) struct Line {
    pub(super) sequence: Sequence,
    pub(super) header: Words<4>,
    /// Payload of up to 8 bytes; of a long one, its address in the sender's memory (zero copy), or 0 when it is in the
    /// ring.
    pub(super) first: Words<1>,
    /// And of up to 24; of a long one in the ring, which chunk of it this is: offset and length.
    pub(super) rest: Words<2>,
}
#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == 64 && size_of::<Head>() == 512);

/// Running counts of the lines and of the bytes of the ring that the receiver has freed.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Consumed {
    pub(super) lines: Freed,
    pub(super) ring: Freed,
}

/// Words that different sides write have two cache lines each to themselves, because some cores prefetch lines in
/// pairs.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(super) struct Apart<T>(pub(super) T);

impl<T> Deref for Apart<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The words of a direction.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Head {
    pub(super) consumed: Apart<Consumed>,
    pub(super) receiver: Apart<EndState>,
    pub(super) sender: Apart<EndState>,
    pub(super) probe: Apart<Probe>,
}

/// Sizes and offsets; both ends compute the same from the same [`LinkOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(super) lines: usize,
    pub(super) max_message: usize,
    /// Bytes for payloads: a multiple of 64.
    pub(super) ring: usize,
}

impl Layout {
    /// # Errors
    /// [`Error::InvalidArgument`] when the options are out of range.
    pub(crate) fn new(options: &LinkOptions) -> Result<Layout> {
        options.check()?;
        let lines = options.depth.next_power_of_two().max(LINES);
        // One message more than `depth`: less than that is left unused at the end of the ring.
        let ring = (options.depth + 1) * taken(options.max_message);
        Ok(Layout { lines, max_message: options.max_message, ring })
    }

    fn head(&self) -> usize {
        size_of::<Head>() + self.lines * size_of::<Line>()
    }

    fn heads(&self) -> usize {
        (2 * self.head()).next_multiple_of(PAGE)
    }

    /// Bytes of both directions. Address space: the heads (2 pages with default options) are touched at once, a page of
    /// the payload ring when a message first covers it.
    pub(crate) fn bytes(&self) -> usize {
        (self.heads() + 2 * self.ring).next_multiple_of(PAGE)
    }
}

/// Bytes of the ring that a payload of `len` bytes takes.
#[inline(always)]
pub(super) fn taken(len: usize) -> usize {
    len.next_multiple_of(64)
}

/// Position of the next payload in the ring. Both ends count alike, so it is never sent.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Position {
    /// Bytes of the ring taken so far, in all laps.
    pub(super) count: u64,
    /// Always with `max_message` bytes left behind it.
    offset: usize,
}

impl Position {
    /// Behind a payload of `len` bytes.
    #[inline(always)]
    pub(super) fn advance(&mut self, len: usize, layout: &Layout) {
        self.count += taken(len) as u64;
        self.offset += taken(len);
        if self.offset + layout.max_message > layout.ring {
            self.count += (layout.ring - self.offset) as u64;
            self.offset = 0;
        }
    }
}

/// One direction within a mapping: pointers that stay valid while `memory` lives.
#[derive(Debug)]
pub(super) struct Direction {
    pub(super) head: NonNull<Head>,
    pub(super) lines: NonNull<Line>,
    pub(super) ring: NonNull<u8>,
    pub(super) layout: Layout,
    /// Keeps the memory.
    pub(super) _memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointers lead into memory that is valid from every thread; one `ShmSend` and one `ShmRecv` use it by the
// protocol.
unsafe impl Send for Direction {}

impl Direction {
    /// Direction 0 or 1 of `memory`, whose length is checked against the layout.
    pub(super) fn new(memory: &Arc<Mapping>, layout: Layout, index: usize) -> Result<Direction> {
        if memory.len() < layout.bytes() || index > 1 || cfg!(loom) {
            let detail = format!("shared memory of a link: expected {} bytes, got {}", layout.bytes(), memory.len());
            return Err(Error::invalid("connect", detail));
        }
        let head = index * layout.head();
        let ring = layout.heads() + index * layout.ring;
        let base = memory.base();
        // SAFETY: all offsets are below `layout.bytes()`, which is within the mapping; the mapping is page-aligned and
        // the offsets of heads are multiples of 128 and the others of 64, as the types require.
        unsafe {
            Ok(Direction {
                head: base.add(head).cast(),
                lines: base.add(head + size_of::<Head>()).cast(),
                ring: base.add(ring),
                layout,
                _memory: memory.clone(),
            })
        }
    }

    #[inline(always)]
    pub(super) fn head(&self) -> &Head {
        // SAFETY: within the mapping (see `new`), aligned; atomics may be shared with anyone.
        unsafe { self.head.as_ref() }
    }

    #[inline(always)]
    pub(super) fn line(&self, message: u64) -> &Line {
        // SAFETY: `lines` is a power of two and the index is masked to it; otherwise as `head`.
        unsafe { self.lines.add(message as usize & (self.layout.lines - 1)).as_ref() }
    }

    /// Address of the payload at `at`: `max_message` bytes, 64-byte aligned.
    #[inline(always)]
    pub(super) fn payload(&self, at: Position) -> *mut u8 {
        // SAFETY: at a position, `max_message` bytes fit into the ring, which is within the mapping.
        unsafe { self.ring.add(at.offset).as_ptr() }
    }

    /// Tells the model that `len` bytes at `at` are being written (or read) here. Does nothing outside of a model.
    #[inline(always)]
    pub(super) fn touches(&self, at: Position, len: usize, writing: bool) {
        touches(self.payload(at), taken(len), writing);
    }
}
