//! The parameters of a schedule, and the segments of buffers and in-place forms that follow from them.

use std::ops::Range;

use crate::wire::Collective;

/// The parameters of a schedule, which depends on neither data nor count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The pattern.
    pub collective: Collective,
    /// World size.
    pub ranks: usize,
    /// Root rank; 0 where there is none.
    pub root: usize,
    /// Number of channels the algorithm may spread over.
    pub channels: usize,
}

impl Shape {
    /// Segments of `rank`'s input: 0 where it has none (off root in broadcast and scatter).
    #[inline]
    pub fn input_segments(&self, rank: usize) -> usize {
        match self.collective {
            Collective::ReduceScatter | Collective::AllToAll => self.ranks,
            Collective::Broadcast => usize::from(rank == self.root),
            Collective::Scatter => self.ranks * usize::from(rank == self.root),
            _ => 1,
        }
    }

    /// Segments of `rank`'s output: 0 where it has none (off root in reduce and gather).
    #[inline]
    pub fn output_segments(&self, rank: usize) -> usize {
        match self.collective {
            Collective::AllGather | Collective::AllToAll => self.ranks,
            Collective::Reduce => usize::from(rank == self.root),
            Collective::Gather => self.ranks * usize::from(rank == self.root),
            _ => 1,
        }
    }

    /// The contents of a segment of `rank`'s output: a segment of inputs, and the ranks whose inputs they are, combined
    /// where there are several. `None` for point to point.
    pub fn result(&self, rank: usize, segment: usize) -> Option<(usize, Range<usize>)> {
        let one = |rank| rank..rank + 1;
        Some(match self.collective {
            Collective::AllReduce | Collective::Barrier | Collective::Reduce => (0, 0..self.ranks),
            Collective::ReduceScatter => (rank, 0..self.ranks),
            Collective::Scan => (0, 0..rank + 1),
            Collective::AllGather | Collective::Gather => (0, one(segment)),
            Collective::AllToAll => (rank, one(segment)),
            Collective::Broadcast => (0, one(self.root)),
            Collective::Scatter => (rank, one(self.root)),
            Collective::SendRecv => return None,
        })
    }

    /// The (input segment, output segment) of `rank` that are the same memory in an in-place call.
    ///
    /// `None` where there is no in-place form (all_to_all) or the rank has one of the two buffers only.
    #[inline]
    pub fn in_place(&self, rank: usize) -> Option<(usize, usize)> {
        let pair = match self.collective {
            Collective::AllReduce
            | Collective::Barrier
            | Collective::Broadcast
            | Collective::Reduce
            | Collective::Scan => (0, 0),
            Collective::AllGather | Collective::Gather => (0, rank),
            Collective::ReduceScatter | Collective::Scatter => (rank, 0),
            Collective::AllToAll | Collective::SendRecv => return None,
        };
        (pair.0 < self.input_segments(rank) && pair.1 < self.output_segments(rank)).then_some(pair)
    }

    /// Layout of `rank`'s only buffer of `len` elements in the in-place form: elements per segment, and the segments at
    /// which its input and its output begin. `None` where the buffer cannot be cut into that many segments.
    #[inline(always)]
    pub fn cut_in_place(&self, rank: usize, len: usize) -> Option<(usize, usize, usize)> {
        let segments = self.input_segments(rank).max(self.output_segments(rank));
        if segments > 1 && !len.is_multiple_of(segments) {
            return None;
        }
        let count = if segments > 1 { len / segments } else { len };
        // The smaller buffer is this segment of the larger one.
        let (of_input, of_output) = self.in_place(rank).unwrap_or((0, 0));
        Some((count, of_output, of_input))
    }

    /// True for a valid call. Point to point is not compiled here.
    pub(crate) fn is_valid(&self) -> bool {
        let parts = self.ranks.saturating_mul(self.channels);
        self.collective != Collective::SendRecv && self.root < self.ranks && parts > 0 && parts <= u32::MAX as usize / 2
    }

    /// Returns true if values are combined; a barrier counts, as an all_reduce of nothing.
    #[inline]
    pub(crate) fn combines(&self) -> bool {
        self.collective.reduces() || self.collective == Collective::Barrier
    }

    /// An all_reduce, or a barrier, which is one of nothing.
    #[inline]
    pub(crate) fn is_all_reduce(&self) -> bool {
        matches!(self.collective, Collective::AllReduce | Collective::Barrier)
    }
}
