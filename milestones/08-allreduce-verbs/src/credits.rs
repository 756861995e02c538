//! Credits: the counts that keep a sender from overwriting what the receiver has not read. No I/O.
//!
//! ```text
//! sent          messages that we have written to the peer's slots      <= freed_there + slots
//! freed_there   how many of them the peer has freed, as far as we know
//! received      messages of the peer's that are in our slots
//! freed         how many of them we have freed
//! told          how many of those the peer knows of                    >  freed - report
//! ```
//! Every write carries `freed` in its immediate word. Where nothing is sent for a while, a separate write carries it: a
//! *report*, once `report` messages have been freed that the peer does not know of. The library's own is
//! [`layout.rs`](../../../lib/transport/src/verbs/link/layout.rs), with two rings.

/// The purpose of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A message in a slot.
    Message,
    /// Nothing but the count.
    Report,
}

/// The count of freed messages travels modulo this.
const MODULUS: u64 = 1 << 31;

/// The counts of one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credits {
    slots: u64,
    report: u64,
    sent: u64,
    freed_there: u64,
    received: u64,
    freed: u64,
    told: u64,
}

impl Credits {
    /// `depth` messages fit in one direction, however many freed slots the receiver keeps to itself. Both ends must
    /// have the same `depth`.
    pub fn new(depth: u64) -> Credits {
        let report = (depth / 2).max(1);
        // The receiver may keep report - 1 freed slots to itself.
        let slots = depth.max(1) + report - 1;
        Credits { slots, report, sent: 0, freed_there: 0, received: 0, freed: 0, told: 0 }
    }

    /// Slots of each end.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// The slot of the next message, which is ours now; `None` without credit.
    // EXERCISE 3 (Credits by hand): the peer has `slots` slots. Message n goes to slot n modulo `slots`, and only while
    // fewer than `slots` messages are sent and not freed there. Count the message as sent.
    pub fn reserve(&mut self) -> Option<u64> {
        if self.sent - self.freed_there >= self.slots {
            return None;
        }
        let slot = self.sent % self.slots;
        self.sent += 1;
        Some(slot)
    }

    /// The immediate word of the next write. The peer knows of all freed messages then.
    pub fn word(&mut self, kind: Kind) -> u32 {
        self.told = self.freed;
        u32::from(kind == Kind::Report) << 31 | (self.freed % MODULUS) as u32
    }

    /// Reads the immediate word of a write of the peer's.
    ///
    /// # Errors
    /// It frees messages that were not sent, or sends one without credit.
    // EXERCISE 4 (Credits by hand): the lower 31 bits are the peer's `freed` modulo 2^31: find the count at or above
    // `freed_there`. The top bit tells a report from a message, which counts as received. More freed than `sent`, or a
    // message when all our slots are in use, is an error that changes nothing.
    pub fn credit(&mut self, word: u32) -> Result<Kind, String> {
        let ahead = u64::from(word).wrapping_sub(self.freed_there) % MODULUS;
        let freed = self.freed_there + ahead;
        if freed > self.sent {
            return Err(format!("expected that at most {} messages are freed, got {freed}", self.sent));
        }
        let kind = if word >> 31 == 1 { Kind::Report } else { Kind::Message };
        if kind == Kind::Message && self.received - self.freed >= self.slots {
            return Err(format!("expected no message while {} are not freed", self.slots));
        }
        self.freed_there = freed;
        self.received += u64::from(kind == Kind::Message);
        Ok(kind)
    }

    /// The slot of the oldest message that is not freed.
    pub fn oldest(&self) -> Option<u64> {
        (self.freed < self.received).then(|| self.freed % self.slots)
    }

    /// Frees the oldest message. True when the peer must be notified in a separate write.
    // EXERCISE 5 (Credits by hand): count it as freed. A report is due once `report` freed messages are untold.
    pub fn free(&mut self) -> bool {
        self.freed += 1;
        self.freed - self.told >= self.report
    }

    /// Number of receives that must be posted, so that no write of the peer's finds none while we do not look.
    // EXERCISE 6 (Credits by hand): each write of the peer's takes one, messages and reports. Count the messages that
    // it can send while we look at nothing, and the reports if it frees everything that we could send it.
    pub fn receives(&self) -> u64 {
        self.slots + self.slots / self.report
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reserve_takes_one_slot_after_the_other_until_all_are_in_use() {
        let mut c = Credits::new(4);
        let slots: Vec<u64> = std::iter::from_fn(|| c.reserve()).collect();
        assert_eq!(slots, [0, 1, 2, 3, 4], "a depth of 4, and one that the receiver may keep to itself");
        c.freed_there = 2;
        assert_eq!([c.reserve(), c.reserve(), c.reserve()], [Some(0), Some(1), None]);
        assert_eq!(c.sent, 7, "a refusal counts nothing");
    }

    #[test]
    fn credit_reads_what_word_writes_across_the_end_of_the_count() {
        for freed in [0, 5, MODULUS - 1, MODULUS, MODULUS + 3, 7 * MODULUS + 1] {
            let mut peer = Credits { received: freed + 1, freed, ..Credits::new(8) };
            let mut c = Credits { sent: freed + 2, freed_there: freed.saturating_sub(6), ..Credits::new(8) };
            assert_eq!(c.credit(peer.word(Kind::Message)), Ok(Kind::Message), "{freed}");
            assert_eq!((c.freed_there, c.received), (freed, 1));
            assert_eq!(c.credit(peer.word(Kind::Report)), Ok(Kind::Report), "{freed}");
            assert_eq!((c.freed_there, c.received), (freed, 1), "a report is no message");
        }
    }

    #[test]
    fn credit_refuses_what_cannot_be() {
        let mut c = Credits { sent: 3, ..Credits::new(1) };
        let before = c.clone();
        assert!(c.credit(4).is_err(), "more freed than sent");
        assert_eq!(c, before, "an error changes nothing");
        assert_eq!(c.credit(0), Ok(Kind::Message));
        assert!(c.credit(0).is_err(), "a second message in the only slot");
        assert!(c.credit(1 << 31).is_ok(), "a report needs no slot");
    }

    #[test]
    fn free_asks_for_a_report_when_enough_is_untold() {
        let mut c = Credits { received: 100, ..Credits::new(8) };
        let due: Vec<bool> = (0..5).map(|_| c.free()).collect();
        assert_eq!(due, [false, false, false, true, true], "every fourth; it stays due until the peer is told");
        c.word(Kind::Message);
        assert_eq!([c.free(), c.free(), c.free(), c.free()], [false, false, false, true], "a message told it, too");
    }

    #[test]
    fn receives_are_enough_for_the_worst_and_hardly_more() {
        for depth in 1..40 {
            let c = Credits::new(depth);
            // The peer fills our slots, and frees what we have sent in as many writes as it may.
            let worst = c.slots + c.slots / c.report;
            assert!((worst..=worst + 2).contains(&c.receives()), "depth {depth}: {} for {worst}", c.receives());
        }
    }

    /// One end of the model: its counts, its memory, and what comes to it.
    struct End {
        credits: Credits,
        slots: Vec<Option<u64>>,
        arriving: VecDeque<u32>,
        sent: u64,
        read: u64,
    }

    impl End {
        fn new(depth: u64) -> End {
            let credits = Credits::new(depth);
            End { slots: vec![None; credits.slots as usize], credits, arriving: VecDeque::new(), sent: 0, read: 0 }
        }

        fn write(&mut self, peer: &mut End, kind: Kind) {
            peer.arriving.push_back(self.credits.word(kind));
            assert!(peer.arriving.len() as u64 <= peer.credits.receives(), "a write finds no receive");
        }

        fn send(&mut self, peer: &mut End) {
            let Some(slot) = self.credits.reserve() else { return };
            let place = &mut peer.slots[slot as usize];
            assert_eq!(*place, None, "message {} overwrites one that is not read", self.sent);
            *place = Some(self.sent);
            self.sent += 1;
            self.write(peer, Kind::Message);
        }

        fn poll(&mut self) {
            if let Some(word) = self.arriving.pop_front() {
                self.credits.credit(word).unwrap();
            }
        }

        fn read(&mut self, peer: &mut End) {
            let Some(slot) = self.credits.oldest() else { return };
            assert_eq!(self.slots[slot as usize].take(), Some(self.read), "in order");
            self.read += 1;
            if self.credits.free() {
                self.write(peer, Kind::Report);
            }
        }
    }

    proptest! {
        #[test]
        fn any_order_of_sending_looking_and_reading_keeps_every_message(
            depth in 1u64..9,
            steps in proptest::collection::vec((0usize..2, 0u8..8), 0..600),
        ) {
            let [mut a, mut b] = [End::new(depth), End::new(depth)];
            for (who, what) in steps {
                let (this, that) = if who == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
                match what {
                    0..3 => this.send(that),
                    3..6 => this.poll(),
                    _ => this.read(that),
                }
            }
            // Once all is read, `depth` messages fit again, in both directions: no credit is lost.
            while a.arriving.len() + b.arriving.len() > 0 || a.credits.oldest().or(b.credits.oldest()).is_some() {
                a.poll();
                a.read(&mut b);
                b.poll();
                b.read(&mut a);
            }
            prop_assert_eq!((a.read, b.read), (b.sent, a.sent));
            for end in [&mut a, &mut b] {
                let fit = std::iter::from_fn(|| end.credits.reserve()).count() as u64;
                prop_assert!(fit >= depth, "{} of {} fit", fit, depth);
            }
        }
    }
}
