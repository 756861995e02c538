//! Optional checksums in the shared region: a writer stores them beside its line, and a reader checks them before it
//! uses the line or its payload.

use std::cell::Cell;

use super::layout::Sum;
use super::turn::Message;

/// The payload of a line outside it: a slot, a stage, or nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Payload {
    pub(super) at: *const u8,
    pub(super) bytes: usize,
}

impl Payload {
    pub(super) const NONE: Payload =
        Payload { at: std::ptr::NonNull::<u8>::dangling().as_ptr().cast_const(), bytes: 0 };

    /// # Safety
    /// The bytes must be readable, and only a rank that breaks the protocol may write them meanwhile.
    unsafe fn sum(self) -> u32 {
        // SAFETY: by the caller.
        crc32fast::hash(unsafe { std::slice::from_raw_parts(self.at, self.bytes) })
    }
}

/// The checks of one rank.
#[derive(Debug)]
pub(super) struct Checks {
    /// The last checked call of each rank: a step that waits for several ranks polls those that have arrived again.
    last: Vec<Cell<u64>>,
}

fn of_line(call: u64, message: &Message, payload: u32, bytes: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(bytemuck::cast_slice(&[call, u64::from(payload), bytes]));
    hasher.update(bytemuck::cast_slice(&message.header));
    hasher.update(bytemuck::cast_slice(&message.inline));
    hasher.finalize()
}

impl Checks {
    pub(super) fn new(ranks: usize) -> Checks {
        Checks { last: vec![Cell::new(0); ranks] }
    }

    /// Before the line is published.
    ///
    /// # Safety
    /// The payload must be readable.
    pub(super) unsafe fn write(&self, sum: &Sum, call: u64, message: &Message, payload: Payload) {
        // SAFETY: by the caller.
        let (of_payload, bytes) = (unsafe { payload.sum() }, payload.bytes as u64);
        let of_line = of_line(call, message, of_payload, bytes);
        sum.store([u64::from(of_line) << 32 | u64::from(of_payload), bytes]);
    }

    /// After `rank`'s line of `call` has arrived. `payload` is the location and capacity of its payload.
    ///
    /// # Errors
    /// The mismatch, as text.
    ///
    /// # Safety
    /// The payload must be readable.
    pub(super) unsafe fn check(
        &self,
        sum: &Sum,
        rank: usize,
        call: u64,
        message: &Message,
        payload: Payload,
    ) -> Result<(), String> {
        let Some(last) = self.last.get(rank).filter(|last| last.get() != call) else { return Ok(()) };
        let [sums, bytes] = sum.load();
        let (line, expected) = ((sums >> 32) as u32, sums as u32);
        let got = of_line(call, message, expected, bytes);
        if line != got || bytes > payload.bytes as u64 {
            let header = message.header();
            return Err(format!("expected a line with CRC-32 {line:08x}, got {got:08x}, in {header}"));
        }
        // SAFETY: by the caller; not longer than there is room.
        let got = unsafe { Payload { bytes: bytes as usize, ..payload }.sum() };
        if got != expected {
            let header = message.header();
            return Err(format!("expected {bytes} bytes with CRC-32 {expected:08x}, got {got:08x}, of {header}"));
        }
        last.set(call);
        Ok(())
    }
}
