//! Messages that a rank has sent and received point to point. They are not compared, as their order is the ranks' own;
//! only records have them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::ring::{Recorded, Ring};

/// A message, as one of its ends made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Rank at the other end.
    pub peer: u32,
    /// True at the sender.
    pub sends: bool,
    /// Its number among those from the one to the other.
    pub seq: u32,
    /// Code of the type.
    pub dtype: u8,
    /// Elements.
    pub count: u64,
}

impl From<&Recorded> for Message {
    fn from(entry: &Recorded) -> Message {
        let [sends, dtype, ..] = entry.kind.to_le_bytes();
        Message {
            peer: (entry.kind >> 32) as u32,
            sends: sends == SENDS,
            seq: entry.stamp as u32,
            dtype,
            count: entry.count,
        }
    }
}

/// Distinguishes a message sent from one received; neither makes a stamp of 0.
const SENDS: u8 = 1;

/// The messages of one rank, numbered in the order in which it made them, from 1.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    /// Most communicators have none.
    ring: OnceLock<Ring>,
    begun: AtomicU32,
    over: AtomicU32,
}

impl Messages {
    /// One more message. By one thread at a time.
    #[inline]
    pub(crate) fn push(&self, message: &Message) {
        let number = self.begun.load(Ordering::Relaxed).wrapping_add(1);
        let kind =
            u64::from(message.peer) << 32 | u64::from_le_bytes([message.sends.into(), message.dtype, 0, 0, 0, 0, 0, 0]);
        let stamp = u64::from(number) << 32 | u64::from(message.seq);
        self.ring.get_or_init(Ring::default).write(stamp, [message.count, kind], message.count.saturating_mul(4));
        self.begun.store(number, Ordering::Release);
    }

    /// The last message waits.
    pub(crate) fn waits(&self) {
        if let (begun, Some(ring)) = (self.begun.load(Ordering::Relaxed), self.ring.get())
            && begun != self.over.load(Ordering::Relaxed)
        {
            ring.waits(begun);
        }
    }

    /// All messages so far are over.
    #[inline]
    pub(crate) fn over(&self) {
        let number = self.begun.load(Ordering::Relaxed);
        if number != self.over.load(Ordering::Relaxed)
            && let Some(ring) = self.ring.get()
        {
            ring.over(number);
            self.over.store(number, Ordering::Relaxed);
        }
    }

    /// Returns the numbers of the messages that were begun and were over last.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (self.begun.load(Ordering::Relaxed), self.over.load(Ordering::Relaxed))
    }

    /// Returns the last messages in order, each with whether it is over.
    pub(crate) fn last(&self, most: usize) -> Vec<(Recorded, bool)> {
        let begun = self.begun.load(Ordering::Acquire);
        let over = self.over.load(Ordering::Relaxed);
        let all = self.ring.get().map_or_else(Vec::new, |ring| ring.last(begun, most));
        // The newest are `begun`, and those after `over` are under way.
        all.into_iter().map(|one| (one, begun.wrapping_sub(one.number()) >= begun.wrapping_sub(over))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_over_together() {
        let messages = Messages::default();
        let message = |seq, sends| Message { peer: 3, sends, seq, dtype: 6, count: 1 << 40 };
        messages.over();
        assert_eq!(messages.last(9), []);
        messages.push(&message(u32::MAX, true));
        messages.over();
        messages.push(&message(0, false));
        messages.push(&message(1, true));
        messages.waits();
        let last = |most| messages.last(most).iter().map(|(one, over)| (Message::from(one), *over)).collect::<Vec<_>>();
        assert_eq!(last(9), [(message(u32::MAX, true), true), (message(0, false), false), (message(1, true), false)]);
        messages.over();
        assert_eq!(last(1), [(message(1, true), true)]);
        assert!(messages.last(9)[2].0.over > 0 && messages.last(9)[1].0.over == 0, "only the last one has a time");
    }
}
