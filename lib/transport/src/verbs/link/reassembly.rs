//! Reassembly of messages in the slots: their stripes come over several queue pairs, in any order.
//!
//! The header comes over the first queue pair, with the first stripe. A further stripe's immediate word is the number
//! of its slot. A slot is freed only when its message is whole, and written again only after that: so all that is known
//! of a slot is of one message, whatever overtakes what.
//!
//! The cut is the sender's affair: the header has the length of the message, and the device reports the bytes of each
//! write. A message is whole when all its bytes are here.

/// The parts of the message in a slot that are here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Slot {
    /// A bit per queue pair whose stripe is here.
    here: u32,
    /// Bytes of the stripes besides the first that are here.
    bytes: usize,
    /// Bytes besides the first stripe that there are, once the header is here.
    wanted: Option<usize>,
}

/// All slots of a link's target memory.
#[derive(Debug)]
pub(super) struct Reassembly {
    slots: Vec<Slot>,
}

impl Reassembly {
    pub(super) fn new(slots: usize) -> Reassembly {
        Reassembly { slots: vec![Slot::default(); slots] }
    }

    /// The header of a message of `len` bytes is in `slot`, with its first stripe of `first` bytes.
    ///
    /// # Errors
    /// The mistake in words, when the peer breaks the protocol.
    #[inline]
    pub(super) fn head(&mut self, slot: usize, len: usize, first: usize) -> Result<(), String> {
        let Some(known) = self.slots.get_mut(slot).filter(|s| s.wanted.is_none()) else {
            return Err(format!("expected no header in slot {slot}, got one of {len} bytes"));
        };
        let Some(rest) = len.checked_sub(first) else {
            return Err(format!("expected at most the {len} bytes of the message in slot {slot}, got {first}"));
        };
        known.here |= 1;
        known.wanted = Some(rest);
        known.check(slot)
    }

    /// A stripe of `len` bytes from queue pair `qp`, not the first, is in `slot`.
    ///
    /// # Errors
    /// As [`Reassembly::head`].
    pub(super) fn stripe(&mut self, slot: usize, qp: usize, len: usize) -> Result<(), String> {
        let Some(known) = self.slots.get_mut(slot).filter(|s| s.here & 1 << qp == 0) else {
            return Err(format!("expected no stripe {qp} in slot {slot}, got one of {len} bytes"));
        };
        known.here |= 1 << qp;
        known.bytes = known.bytes.saturating_add(len);
        known.check(slot)
    }

    /// Returns true if all of the message in `slot` is here.
    #[inline]
    pub(super) fn is_whole(&self, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(|s| s.wanted == Some(s.bytes))
    }

    /// The message in `slot` is not needed any more.
    #[inline]
    pub(super) fn free(&mut self, slot: usize) {
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Slot::default();
        }
    }
}

impl Slot {
    #[inline]
    fn check(&self, slot: usize) -> Result<(), String> {
        match self.wanted {
            Some(wanted) if self.bytes > wanted => {
                let (stripes, bytes) = (self.here.count_ones(), self.bytes);
                Err(format!(
                    "expected {wanted} bytes besides the first stripe in slot {slot}, got {bytes} in {stripes} stripes"
                ))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::stripes::Stripes;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const SLOTS: usize = 4;

    /// A completion: from which queue pair, for which slot, of how many bytes, and of the message (where it is the
    /// header's).
    type Event = (usize, usize, usize, usize);

    #[test]
    fn what_breaks_the_protocol_is_said() {
        let fresh = || Reassembly::new(SLOTS);
        let (len, first) = (1 << 16, 16 << 10);
        let mut twice = fresh();
        twice.head(0, len, first).unwrap();
        assert!(twice.head(0, len, first).unwrap_err().contains("no header in slot 0"));
        twice.stripe(0, 1, 16 << 10).unwrap();
        assert!(twice.stripe(0, 1, 16 << 10).unwrap_err().contains("no stripe 1 in slot 0"));
        assert!(twice.stripe(SLOTS, 1, 1).is_err() && twice.head(SLOTS, 1, 1).is_err());
        // A stripe that no message of this length has, before its header and after it.
        let mut early = fresh();
        early.stripe(2, 1, 100).unwrap();
        assert!(
            early
                .head(2, 100, 100)
                .unwrap_err()
                .contains("expected 0 bytes besides the first stripe in slot 2, got 100")
        );
        let mut late = fresh();
        late.head(3, 100, 100).unwrap();
        assert!(late.is_whole(3));
        assert!(late.stripe(3, 2, 7).unwrap_err().contains("got 7 in 2 stripes"));
        // More than the message has, in the first write and in a later one; less is not whole.
        assert!(fresh().head(1, 100, 101).unwrap_err().contains("at most the 100 bytes"));
        let mut short = fresh();
        short.head(1, 1 << 15, 16 << 10).unwrap();
        short.stripe(1, 1, 100).unwrap();
        assert!(!short.is_whole(1));
        assert!(short.stripe(1, 2, 16 << 10).unwrap_err().contains("expected 16384 bytes besides the first"));
    }

    proptest! {
        /// Every queue pair keeps its order; which of them is next is anyone's choice. Messages come out in order, each
        /// when its last stripe is in and not before.
        #[test]
        fn messages_come_out_in_order_whichever_queue_pair_is_ahead(
            shares in proptest::collection::vec(0u32..100, 1..=6),
            lens in proptest::collection::vec(prop_oneof![0usize..2000, 30_000usize..300_000], 1..24),
            choices in proptest::collection::vec((any::<u8>(), any::<u8>()), 0..400),
        ) {
            let qps = shares.len();
            let mut stripes = Stripes::new(qps);
            stripes.weigh(&shares);
            let mut reassembly = Reassembly::new(SLOTS);
            let mut ways: Vec<VecDeque<Event>> = vec![VecDeque::new(); qps];
            // Messages written, announced by their header, taken out; and stripes of each that are here.
            let (mut sent, mut announced, mut taken) = (0, 0, 0);
            let mut here = vec![0usize; lens.len()];
            let mut stripes_of = vec![1usize; lens.len()];
            let mut choices = choices.into_iter();
            while taken < lens.len() {
                // When the choices are over everything goes on, one after the other.
                let (what, which) = choices.next().unwrap_or((taken as u8, sent as u8));
                let (what, which) = (usize::from(what), usize::from(which));
                if sent < lens.len() && sent < taken + SLOTS && (what % 2 == 0 || ways.iter().all(VecDeque::is_empty)) {
                    let len = lens[sent];
                    ways[0].push_back((0, sent % SLOTS, stripes.range(len, 0).len(), len));
                    for (qp, way) in ways.iter_mut().enumerate().skip(1) {
                        let bytes = stripes.range(len, qp).len();
                        if bytes > 0 {
                            way.push_back((qp, sent % SLOTS, bytes, 0));
                            stripes_of[sent] += 1;
                        }
                    }
                    sent += 1;
                } else if let Some(way) = (0..qps).map(|i| (which + i) % qps).find(|&w| !ways[w].is_empty()) {
                    let (qp, slot, bytes, len) = ways[way].pop_front().unwrap();
                    let outcome = if qp == 0 {
                        announced += 1;
                        reassembly.head(slot, len, bytes)
                    } else {
                        reassembly.stripe(slot, qp, bytes)
                    };
                    prop_assert_eq!(outcome, Ok(()));
                    let message = (taken..sent).find(|m| m % SLOTS == slot).unwrap();
                    here[message] += 1;
                }
                for message in taken..sent {
                    let whole = message < announced && here[message] == stripes_of[message];
                    prop_assert_eq!(reassembly.is_whole(message % SLOTS), whole);
                }
                while taken < announced && reassembly.is_whole(taken % SLOTS) {
                    reassembly.free(taken % SLOTS);
                    taken += 1;
                }
            }
            prop_assert!(reassembly.slots.iter().all(|s| *s == Slot::default()));
        }
    }
}
