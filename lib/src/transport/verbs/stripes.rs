//! How a long message is split over the queue pairs of a link.
//!
//! ```text
//! queue pair 0   | header, stripe 0 | header, payload | header, stripe 0 | ...
//! queue pair 1   | stripe 1         |                 | stripe 1         |
//! queue pair 2   | stripe 2         |  short message: | stripe 2         |
//! ```
//! Both ends compute the stripes from the length in the header. Each stripe is one write, to its place in the slot: where it
//! lies there does not depend on how many queue pairs there are. Queue pairs may be those of several ports ("rails"), whose
//! wires then carry a share each; several on one port go several ways where the network chooses a way per flow (ECMP, link
//! aggregation), and through several engines of a device that works on one queue pair at a time.
//!
//! The idea is NCCL's `NCCL_IB_QPS_PER_CONNECTION` and its merged devices (`src/transport/net_ib`).

use std::ops::Range;

use super::MAX_QPS;

/// Shorter stripes are not worth a request and a completion each.
const SHORTEST: usize = 16 << 10;
/// Stripes begin at multiples of this, the largest payload of a packet: then no packet is sent that could be spared.
const BLOCK: usize = 4096;

/// The queue pairs of a link, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stripes {
    qps: usize,
}

impl Stripes {
    pub(super) fn new(qps: usize) -> Stripes {
        Stripes { qps: qps.clamp(1, MAX_QPS) }
    }

    /// Queue pairs that a message of `len` bytes goes over: the first so many.
    #[inline]
    pub(super) fn count(&self, len: usize) -> usize {
        if self.qps == 1 { 1 } else { (len / SHORTEST).clamp(1, self.qps) }
    }

    /// The part of a payload of `len` bytes that queue pair `qp` carries. They differ by a block at most.
    #[inline]
    pub(super) fn range(&self, len: usize, qp: usize) -> Range<usize> {
        let count = self.count(len);
        if count == 1 {
            return if qp == 0 { 0..len } else { len..len };
        }
        let blocks = len.div_ceil(BLOCK);
        let edge = |qp: usize| (qp * blocks / count * BLOCK).min(len);
        edge(qp)..edge(qp + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_messages_stay_whole_and_long_ones_use_all_queue_pairs() {
        let stripes = Stripes::new(4);
        let counts = [0, 480, 32767, 32768, 49152, 65536, 1 << 20].map(|len| stripes.count(len));
        assert_eq!(counts, [1, 1, 1, 2, 3, 4, 4]);
        assert_eq!(stripes.range(65536, 1), 16384..32768);
        assert_eq!(stripes.range(70_001, 3), 53248..70_001);
        assert_eq!(Stripes::new(1).count(1 << 30), 1);
    }

    proptest! {
        #[test]
        fn stripes_cover_a_message_once(
            qps in 1..=MAX_QPS,
            len in prop_oneof![0usize..600_000, 0usize..=1 << 30, (0usize..300, 0usize..3).prop_map(|(k, d)| (k * SHORTEST + d).saturating_sub(1))],
        ) {
            let stripes = Stripes::new(qps);
            let count = stripes.count(len);
            prop_assert!((1..=qps).contains(&count));
            let mut at = 0;
            let (mut shortest, mut longest) = (usize::MAX, 0);
            for qp in 0..count {
                let stripe = stripes.range(len, qp);
                prop_assert_eq!(stripe.start, at);
                prop_assert!(stripe.start.is_multiple_of(BLOCK));
                prop_assert!(count == 1 || stripe.len() >= SHORTEST - BLOCK, "{} bytes", stripe.len());
                (shortest, longest) = (shortest.min(stripe.len()), longest.max(stripe.len()));
                at = stripe.end;
            }
            prop_assert_eq!(at, len);
            // A block more, and the last one may lack most of one.
            prop_assert!(longest - shortest < 2 * BLOCK);
            for qp in count..=MAX_QPS {
                prop_assert!(stripes.range(len, qp).is_empty());
            }
        }
    }
}
