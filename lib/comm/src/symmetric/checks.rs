//! Sums in the shared region, of the calls that `TINYNCCL_VERIFY` chooses: a writer stores them beside its line, and a
//! reader compares them before it uses the line or its payload.

use std::cell::Cell;

use super::layout::Sum;
use super::turn::{Differs, Message};
use crate::verify::{self, Chosen};
use tinynccl_plan::wire::Header;

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
        verify::sum(unsafe { std::slice::from_raw_parts(self.at, self.bytes) }) as u32
    }
}

/// The checks of one rank.
#[derive(Debug)]
pub(super) struct Checks {
    /// The last checked call of each rank: a step that waits for several ranks polls those that have arrived again.
    last: Vec<Cell<u64>>,
    chosen: Chosen,
}

fn of_line(call: u64, message: &Message, payload: u32, bytes: u64) -> u32 {
    let mut words = [call, u64::from(payload), bytes, 0, 0, 0, 0, 0, 0, 0];
    words[3..7].copy_from_slice(&message.header);
    words[7..].copy_from_slice(&message.inline);
    verify::sum(bytemuck::cast_slice(&words)) as u32
}

impl Checks {
    pub(super) fn new(ranks: usize, chosen: Chosen) -> Checks {
        Checks { last: vec![Cell::new(0); ranks], chosen }
    }

    /// True if this call is verified.
    #[inline]
    pub(super) fn has(&self, header: &Header) -> bool {
        self.chosen.has(header.seq)
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
    /// The difference.
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
    ) -> Result<(), Differs> {
        let Some(last) = self.last.get(rank).filter(|last| last.get() != call) else { return Ok(()) };
        let [sums, bytes] = sum.load();
        let (line, expected) = ((sums >> 32) as u32, sums as u32);
        let got = of_line(call, message, expected, bytes);
        if line != got || bytes > payload.bytes as u64 {
            let bytes = size_of_val(&message.header) + size_of_val(&message.inline);
            return Err(Differs { offset: 0, bytes, expected: u64::from(line), got: u64::from(got) });
        }
        // SAFETY: by the caller; not longer than there is room.
        let got = unsafe { Payload { bytes: bytes as usize, ..payload }.sum() };
        if got != expected {
            let bytes = bytes as usize;
            return Err(Differs { offset: 0, bytes, expected: u64::from(expected), got: u64::from(got) });
        }
        last.set(call);
        Ok(())
    }
}
