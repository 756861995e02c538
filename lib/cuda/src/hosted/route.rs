//! The data that a call moves through the host's memory, and its cut into chunks.
//!
//! A *side* is the data of one direction: down to the host, or up from it. It has one or several *rows* (such as the
//! segments of an all_gather's output), which lie a stride apart on the device. A chunk is the same part of every row.
//! In a slot of page-locked memory its rows are contiguous, as the host's collectives need segments.
//!
//! ```text
//! device   |---- row 0 ----|---- row 1 ----|---- row 2 ----|
//! chunk 1      ####            ####            ####
//! slot     |####|####|####|
//! ```
//! The cut depends only on numbers that all ranks share, so every message has the same length at both ends.

use std::ops::Range;

use super::shares::Shares;
use crate::checked::call::{End, Own};
use tinynccl_comm::RawCall;
use tinynccl_plan::Call;
use tinynccl_plan::wire::Collective;

/// Alignment of chunks in bytes: a cache line, and a whole number of elements of every type.
pub(super) const LINE: u64 = 64;
/// Chunks of a call per worker, unless they would be shorter than [`Grid::least`]: enough for all three stages to
/// overlap.
const PIECES: u64 = 4;

/// Parameters of the cut besides the call; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) ranks: usize,
    pub(super) workers: usize,
    /// Bytes of a slot.
    pub(super) slot: u64,
    /// Bytes that are not worth cutting.
    pub(super) least: u64,
}

impl Grid {
    /// Bytes of each row in a chunk, where `rows` rows of `bytes` bytes share a slot.
    pub(super) fn chunk(&self, bytes: u64, rows: u64) -> u64 {
        let most = (self.slot / rows / LINE * LINE).max(LINE);
        let wanted = bytes.div_ceil(PIECES * self.workers as u64).max(self.least / rows).min(most);
        // All of about the same length, rather than a short one at the end.
        bytes.div_ceil(bytes.div_ceil(wanted.max(1)).max(1)).next_multiple_of(LINE).clamp(LINE, most)
    }
}

/// Rows that go down or up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Side {
    /// Device address of row 0.
    pub(super) at: u64,
    /// Bytes of a row.
    pub(super) bytes: u64,
    /// Bytes between the beginnings of two rows.
    pub(super) stride: u64,
    pub(super) rows: usize,
    /// A row that does not cross.
    pub(super) skip: Option<usize>,
    /// Bytes of a row in a chunk.
    pub(super) chunk: u64,
    /// Location of row 0 in the slot: `base` bytes, and then `first` rows.
    pub(super) base: u64,
    pub(super) first: usize,
    /// Shares of a buffer that the ranks of a host share out, if chunks are that, and whether those of this rank lie
    /// behind each other.
    pub(super) shares: Option<(Shares, bool)>,
}

impl Side {
    /// Chunk `k`'s part of each row, as offset and length; an empty side has one empty chunk.
    pub(super) fn part(&self, k: usize) -> Option<(u64, u64)> {
        if let Some((shares, packed)) = &self.shares {
            let piece = shares.piece(k)?;
            return Some((if *packed { piece.packed } else { shares.own(&piece) }, piece.each));
        }
        let offset = k as u64 * self.chunk;
        (k == 0 || offset < self.bytes).then(|| (offset, self.chunk.min(self.bytes - offset)))
    }

    fn chunks(&self) -> usize {
        self.bytes.div_ceil(self.chunk).max(1) as usize
    }

    /// Rows that cross, in runs.
    pub(super) fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        let cut = self.skip.unwrap_or(self.rows);
        [0..cut, cut + 1..self.rows].into_iter().filter(|run| run.start < run.end)
    }

    /// Offset of row `row` in the slot, where each row has `len` bytes.
    pub(super) fn place(&self, row: usize, len: u64) -> u64 {
        self.base + (self.first + row) as u64 * len
    }
}

/// The host's operation on a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    /// A collective; where input and output lie in the slot, in rows.
    Collective { call: Call, input: usize, output: usize },
    /// A message to the first rank and one from the second.
    Messages { to: Option<usize>, from: Option<usize> },
}

/// A call, cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    pub(super) down: Option<Side>,
    pub(super) up: Option<Side>,
    pub(super) own: Option<Own>,
    pub(super) wire: Wire,
    /// Bytes of a row, and of a row in a chunk, as all ranks have them; not of messages, nor of shares.
    row: (u64, u64),
    shares: Option<Shares>,
    /// It goes over the ranks of this lane, not over all.
    pub(super) in_lane: bool,
}

impl Route {
    /// The route of a collective, seen by `rank`; `None` of one that has no device form.
    pub(crate) fn of(call: &RawCall, rank: usize, grid: &Grid) -> Option<Route> {
        let n = grid.ranks;
        let bytes = (call.count * call.dtype.size()) as u64;
        let rows = match call.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 1,
            Collective::AllGather | Collective::ReduceScatter => n,
            Collective::AllToAll => 2 * n,
            _ => return None,
        };
        let chunk = grid.chunk(bytes, rows as u64);
        let one = |at| Side { at, bytes, stride: bytes, rows: 1, skip: None, chunk, base: 0, first: 0, shares: None };
        let all = |at| Side { rows: n, ..one(at) };
        let ((input, output), at_root) = (call.device_addresses(), call.root == rank);
        let (down, up) = match call.collective {
            Collective::AllGather => {
                (Some(Side { first: rank, ..one(input) }), Some(Side { skip: Some(rank), ..all(output) }))
            }
            Collective::ReduceScatter => (Some(all(input)), Some(Side { first: rank, ..one(output) })),
            Collective::Broadcast if at_root => (Some(one(input)), None),
            Collective::Broadcast => (None, Some(one(output))),
            Collective::Reduce => (Some(one(input)), at_root.then(|| one(output))),
            Collective::AllToAll => (
                Some(Side { skip: Some(rank), ..all(input) }),
                Some(Side { skip: Some(rank), first: n, ..all(output) }),
            ),
            _ => (Some(one(input)), Some(one(output))),
        };
        let place = rank as u64 * bytes;
        let own = match call.collective {
            Collective::AllGather => Some((input, output + place)),
            Collective::AllToAll => Some((input + place, output + place)),
            Collective::Broadcast if at_root => Some((input, output)),
            _ => None,
        };
        let own = own.filter(|(from, to)| from != to && bytes > 0).map(|(from, to)| Own { from, to, bytes });
        let (input, output) = match call.collective {
            Collective::AllGather => (rank, 0),
            Collective::ReduceScatter => (0, rank),
            Collective::AllToAll => (0, n),
            _ => (0, 0),
        };
        let wire = Wire::Collective { call: **call, input, output };
        Some(Route { down, up, own, wire, row: (bytes, chunk), shares: None, in_lane: false })
    }

    /// The route of a lane: from this rank's shares of the buffer at `down` to those of the one at `up`; `packed`:
    /// there they lie behind each other.
    pub(crate) fn of_shares(call: Call, shares: Shares, down: Option<u64>, up: Option<u64>, packed: bool) -> Route {
        let bytes = shares.bytes();
        let side = |at| Side {
            at,
            bytes,
            stride: bytes,
            rows: 1,
            skip: None,
            chunk: LINE,
            base: 0,
            first: 0,
            shares: Some((shares, packed)),
        };
        let wire = Wire::Collective { call, input: 0, output: 0 };
        let (down, up) = (down.map(side), up.map(side));
        Route { down, up, own: None, wire, row: (bytes, LINE), shares: Some(shares), in_lane: true }
    }

    /// This route over the ranks of a lane, where the call itself makes our own part of the output.
    pub(crate) fn in_lane(self) -> Route {
        Route { own: None, in_lane: true, ..self }
    }

    /// This route with the rows of its output at `at`, `stride` bytes apart.
    pub(crate) fn spaced(self, at: u64, stride: u64) -> Route {
        Route { up: self.up.map(|up| Side { at, stride, ..up }), ..self }
    }

    /// Returns the route of a message to a rank and a message from one, each as (address, bytes, peer).
    pub(super) fn pair(to: Option<End>, from: Option<End>, grid: &Grid) -> Route {
        let side = |(at, bytes, _): End, base| {
            let bytes = bytes as u64;
            // Half of a slot for each direction, because the peer does not know whether we use one or both.
            let chunk = grid.chunk(bytes, 2);
            Side { at, bytes, stride: bytes, rows: 1, skip: None, chunk, base, first: 0, shares: None }
        };
        let peer = |one: Option<End>| one.map(|(_, _, peer)| peer);
        let half = grid.slot / 2 / LINE * LINE;
        Route {
            down: to.map(|one| side(one, 0)),
            up: from.map(|one| side(one, half)),
            own: None,
            wire: Wire::Messages { to: peer(to), from: peer(from) },
            row: (0, LINE),
            shares: None,
            in_lane: false,
        }
    }

    /// Chunks of the call, on this rank: of a collective as many as on every other, of messages as many as the longer
    /// one has.
    pub(crate) fn chunks(&self) -> usize {
        match self.wire {
            Wire::Collective { .. } if self.shares.is_some() => self.shares.map_or(1, |shares| shares.pieces()),
            Wire::Collective { .. } => self.row.0.div_ceil(self.row.1).max(1) as usize,
            Wire::Messages { .. } => [self.down, self.up].iter().flatten().map(Side::chunks).max().unwrap_or(0),
        }
    }

    /// Bytes of a row in chunk `k` of a collective.
    pub(super) fn row_bytes(&self, k: usize) -> u64 {
        if let Some(shares) = &self.shares {
            return shares.piece(k).map_or(0, |piece| piece.each);
        }
        self.row.1.min(self.row.0.saturating_sub(k as u64 * self.row.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tinynccl_plan::{DType, ReduceOp};

    const INPUT: u64 = 1 << 40;
    const OUTPUT: u64 = 1 << 50;

    fn call(collective: Collective, dtype: DType, root: usize, count: usize) -> RawCall {
        RawCall::on_device(Call::new(collective, dtype, ReduceOp::Sum, root, count), INPUT, OUTPUT)
    }

    /// Marks every byte that crosses, chunk by chunk, and checks where it lies in the slot.
    fn crossed(side: &Side, chunks: usize, grid: &Grid, mut len: impl FnMut(usize) -> Option<u64>) -> Vec<u8> {
        let mut seen = vec![0u8; (side.stride * side.rows as u64) as usize];
        for k in 0..chunks {
            let Some((offset, bytes)) = side.part(k) else { continue };
            assert!(offset.is_multiple_of(LINE));
            assert!(
                len(k).is_none_or(|len| len == bytes),
                "the rows in the slot are as long as the host takes them to be"
            );
            for row in side.runs().flatten() {
                assert!(side.place(row, bytes) + bytes <= grid.slot, "{side:?} leaves the slot");
                let at = row as u64 * side.stride + offset;
                seen[at as usize..(at + bytes) as usize].iter_mut().for_each(|byte| *byte += 1);
            }
        }
        seen
    }

    /// Every byte crosses once, those of the row that stays never.
    fn once(side: &Side, seen: &[u8]) -> bool {
        let row = |i: usize| if side.stride == 0 { 0 } else { i / side.stride as usize };
        seen.iter().enumerate().all(|(i, &times)| times == u8::from(side.skip != Some(row(i))))
    }

    prop_compose! {
        fn grids()(ranks in 2usize..12, workers in 1usize..5, slot in 10u32..17, odd in 0u64..3, least in 0u32..14) -> Grid {
            Grid { ranks, workers, slot: (1 << slot) + 4096 * odd + 2 * LINE * ranks as u64, least: 1 << least }
        }
    }

    proptest! {
        #[test]
        fn chunks_carry_every_byte_once(
            grid in grids(),
            dtype in 0..DType::ALL.len(),
            count in 0usize..3000,
            root in 0usize..12,
        ) {
            let (dtype, root) = (DType::ALL[dtype], root % grid.ranks);
            for collective in Collective::ALL {
                let call = call(collective, dtype, root, count);
                let mut cuts = Vec::new();
                for rank in 0..grid.ranks {
                    let Some(route) = Route::of(&call, rank, &grid) else { continue };
                    let chunks = route.chunks();
                    for side in [route.down, route.up].iter().flatten() {
                        prop_assert_eq!(side.chunks(), chunks);
                        let seen = crossed(side, chunks, &grid, |k| Some(route.row_bytes(k)));
                        prop_assert!(once(side, &seen), "{:?}", side);
                    }
                    if let Wire::Collective { input, output, .. } = route.wire {
                        let rows = |of: usize, segments: usize| (of + segments) as u64 * route.row_bytes(0);
                        let (sent, made) = match collective {
                            Collective::AllToAll => (grid.ranks, grid.ranks),
                            Collective::ReduceScatter => (grid.ranks, 1),
                            Collective::AllGather => (1, grid.ranks),
                            _ => (1, 1),
                        };
                        prop_assert!(rows(input, sent).max(rows(output, made)) <= grid.slot);
                        // The copies and the host use the same offsets, also in a shorter last chunk.
                        for (side, of) in [(route.down, input), (route.up, output)] {
                            let Some(side) = side else { continue };
                            for k in 0..chunks {
                                let len = route.row_bytes(k);
                                let same = |row| side.place(row, len) == (of + row) as u64 * len;
                                prop_assert!(side.runs().flatten().all(same), "{:?}, chunk {}", side, k);
                            }
                        }
                    }
                    // Elements are never cut.
                    let lengths: Vec<u64> = (0..chunks).map(|k| route.row_bytes(k)).collect();
                    prop_assert!(lengths.iter().all(|len| len.is_multiple_of(dtype.size() as u64)));
                    cuts.push(lengths);
                }
                prop_assert!(cuts.windows(2).all(|pair| pair[0] == pair[1]), "ranks cut {collective} differently");
            }
        }

        #[test]
        fn both_ends_of_a_message_cut_alike(grid in grids(), sent in 0usize..20_000, received in 0usize..20_000) {
            let out = Route::pair(Some((INPUT, sent, 1)), Some((OUTPUT, received, 2)), &grid);
            let chunks = out.chunks();
            for (side, bytes) in [(out.down, sent), (out.up, received)] {
                let side = side.expect("both were asked for");
                prop_assert!(once(&side, &crossed(&side, chunks, &grid, |_| None)));
                // At the other end it may stand alone.
                let alone = Route::pair(None, Some((OUTPUT, bytes, 0)), &grid);
                let theirs = alone.up.expect("it receives");
                for k in 0..chunks.max(alone.chunks()) {
                    prop_assert_eq!(side.part(k), theirs.part(k));
                }
            }
            // The two directions do not overlap in a slot.
            prop_assert!(out.down.is_some_and(|down| down.chunk <= out.up.map_or(0, |up| up.base)));
        }
    }

    #[test]
    fn long_calls_are_cut_and_short_ones_are_not() {
        let grid = Grid { ranks: 2, workers: 2, slot: 4 << 20, least: 512 << 10 };
        let chunks = |collective, bytes: usize| {
            Route::of(&call(collective, DType::F32, 0, bytes / 4), 0, &grid).map(|route| route.chunks())
        };
        assert_eq!(chunks(Collective::AllReduce, 0), Some(1));
        assert_eq!(chunks(Collective::AllReduce, 512 << 10), Some(1));
        assert_eq!(chunks(Collective::AllReduce, 1 << 20), Some(2));
        assert_eq!(chunks(Collective::AllReduce, 16 << 20), Some(8));
        assert_eq!(chunks(Collective::AllReduce, 256 << 20), Some(64));
        assert_eq!(chunks(Collective::AllGather, 128 << 20), Some(64));
        assert_eq!(chunks(Collective::Barrier, 0), None);
    }

    #[test]
    fn our_own_part_stays_on_the_device() {
        let grid = Grid { ranks: 3, workers: 1, slot: 1 << 20, least: 1 << 16 };
        let own = |collective, input, rank| {
            let call = RawCall::on_device(*call(collective, DType::F32, 1, 100), input, OUTPUT);
            Route::of(&call, rank, &grid).and_then(|route| route.own)
        };
        let copy = |from, to| Some(Own { from, to, bytes: 400 });
        assert_eq!(own(Collective::AllGather, INPUT, 2), copy(INPUT, OUTPUT + 800));
        assert_eq!(own(Collective::AllToAll, INPUT, 2), copy(INPUT + 800, OUTPUT + 800));
        assert_eq!(own(Collective::Broadcast, INPUT, 1), copy(INPUT, OUTPUT));
        // In place, and without a part of ours in the output.
        assert_eq!(own(Collective::AllGather, OUTPUT + 800, 2), None);
        assert_eq!(own(Collective::Broadcast, INPUT, 2), None);
        assert_eq!(own(Collective::AllReduce, INPUT, 2), None);
    }
}
