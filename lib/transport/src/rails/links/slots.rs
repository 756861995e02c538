//! The memory of a link's messages in one direction.

use std::sync::Arc;

use crate::LinkOptions;
use crate::mapping::Mapping;
use crate::rails::{Memory, Net};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// Tag of all messages.
pub(super) const TAG: i32 = 0;
/// Offset of the payload in a slot, in bytes. The header is right before it, so that both are one message.
const PAYLOAD: usize = 64;

/// As many slots as the link has depth, each for a header and the longest payload.
#[derive(Debug)]
pub(super) struct Slots {
    // Dropped before the memory.
    _registered: Memory,
    memory: Mapping,
    pub(super) max_message: usize,
    stride: usize,
    /// The network, whose threads fill the memory and send from it.
    _net: Arc<Net>,
}

impl Slots {
    pub(super) fn new(net: &Arc<Net>, options: &LinkOptions) -> Result<Slots> {
        let stride = PAYLOAD + options.max_message.next_multiple_of(PAYLOAD);
        let memory = Mapping::anonymous(stride * options.depth)?;
        // SAFETY: the mapping is dropped after the registration.
        let registered = unsafe { net.register(memory.base().as_ptr(), memory.len()) };
        Ok(Slots { _registered: registered, memory, max_message: options.max_message, stride, _net: net.clone() })
    }

    /// Returns the address of a message, which is that of its header, and the room for both.
    pub(super) fn message(&self, slot: usize) -> (*mut u8, usize) {
        let at = slot * self.stride + PAYLOAD - Header::BYTES;
        let bytes = Header::BYTES + self.max_message;
        assert!(at + bytes <= self.memory.len(), "slot {slot} of {} bytes", self.memory.len());
        (self.memory.base().as_ptr().wrapping_add(at), bytes)
    }

    /// Returns the address of a slot's payload, with room for the longest one; a multiple of 64 bytes.
    pub(super) fn payload(&self, slot: usize) -> *mut u8 {
        self.message(slot).0.wrapping_add(Header::BYTES)
    }
}
