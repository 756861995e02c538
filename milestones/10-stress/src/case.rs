//! One block of the table: a collective, a type, an operator and a root, with nccl-tests' size conventions.

use std::fmt;

use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use crate::pattern::Source;

/// Memory of the result: separate, or the input's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Input and output are separate.
    Out,
    /// The result replaces the input.
    In,
}

/// Communication pattern of send/recv.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Send to the right, receive from the left (also stands for every collective other than send/recv).
    Ring,
    /// From rank 0 to rank 1 and back. The time is that of the round trip.
    RoundTrip,
    /// The first half to the right, the second to the left, in one call, like a halo exchange.
    Neighbours,
}

/// Meaning of a size of the command line, for collectives in which a rank holds a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Size {
    /// All ranks' parts together, rounded down to whole elements of each: nccl-tests' sizes.
    Total,
    /// One rank's part: the count of MPI's functions, and the size of OSU's benchmarks.
    Rank,
}

/// One block of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) collective: Collective,
    pub(crate) way: Way,
    pub(crate) dtype: DType,
    /// `None` for collectives that only move data.
    pub(crate) op: Option<ReduceOp>,
    /// `None` for collectives without a root.
    pub(crate) root: Option<usize>,
}

/// Elements of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The count column: the count argument of NCCL's function.
    pub(crate) count: usize,
    /// Elements of each rank's input (of the root's, for scatter).
    pub(crate) input: usize,
    /// Elements of each rank's output (of the root's, for gather).
    pub(crate) output: usize,
}

impl Case {
    /// Bytes of the row for a `size` of the command line.
    pub(crate) fn total(&self, size: usize, meaning: Size, ranks: usize) -> usize {
        let parts = matches!(
            self.collective,
            Collective::AllGather
                | Collective::Gather
                | Collective::ReduceScatter
                | Collective::Scatter
                | Collective::AllToAll
        );
        match meaning {
            Size::Rank if parts => (size / self.dtype.size() * self.dtype.size()).saturating_mul(ranks),
            _ => size,
        }
    }

    /// Elements for a row of `bytes`. The size is that of the larger of input and output: the output of all_gather, the
    /// input of reduce_scatter. It is rounded down to whole elements per rank.
    pub(crate) fn layout(&self, bytes: usize, ranks: usize) -> Layout {
        let all = bytes / self.dtype.size();
        let each = all / ranks.max(1);
        let layout = |count, input, output| Layout { count, input, output };
        match self.collective {
            Collective::SendRecv if self.way == Way::Neighbours => layout(all / 2, all / 2 * 2, all / 2 * 2),
            Collective::AllReduce
            | Collective::Broadcast
            | Collective::Reduce
            | Collective::Scan
            | Collective::SendRecv => layout(all, all, all),
            Collective::AllGather | Collective::Gather => layout(each, each, each * ranks),
            Collective::ReduceScatter | Collective::Scatter => layout(each, each * ranks, each),
            Collective::AllToAll => layout(each, each * ranks, each * ranks),
            Collective::Barrier => layout(0, 0, 0),
        }
    }

    /// The library's description of a call of `count` elements per segment.
    pub(crate) fn call(&self, count: usize) -> Call {
        Call::new(self.collective, self.dtype, self.op.unwrap_or(ReduceOp::Sum), self.root.unwrap_or(0), count)
    }

    /// The name in the output.
    pub(crate) fn name(&self) -> &'static str {
        match self.way {
            Way::Ring => name(self.collective),
            Way::RoundTrip => ROUND_TRIP,
            Way::Neighbours => NEIGHBOURS,
        }
    }

    /// The size column, in bytes.
    pub(crate) fn bytes(&self, layout: Layout) -> usize {
        layout.input.max(layout.output) * self.dtype.size()
    }

    /// Returns true if the library offers the collective in place (NCCL's gather, scatter and all_to_all are not tested
    /// in place either).
    pub(crate) fn has_in_place(&self) -> bool {
        matches!(
            self.collective,
            Collective::AllReduce
                | Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Broadcast
                | Collective::Reduce
                | Collective::Scan
        )
    }

    /// In place, the larger buffer serves as both: true for the input, false for the output.
    pub(crate) fn in_place_uses_input(&self) -> bool {
        self.collective == Collective::ReduceScatter
    }

    /// The expected contents of the memory that a call writes on `rank`: lengths and sources, in order.
    ///
    /// Out of place it is the output, in place the one buffer.
    pub(crate) fn expected(&self, place: Place, layout: Layout, rank: usize, ranks: usize) -> Vec<(usize, Source)> {
        let Layout { count, input, output } = layout;
        let root = self.root.unwrap_or(0);
        let nothing = match place {
            Place::Out => Source::Untouched,
            Place::In => Source::Input(rank, 0),
        };
        let segments = |source: &dyn Fn(usize) -> Source| (0..ranks).map(|s| (count, source(s))).collect();
        match self.collective {
            Collective::AllReduce => vec![(output, Source::Reduced(0))],
            Collective::Scan => vec![(output, Source::Scanned(rank))],
            Collective::AllGather => segments(&|s| Source::Input(s, 0)),
            Collective::ReduceScatter if place == Place::In => segments(&|s| {
                if s == rank { Source::Reduced(s * count) } else { Source::Input(rank, s * count) }
            }),
            Collective::ReduceScatter => vec![(output, Source::Reduced(rank * count))],
            Collective::Broadcast => vec![(output, Source::Input(root, 0))],
            Collective::Reduce if rank == root => vec![(output, Source::Reduced(0))],
            Collective::Gather if rank == root => segments(&|s| Source::Input(s, 0)),
            Collective::Reduce | Collective::Gather => vec![(output, nothing)],
            Collective::Scatter => vec![(output, Source::Input(root, rank * count))],
            Collective::AllToAll => segments(&|s| Source::Input(s, rank * count)),
            Collective::SendRecv => {
                let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
                match (self.way, rank) {
                    (Way::Ring, _) => vec![(input, Source::Input(left, 0))],
                    (Way::RoundTrip, 0 | 1) => vec![(input, Source::Input(1 - rank, 0))],
                    (Way::RoundTrip, _) => vec![(input, Source::Untouched)],
                    (Way::Neighbours, _) => {
                        vec![(count, Source::Input(left, 0)), (count, Source::Input(right, count))]
                    }
                }
            }
            Collective::Barrier => Vec::new(),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.dtype)?;
        if let Some(op) = self.op {
            write!(f, " {op}")?;
        }
        if let Some(root) = self.root {
            write!(f, " root {root}")?;
        }
        Ok(())
    }
}

/// On the command line and in the output: send/recv there and back.
const ROUND_TRIP: &str = "pingpong";
/// On the command line and in the output: send/recv with both neighbours at once.
const NEIGHBOURS: &str = "neighbours";

/// The collective's name on the command line and in the output.
pub(crate) fn name(collective: Collective) -> &'static str {
    match collective {
        Collective::SendRecv => "sendrecv",
        other => other.name(),
    }
}

/// A collective by name, with or without underscores, and its [`Way`]; `alltoall` is all_to_all.
pub(crate) fn parse(text: &str) -> Option<(Collective, Way)> {
    let plain = |s: &str| s.to_ascii_lowercase().replace(['_', '-'], "");
    match plain(text).as_str() {
        ROUND_TRIP => Some((Collective::SendRecv, Way::RoundTrip)),
        NEIGHBOURS => Some((Collective::SendRecv, Way::Neighbours)),
        text => Collective::ALL.into_iter().find(|&c| plain(name(c)) == text).map(|c| (c, Way::Ring)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl::schedule::Shape;

    fn case(collective: Collective) -> Case {
        let op = collective.reduces().then_some(ReduceOp::Sum);
        Case { collective, way: Way::Ring, dtype: DType::F32, op, root: Some(1) }
    }

    #[test]
    fn sizes_are_totals_as_in_nccl_tests() {
        for c in Collective::ALL.map(case) {
            let layout = c.layout(1024, 4);
            let expected = if c.collective == Collective::Barrier { 0 } else { 1024 };
            assert_eq!(c.bytes(layout), expected, "{}", c.collective);
        }
        assert_eq!(case(Collective::AllGather).layout(1024, 4), Layout { count: 64, input: 64, output: 256 });
        assert_eq!(case(Collective::ReduceScatter).layout(1024, 4), Layout { count: 64, input: 256, output: 64 });
        assert_eq!(case(Collective::AllReduce).layout(1027, 4), Layout { count: 256, input: 256, output: 256 });
        assert_eq!(case(Collective::AllToAll).layout(8, 4).count, 0, "less than one element per rank");
    }

    #[test]
    fn a_size_per_rank_is_not_rounded_to_a_multiple_of_the_ranks() {
        for c in Collective::ALL.map(case) {
            let layout = c.layout(c.total(4100, Size::Rank, 3), 3);
            let expected = if c.collective == Collective::Barrier { 0 } else { 1025 };
            assert_eq!(layout.count, expected, "{}", c.collective);
        }
        assert_eq!(case(Collective::AllGather).total(4103, Size::Rank, 3), 3 * 4100);
        assert_eq!(case(Collective::AllGather).total(4103, Size::Total, 3), 4103);
        assert_eq!(case(Collective::AllReduce).total(4103, Size::Rank, 3), 4103);
    }

    #[test]
    fn what_is_expected_covers_the_memory_that_is_checked() {
        for c in Collective::ALL.map(case) {
            for ranks in 1..6 {
                for rank in 0..ranks {
                    let layout = c.layout(4096, ranks);
                    let length = |place| c.expected(place, layout, rank, ranks).iter().map(|(n, _)| n).sum::<usize>();
                    assert_eq!(length(Place::Out), layout.output, "{} {rank}/{ranks}", c.collective);
                    if c.has_in_place() {
                        let buffer = if c.in_place_uses_input() { layout.input } else { layout.output };
                        assert_eq!(length(Place::In), buffer, "{} {rank}/{ranks}", c.collective);
                    }
                }
            }
        }
    }

    #[test]
    fn what_the_library_offers_in_place_is_tested_in_place() {
        for c in Collective::ALL.map(case) {
            let offered = Shape { collective: c.collective, ranks: 4, root: 1, channels: 1 }.in_place(1).is_some();
            let left_out = matches!(c.collective, Collective::Gather | Collective::Scatter | Collective::Barrier);
            assert_eq!(c.has_in_place(), offered && !left_out, "{}", c.collective);
        }
    }

    #[test]
    fn off_root_nothing_is_written() {
        let c = case(Collective::Reduce);
        let layout = c.layout(40, 3);
        assert_eq!(c.expected(Place::Out, layout, 0, 3), [(10, Source::Untouched)]);
        assert_eq!(c.expected(Place::In, layout, 0, 3), [(10, Source::Input(0, 0))]);
        assert_eq!(c.expected(Place::Out, layout, 1, 3), [(10, Source::Reduced(0))]);
    }

    #[test]
    fn a_round_trip_is_between_two_ranks() {
        let c = Case { way: Way::RoundTrip, ..case(Collective::SendRecv) };
        let layout = c.layout(40, 3);
        let expected = |rank| c.expected(Place::Out, layout, rank, 3);
        assert_eq!(expected(0), [(10, Source::Input(1, 0))]);
        assert_eq!(expected(1), [(10, Source::Input(0, 0))]);
        assert_eq!(expected(2), [(10, Source::Untouched)]);
        assert_eq!(c.to_string(), "pingpong f32 root 1");
    }

    #[test]
    fn neighbours_get_half_each() {
        let c = Case { way: Way::Neighbours, ..case(Collective::SendRecv) };
        let layout = c.layout(44, 3);
        assert_eq!(layout, Layout { count: 5, input: 10, output: 10 });
        let halves = [(5, Source::Input(0, 0)), (5, Source::Input(2, 5))];
        assert_eq!(c.expected(Place::Out, layout, 1, 3), halves);
        assert_eq!(c.to_string(), "neighbours f32 root 1");
    }

    #[test]
    fn names_parse_in_any_spelling() {
        for c in Collective::ALL {
            assert_eq!(parse(name(c)), Some((c, Way::Ring)));
        }
        assert_eq!(parse("AllReduce"), Some((Collective::AllReduce, Way::Ring)));
        assert_eq!(parse("alltoall"), Some((Collective::AllToAll, Way::Ring)));
        assert_eq!(parse("send_recv"), Some((Collective::SendRecv, Way::Ring)));
        assert_eq!(parse("ping-pong"), Some((Collective::SendRecv, Way::RoundTrip)));
        assert_eq!(parse("Neighbours"), Some((Collective::SendRecv, Way::Neighbours)));
        assert_eq!(parse("all"), None);
    }
}
