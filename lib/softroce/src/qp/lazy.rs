//! Acknowledgements that travel with requests.
//!
//! A program that answers a message with another one is about to post it when the acknowledgement of the first is due.
//! Sent together they wake the peer once, and cost one system call. So where a request followed the last
//! acknowledgement at once, the next one waits for the next request. Where none comes in time it goes alone, and so do
//! those after it for a while, each time a longer one.
//!
//! Acknowledgements of long messages never wait: the sender's window is full of packets that they make room for.
//!
//! The specification lets a responder coalesce acknowledgements, and sets no time for them but the requester's timeout
//! (9.7.5.1.2).

use super::timers::Nanos;

/// An acknowledgement never waits longer.
pub(super) const LONGEST: Nanos = 400_000;
/// Nanoseconds after an acknowledgement within which a request counts as the answer to what was acknowledged.
const AT_ONCE: Nanos = 50_000;

/// The most that `needed` becomes.
const MOST: u32 = 1 << 16;

#[derive(Debug)]
pub(super) struct Lazy {
    /// Requests that followed acknowledgements at once, since one did not.
    followed: u32,
    /// Value of `followed` from which on one more is expected: multiplied by 4 with each mistake, up to [`MOST`].
    needed: u32,
    /// Time until which the acknowledgement that is due waits; `None` while none waits.
    until: Option<Nanos>,
    last: Nanos,
}

impl Default for Lazy {
    fn default() -> Lazy {
        Lazy { followed: 0, needed: 1, until: None, last: 0 }
    }
}

impl Lazy {
    /// Returns true if the acknowledgement that is due goes now. `sent`: requests go with it; `wait`: nanoseconds for
    /// which it may wait for some.
    pub(super) fn may_send(&mut self, sent: bool, wait: Nanos, now: Nanos) -> bool {
        let due = self.until.is_some_and(|until| until <= now);
        if due {
            (self.followed, self.needed) = (0, (self.needed * 4).min(MOST));
        }
        if sent || due || self.followed < self.needed {
            return true;
        }
        self.until.get_or_insert(now.saturating_add(wait));
        false
    }

    /// Makes the acknowledgement that is owed due now, whether it waits already or not: no request will follow it.
    pub(super) fn hurry(&mut self) {
        self.until = Some(0);
    }

    /// An answer was sent.
    pub(super) fn sent(&mut self, now: Nanos) {
        (self.until, self.last) = (None, now);
    }

    /// A request was sent.
    pub(super) fn requested(&mut self, now: Nanos) {
        if now.saturating_sub(self.last) < AT_ONCE {
            self.followed = self.followed.saturating_add(1);
        } else {
            self.followed = 0;
        }
    }

    pub(super) fn due(&self) -> Option<Nanos> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_answers_at_once_is_waited_for() {
        let mut lazy = Lazy::default();
        assert!(lazy.may_send(false, LONGEST, 0), "nothing is expected at first");
        lazy.sent(0);
        lazy.requested(AT_ONCE - 1);
        assert!(!lazy.may_send(false, 100, AT_ONCE));
        assert_eq!(lazy.due(), Some(AT_ONCE + 100));
        assert!(lazy.may_send(true, 100, AT_ONCE + 1), "with a request");
        lazy.sent(AT_ONCE + 1);
        assert!(!lazy.may_send(false, 100, 2 * AT_ONCE));
        assert!(lazy.may_send(false, 100, 2 * AT_ONCE + 100), "no request came in time");
        lazy.sent(2 * AT_ONCE + 100);
        assert!(lazy.may_send(false, 100, 3 * AT_ONCE + 100), "nor is another waited for");
    }
}
