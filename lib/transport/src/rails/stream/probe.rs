//! Probes of the far end of a relayed stream.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A control frame that a stream alone may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) enum Due {
    Ping,
    Pong,
}

/// Liveness probe of a relayed stream's far end: a relay's kernel acknowledges what may get no further.
#[derive(Debug, Default)]
pub(in crate::rails) struct Probe {
    /// Reads that brought something.
    received: AtomicU64,
    /// Value of `received` when the peer was probed last, plus 1; 0 if it was not.
    pinged: AtomicU64,
    /// Control frames that this stream alone may carry: probes, and replies to them.
    ping_due: AtomicBool,
    pong_due: AtomicBool,
}

impl Probe {
    pub(in crate::rails) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(in crate::rails) fn count_received(&self) {
        self.received.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::rails) fn ping(&self) {
        self.pinged.store(self.received() + 1, Ordering::Relaxed);
        self.ping_due.store(true, Ordering::Release);
    }

    /// Resets the probe state, as before the first control frame.
    pub(in crate::rails) fn reset(&self) {
        self.pinged.store(0, Ordering::Relaxed);
        self.ping_due.store(false, Ordering::Relaxed);
        self.pong_due.store(false, Ordering::Relaxed);
    }

    pub(in crate::rails) fn pong(&self) {
        self.pong_due.store(true, Ordering::Release);
    }

    /// Returns true if the peer was probed, and nothing has come since.
    pub(in crate::rails) fn is_pinged(&self) -> bool {
        self.pinged.load(Ordering::Relaxed) == self.received() + 1
    }

    /// Takes what is due on this stream: a reply first, then a probe.
    pub(in crate::rails) fn due(&self) -> Option<Due> {
        let due = |flag: &AtomicBool| flag.load(Ordering::Relaxed) && flag.swap(false, Ordering::AcqRel);
        if due(&self.pong_due) { Some(Due::Pong) } else { due(&self.ping_due).then_some(Due::Ping) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_awaited_until_anything_comes() {
        let probe = Probe::default();
        assert!(!probe.is_pinged() && probe.due().is_none());
        probe.ping();
        probe.pong();
        assert_eq!((probe.due(), probe.due(), probe.due()), (Some(Due::Pong), Some(Due::Ping), None));
        assert!(probe.is_pinged());
        probe.count_received();
        assert!(!probe.is_pinged() && probe.received() == 1);
    }
}
