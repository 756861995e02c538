//! A buffer that the ranks of a host share out among them, so that each passes its share on to the other hosts.
//!
//! The buffer is cut into *pieces*, and each piece into as many shares as the host has ranks:
//!
//! ```text
//! buffer   | piece 0         | piece 1         | piece 2         | tail |
//! shares   | 0 | 1 | 2 | 3   | 0 | 1 | 2 | 3   | 0 | 1 | 2 | 3   |      |
//! ```
//! The *tail* is the part that cannot be shared out evenly, and all of a short buffer: every rank passes all of it on.

use super::route::{Grid, LINE};

/// Bytes up to which a buffer is all tail: that is a kernel less than sharing it out, and short messages cost their
/// latency alone. Not measured on several hosts.
pub(crate) const SHORT: u64 = 8 << 10;

/// A buffer shared out by the ranks of a host. Equal on all ranks but for the lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    lanes: u64,
    /// The share of each piece that is ours.
    lane: u64,
    /// Bytes of a rank's shares together.
    share: u64,
    tail: u64,
    /// Bytes of a share of a piece but the last.
    chunk: u64,
}

/// A piece of the buffer: `lanes` shares, or the tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Offset in the buffer.
    pub(crate) first: u64,
    /// Bytes of each share, or of the tail.
    pub(crate) each: u64,
    /// Offset of the share where those of a rank lie behind each other.
    pub(crate) packed: u64,
    pub(crate) is_tail: bool,
}

impl Shares {
    /// The shares of a buffer of `count` elements of `element` bytes.
    pub(crate) fn new(count: usize, element: usize, (lane, lanes): (usize, usize), grid: &Grid) -> Shares {
        let (lane, lanes, bytes) = (lane as u64, lanes.max(1) as u64, (count * element) as u64);
        let share = match bytes {
            0..=SHORT => 0,
            _ if (count as u64).is_multiple_of(lanes) => bytes / lanes,
            // Whole lines: a multiple of every element.
            _ => bytes / lanes / LINE * LINE,
        };
        Shares { lanes, lane, share, tail: bytes - lanes * share, chunk: grid.chunk(share, 1) }
    }

    /// Bytes that our rank passes on.
    pub(crate) fn bytes(&self) -> u64 {
        self.share + self.tail
    }

    fn whole_pieces(&self) -> usize {
        self.share.div_ceil(self.chunk) as usize
    }

    /// Pieces, the tail among them: one at least.
    pub(crate) fn pieces(&self) -> usize {
        (self.whole_pieces() + usize::from(self.tail > 0)).max(1)
    }

    /// Piece `k`; `None` behind the last.
    pub(crate) fn piece(&self, k: usize) -> Option<Piece> {
        let whole = self.whole_pieces();
        if k < whole {
            let packed = k as u64 * self.chunk;
            let each = self.chunk.min(self.share - packed);
            return Some(Piece { first: self.lanes * packed, each, packed, is_tail: false });
        }
        let tail = Piece { first: self.lanes * self.share, each: self.tail, packed: self.share, is_tail: true };
        (k == whole && (self.tail > 0 || whole == 0)).then_some(tail)
    }

    /// Offset of our share of a piece, or of the tail.
    pub(crate) fn own(&self, piece: &Piece) -> u64 {
        piece.first + if piece.is_tail { 0 } else { self.lane * piece.each }
    }

    /// Bytes of a piece.
    pub(crate) fn of_all(&self, piece: &Piece) -> u64 {
        if piece.is_tail { piece.each } else { self.lanes * piece.each }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The shares of all lanes and the tail are the buffer, each byte once, and elements are never cut.
        #[test]
        fn a_buffer_is_shared_out_once(
            count in 0usize..40_000,
            element in prop::sample::select(vec![1usize, 2, 4, 8]),
            lanes in 2usize..9,
            workers in 1usize..5,
            slot in 1u64..8,
        ) {
            let grid = Grid { ranks: 3, workers, slot: slot << 14, least: 1 << 12 };
            let bytes = (count * element) as u64;
            let mut seen = vec![0u8; bytes as usize];
            let all: Vec<Shares> = (0..lanes).map(|lane| Shares::new(count, element, (lane, lanes), &grid)).collect();
            let mut packed = 0;
            for k in 0..all[0].pieces() {
                let piece = all[0].piece(k).expect("a piece of that number");
                prop_assert!(piece.each <= grid.slot && piece.each.is_multiple_of(element as u64));
                prop_assert_eq!(piece.packed, packed);
                packed += piece.each;
                for shares in &all {
                    prop_assert_eq!(shares.piece(k), Some(piece));
                    let at = shares.own(&piece);
                    prop_assert!(piece.first <= at && at + piece.each <= piece.first + shares.of_all(&piece));
                    seen[at as usize..][..piece.each as usize].iter_mut().for_each(|times| *times += 1);
                }
            }
            prop_assert_eq!(packed, all[0].bytes());
            prop_assert_eq!(all[0].piece(all[0].pieces()), None);
            let tail = all[0].piece(all[0].pieces() - 1).filter(|piece| piece.is_tail);
            let tail = tail.map_or(bytes, |piece| piece.first);
            prop_assert!(seen[..tail as usize].iter().all(|&times| times == 1));
            prop_assert!(seen[tail as usize..].iter().all(|&times| times == lanes as u8));
            prop_assert!(bytes - tail <= SHORT);
        }
    }

    #[test]
    fn a_buffer_that_can_be_shared_out_evenly_has_no_tail() {
        let grid = Grid { ranks: 2, workers: 4, slot: 2 << 20, least: 1 << 20 };
        let pieces = |count: usize| {
            let shares = Shares::new(count, 4, (1, 2), &grid);
            (0..shares.pieces()).filter_map(|k| shares.piece(k)).map(|p| (p.each, p.is_tail)).collect::<Vec<_>>()
        };
        assert_eq!(pieces(0), [(0, true)]);
        assert_eq!(pieces(2048), [(8192, true)]);
        assert_eq!(pieces(5002), [(10_004, false)]);
        assert_eq!(pieces(5003), [(9984, false), (44, true)]);
        assert_eq!(pieces(1 << 20), [(1 << 20, false); 2]);
        assert_eq!(pieces(8 << 20), [(1 << 20, false); 16]);
    }
}
