//! Split of a long message over the queue pairs of a link.
//!
//! ```text
//! queue pair 0   | header, stripe 0 | header, payload | header, stripe 0 | ...
//! queue pair 1   | stripe 1         |                 | stripe 1         |
//! queue pair 2   | stripe 2         |  short message: | stripe 2         |
//! ```
//! Each stripe is one write, to its place in the slot: where it lies there does not depend on how many queue pairs
//! there are. Queue pairs may be those of several ports ("nics"), whose wires then carry a share each; several on one
//! port take several paths where the network chooses a path per flow (ECMP, link aggregation), and go through several
//! engines of a device that works on one queue pair at a time.
//!
//! The cut is the sender's alone: the receiver counts bytes (`reassembly`). So it may change from message to message,
//! and follows what the queue pairs were measured to carry (`pace`). Until then, and where they are alike, all stripes
//! are equal.
//!
//! The idea is NCCL's `NCCL_IB_QPS_PER_CONNECTION` and its merged devices (`src/transport/net_ib`), whose stripes are
//! even.

use std::ops::Range;

use tinynccl_sys::config::MAX_QPS;

/// Shorter stripes are not worth a request and a completion each.
const SHORTEST: usize = 16 << 10;
/// Stripes begin at multiples of this, the largest payload of a packet: then no packet is sent that could be spared.
const BLOCK: usize = 4096;

/// Larger weights count as this one: sums and products stay small.
const MOST: u32 = 1 << 16;

/// The queue pairs of a link, by number, and what share of a long message each carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stripes {
    qps: usize,
    /// Edge `i` of the shares, in parts of the last one: queue pair `i` has what lies between edges `i` and `i + 1`.
    edges: [u32; MAX_QPS + 1],
    even: bool,
}

impl Stripes {
    /// Equal shares.
    pub(super) fn new(qps: usize) -> Stripes {
        let qps = qps.clamp(1, MAX_QPS);
        Stripes { qps, edges: std::array::from_fn(|i| i.min(qps) as u32), even: true }
    }

    /// Shares in proportion to `weights`, one per queue pair; all equal (or all 0) are the cut of [`Stripes::new`].
    pub(super) fn weigh(&mut self, weights: &[u32]) {
        *self = Stripes::new(self.qps);
        let weight = |qp: usize| weights.get(qp).copied().unwrap_or(0).min(MOST);
        if (1..self.qps).all(|qp| weight(qp) == weight(0)) {
            return;
        }
        self.even = false;
        let mut sum = 0;
        for (qp, edge) in self.edges.iter_mut().skip(1).enumerate() {
            sum += if qp < self.qps { weight(qp) } else { 0 };
            *edge = sum;
        }
    }

    /// Number of queue pairs that a message of `len` bytes is long enough for; it goes over the first of them.
    #[inline]
    pub(super) fn count(&self, len: usize) -> usize {
        if self.qps == 1 { 1 } else { (len / SHORTEST).clamp(1, self.qps) }
    }

    /// Returns true if a message of `len` bytes is cut for all of the queue pairs.
    #[inline]
    pub(super) fn uses_all(&self, len: usize) -> bool {
        self.qps > 1 && self.count(len) == self.qps
    }

    /// The part of a payload of `len` bytes that queue pair `qp` carries. Messages too short for all queue pairs are
    /// cut evenly over the first. Of longer ones each has a block, so that all are measured again, and the rest is cut
    /// by the shares.
    #[inline]
    pub(super) fn range(&self, len: usize, qp: usize) -> Range<usize> {
        let count = self.count(len);
        if count == 1 {
            return if qp == 0 { 0..len } else { len..len };
        }
        let blocks = len.div_ceil(BLOCK);
        if self.even || count < self.qps {
            let edge = |qp: usize| (qp * blocks / count * BLOCK).min(len);
            return edge(qp)..edge(qp + 1);
        }
        let [part, next, whole] = [qp, qp + 1, self.qps].map(|i| self.edges[i.min(self.qps)] as usize);
        let rest = blocks - self.qps;
        let edge = |qp: usize, part: usize| ((qp.min(self.qps) + rest * part / whole.max(1)) * BLOCK).min(len);
        edge(qp, part)..edge(qp + 1, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Lengths of messages, those around multiples of the shortest stripe too.
    fn lengths() -> impl Strategy<Value = usize> {
        let near = (0usize..300, 0usize..3).prop_map(|(k, d)| (k * SHORTEST + d).saturating_sub(1));
        prop_oneof![0usize..600_000, 0usize..=1 << 30, near]
    }

    #[test]
    fn short_messages_stay_whole_and_long_ones_use_all_queue_pairs() {
        let stripes = Stripes::new(4);
        let counts = [0, 480, 32767, 32768, 49152, 65536, 1 << 20].map(|len| stripes.count(len));
        assert_eq!(counts, [1, 1, 1, 2, 3, 4, 4]);
        assert_eq!(stripes.range(65536, 1), 16384..32768);
        assert_eq!(stripes.range(70_001, 3), 53248..70_001);
        assert_eq!(Stripes::new(1).count(1 << 30), 1);
    }

    #[test]
    fn a_queue_pair_that_is_three_times_as_fast_carries_three_quarters() {
        let mut stripes = Stripes::new(2);
        stripes.weigh(&[300, 100]);
        // Of 256 blocks one each, and three quarters of 254.
        assert_eq!((stripes.range(1 << 20, 0), stripes.range(1 << 20, 1)), (0..764 << 10, 764 << 10..1 << 20));
        stripes.weigh(&[1000, 1]);
        assert_eq!(stripes.range(64 << 10, 1), 56 << 10..64 << 10, "a block to be measured by, and what rounding left");
        stripes.weigh(&[7, 7]);
        assert_eq!(stripes, Stripes::new(2), "equal weights are the even cut");
        stripes.weigh(&[0, 0]);
        assert_eq!(stripes, Stripes::new(2));
    }

    proptest! {
        #[test]
        fn stripes_cover_a_message_once(qps in 1..=MAX_QPS, len in lengths()) {
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

        #[test]
        fn weighed_stripes_cover_a_message_once_and_in_proportion(
            weights in proptest::collection::vec(prop_oneof![0u32..10, any::<u32>()], 1..=MAX_QPS), len in lengths(),
        ) {
            let mut stripes = Stripes::new(weights.len());
            stripes.weigh(&weights);
            let mut at = 0;
            for qp in 0..weights.len() {
                let stripe = stripes.range(len, qp);
                prop_assert_eq!(stripe.start, at);
                prop_assert!(stripe.start.is_multiple_of(BLOCK) || stripe.start == len);
                at = stripe.end;
            }
            prop_assert_eq!(at, len);
            let sum: f64 = weights.iter().map(|w| f64::from(*w.min(&MOST))).sum();
            if stripes.uses_all(len) && sum > 0.0 {
                let rest = len as f64 - (weights.len() * BLOCK) as f64;
                for (qp, weight) in weights.iter().enumerate() {
                    // Each edge is at the block before its place, and the last one at the end.
                    let fair = BLOCK as f64 + f64::from(*weight.min(&MOST)) / sum * rest;
                    let bytes = stripes.range(len, qp).len();
                    prop_assert!(bytes > 0 && (bytes as f64 - fair).abs() <= 2.0 * BLOCK as f64, "{weights:?} {qp}: {bytes}");
                }
            }
            let even = Stripes::new(weights.len());
            if weights.iter().all(|w| *w == weights[0]) || !stripes.uses_all(len) {
                for qp in 0..weights.len() {
                    prop_assert_eq!(stripes.range(len, qp), even.range(len, qp));
                }
            }
        }
    }
}
