//! Which messages of the slots are whole: their stripes come over several queue pairs, in any order.
//!
//! The header comes over the first queue pair, with the first stripe. A further stripe's immediate word is the number of its
//! slot. A slot is freed only when its message is whole, and written again only after that: so all that is known of a slot is
//! of one message, whatever overtakes what.

use super::stripes::Stripes;

/// What is here of the message in a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Slot {
    /// A bit per queue pair whose stripe is here.
    here: u32,
    /// The stripes that it is made of; 0 until the header is here.
    wanted: u32,
    /// Bytes of the stripes besides the first that are here, and that there are.
    bytes: usize,
    wanted_bytes: usize,
}

/// All slots of a link's target memory.
#[derive(Debug)]
pub(super) struct Reassembly {
    stripes: Stripes,
    slots: Vec<Slot>,
}

impl Reassembly {
    pub(super) fn new(stripes: Stripes, slots: usize) -> Reassembly {
        Reassembly { stripes, slots: vec![Slot::default(); slots] }
    }

    /// The header of a message of `len` bytes is in `slot`, with its first stripe.
    ///
    /// # Errors
    /// What is wrong with it, in words, when the peer breaks the protocol.
    #[inline]
    pub(super) fn head(&mut self, slot: usize, len: usize) -> Result<(), String> {
        let count = self.stripes.count(len);
        let rest = len - self.stripes.range(len, 0).len();
        let Some(known) = self.slots.get_mut(slot).filter(|s| s.wanted == 0) else {
            return Err(format!("expected no header in slot {slot}, got one of {len} bytes"));
        };
        known.here |= 1;
        known.wanted = (1 << count) - 1;
        known.wanted_bytes = rest;
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

    /// Whether all of the message is here.
    #[inline]
    pub(super) fn is_whole(&self, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(|s| s.wanted != 0 && s.here == s.wanted)
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
        if self.wanted == 0 {
            return Ok(());
        }
        let whole = self.here == self.wanted;
        if self.here & !self.wanted != 0 || whole && self.bytes != self.wanted_bytes {
            let (n, expected, got, bytes) =
                (self.wanted.count_ones(), self.wanted_bytes, self.here.count_ones(), self.bytes);
            return Err(format!(
                "expected {n} stripes in slot {slot}, {expected} bytes besides the first, got {got} of them, {bytes} bytes"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const SLOTS: usize = 4;

    /// A completion: from which queue pair, for which slot, of how many bytes (of the message, where it is the header's).
    type Event = (usize, usize, usize);

    #[test]
    fn what_breaks_the_protocol_is_said() {
        let stripes = Stripes::new(4);
        let fresh = || Reassembly::new(stripes, SLOTS);
        let len = 1 << 16;
        let mut twice = fresh();
        twice.head(0, len).unwrap();
        assert!(twice.head(0, len).unwrap_err().contains("no header in slot 0"));
        twice.stripe(0, 1, 16 << 10).unwrap();
        assert!(twice.stripe(0, 1, 16 << 10).unwrap_err().contains("no stripe 1 in slot 0"));
        assert!(twice.stripe(SLOTS, 1, 1).is_err() && twice.head(SLOTS, 1).is_err());
        // A stripe that no message of this length has, before its header and after it.
        let mut early = fresh();
        early.stripe(2, 1, 100).unwrap();
        assert!(early.head(2, 100).unwrap_err().contains("expected 1 stripes in slot 2, 0 bytes besides"));
        let mut late = fresh();
        late.head(3, 100).unwrap();
        assert!(late.is_whole(3));
        assert!(late.stripe(3, 2, 7).unwrap_err().contains("got 2 of them, 7 bytes"));
        let mut short = fresh();
        short.head(1, 1 << 15).unwrap();
        assert!(short.stripe(1, 1, 100).unwrap_err().contains("16384 bytes besides the first"));
    }

    proptest! {
        /// Every queue pair keeps its order; which of them is next is anyone's choice. Messages come out in order, each when its
        /// last stripe is in and not before.
        #[test]
        fn messages_come_out_in_order_whichever_queue_pair_is_ahead(
            qps in 1usize..=6,
            lens in proptest::collection::vec(prop_oneof![0usize..2000, 30_000usize..300_000], 1..24),
            choices in proptest::collection::vec((any::<u8>(), any::<u8>()), 0..400),
        ) {
            let stripes = Stripes::new(qps);
            let mut reassembly = Reassembly::new(stripes, SLOTS);
            let mut ways: Vec<VecDeque<Event>> = vec![VecDeque::new(); qps];
            // Messages written, announced by their header, taken out; and stripes of each that are here.
            let (mut sent, mut announced, mut taken) = (0, 0, 0);
            let mut here = vec![0usize; lens.len()];
            let mut choices = choices.into_iter();
            while taken < lens.len() {
                // When the choices are over everything goes on, one after the other.
                let (what, which) = choices.next().unwrap_or((taken as u8, sent as u8));
                let (what, which) = (usize::from(what), usize::from(which));
                if sent < lens.len() && sent < taken + SLOTS && (what % 2 == 0 || ways.iter().all(VecDeque::is_empty)) {
                    let len = lens[sent];
                    ways[0].push_back((0, sent % SLOTS, len));
                    for (qp, way) in ways.iter_mut().enumerate().take(stripes.count(len)).skip(1) {
                        way.push_back((qp, sent % SLOTS, stripes.range(len, qp).len()));
                    }
                    sent += 1;
                } else if let Some(way) = (0..qps).map(|i| (which + i) % qps).find(|&w| !ways[w].is_empty()) {
                    let (qp, slot, len) = ways[way].pop_front().unwrap();
                    let outcome = if qp == 0 {
                        announced += 1;
                        reassembly.head(slot, len)
                    } else {
                        reassembly.stripe(slot, qp, len)
                    };
                    prop_assert_eq!(outcome, Ok(()));
                    let message = (taken..sent).find(|m| m % SLOTS == slot).unwrap();
                    here[message] += 1;
                }
                for message in taken..sent {
                    let whole = message < announced && here[message] == stripes.count(lens[message]);
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
