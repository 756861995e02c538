//! The two waits of a requester: for an acknowledgement, and for a receiver that was not ready.

use crate::wire::aeth::rnr_nanos;

/// Nanoseconds on the clock of the thread that drives the queue pair.
pub(crate) type Nanos = u64;

/// The acknowledgement timeout of a code: 4.096 µs times 2^code (InfiniBand specification, 9.7.6.1.3); `None` for 0,
/// forever.
pub(super) fn ack_timeout(code: u8) -> Option<Nanos> {
    (code != 0).then(|| 4096u64 << code.min(31))
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    /// Time at which packets count as lost if nothing comes before; `None` while nothing is waited for.
    pub(super) ack: Option<Nanos>,
    /// Time before which nothing is sent; `None` unless the receiver was not ready.
    pub(super) rnr: Option<Nanos>,
}

impl Timers {
    /// Begins the wait for an acknowledgement anew.
    pub(super) fn await_ack(&mut self, now: Nanos, code: u8) {
        self.ack = ack_timeout(code).map(|wait| now.saturating_add(wait));
    }

    /// Begins the wait that a receiver without a posted receive requested.
    pub(super) fn await_receiver(&mut self, now: Nanos, code: u8) {
        self.ack = None;
        self.rnr = Some(now.saturating_add(rnr_nanos(code)));
    }

    pub(super) fn next(&self) -> Option<Nanos> {
        self.rnr.or(self.ack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_double() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(1), Some(8192));
        assert_eq!(ack_timeout(14), Some(67_108_864));
        assert_eq!(ack_timeout(31), Some(4096 << 31));
    }
}
