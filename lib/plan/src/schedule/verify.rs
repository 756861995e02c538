//! Runs a schedule symbolically: result, freedom from deadlock and races, messages and bytes sent per rank.
//!
//! [`verify`] executes the programs of all ranks on values that are expressions over the inputs: "part 2 of rank 0's
//! input, plus part 2 of rank 1's". It proves for one shape, one number of windows and one link depth, for every
//! interleaving of the lanes and for any data, that
//! - every output part has the collective's result: each rank's contribution exactly once, or the right segment;
//! - all ranks combine in the same order, so that floating-point results have the same bits everywhere;
//! - `last` stands on the step that completes a reduction, so that `avg` of integers divides once;
//! - in place no step reads an input where a result is, so that `avg` of floats scales every input once;
//! - inputs, and the outputs of ranks that have none, are not written;
//! - no lane waits forever although a link holds only `depth` messages, and no message is left over;
//! - each direction of a link belongs to one lane, and lanes that share memory are ordered by messages.

mod error;
mod expr;
mod machine;

pub use error::{At, Blocked, VerifyError, Wait};

use self::expr::{Exprs, Extent, Value};
use self::machine::Machine;
use super::{Buf, Loc, Partition, Program, Shape, Step};

/// The cost of a verified schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Messages that each rank sends per window.
    pub messages: Vec<u64>,
    /// Number of times that each rank sends each part, per window: `sent[rank][part]`.
    pub sent: Vec<Vec<u64>>,
    /// Longest chain of messages that depend on each other in the first window.
    pub hops: u32,
    /// Steps of the longest lane.
    pub steps: usize,
    /// Every reduction is `((x0 op x1) op x2) op ...` in rank order.
    pub rank_order: bool,
}

impl Report {
    /// Payload bytes that `rank` sends in a call cut by `partition`.
    pub fn bytes_sent(&self, rank: usize, partition: &Partition) -> u64 {
        let parts = self.sent.get(rank).map_or(&[][..], Vec::as_slice);
        parts.iter().enumerate().map(|(p, &times)| times * partition.total_bytes(p..p + 1)).sum()
    }
}

/// Proves that `programs` (one per rank) execute `shape` over `windows` windows and links that hold `depth` messages.
///
/// `in_place`: input and output are the same memory ([`Shape::in_place`]); all_to_all has no such form and is then
/// checked as usual.
///
/// # Errors
/// The first error, naming ranks, lanes and steps.
pub fn verify(
    programs: &[Program],
    shape: &Shape,
    depth: usize,
    windows: usize,
    in_place: bool,
) -> Result<Report, VerifyError> {
    let Some(first) = programs.first().filter(|_| programs.len() == shape.ranks) else {
        return Err(VerifyError::Programs(format!("expected {} programs, got {}", shape.ranks, programs.len())));
    };
    for (rank, program) in programs.iter().enumerate() {
        if (program.parts, program.span) != (first.parts, first.span) || first.parts == 0 || first.span == 0 {
            return Err(VerifyError::Programs(format!(
                "rank {rank} has {} parts and spans {}, rank 0 has {} and {}",
                program.parts, program.span, first.parts, first.span
            )));
        }
        check_steps(program, shape, rank)?;
    }
    let segments = (0..shape.ranks).map(|r| shape.input_segments(r)).max().unwrap_or(1).max(1);
    let extent = Extent { ranks: shape.ranks, segments, windows: windows.max(1), parts: first.parts };
    let Some(leaves) = extent.leaves() else {
        return Err(VerifyError::Programs(format!("too large to verify: {extent:?}")));
    };
    let mut machine = Machine::new(programs, shape, extent, leaves, depth, in_place)?;
    machine.run()?;
    let rank_order = check_outputs(&machine, shape, &extent)?;
    let steps = programs.iter().flat_map(|p| &p.lanes).map(|lane| lane.steps.len()).max().unwrap_or(0);
    let Machine { messages, sent, hops, .. } = machine;
    Ok(Report { messages, sent, hops, steps, rank_order })
}

/// Checks each step by itself.
fn check_steps(program: &Program, shape: &Shape, rank: usize) -> Result<(), VerifyError> {
    let segments = |buf| match buf {
        Buf::Input => shape.input_segments(rank),
        Buf::Output => shape.output_segments(rank),
        Buf::Scratch => program.scratch_segments,
    };
    let wrong = |step: &Step| -> Option<String> {
        if let Some(peer) =
            [step.source(), step.destination()].into_iter().flatten().find(|&p| p >= shape.ranks || p == rank)
        {
            return Some(format!("rank {peer} is not a peer of rank {rank} among {}", shape.ranks));
        }
        for loc in [step.read(), step.write()].into_iter().flatten() {
            if loc.segment as usize >= segments(loc.buf) {
                return Some(format!("{loc} is not there: the buffer has {} segments", segments(loc.buf)));
            }
            if loc.span == 0 || loc.span as usize > program.span || loc.parts().end > program.parts {
                return Some(format!("{loc} is not there: {} parts, spans up to {}", program.parts, program.span));
            }
            if loc.buf == Buf::Scratch && loc.span > 1 {
                return Some(format!("{loc} is not one range of memory: scratch memory is laid out part by part"));
            }
            if loc.parts() != step.parts() {
                return Some("works on different parts".to_owned());
            }
        }
        step.write().filter(|loc: &Loc| loc.buf == Buf::Input).map(|loc| format!("writes {loc}, an input"))
    };
    for (l, lane) in program.lanes.iter().enumerate() {
        for (index, &step) in lane.steps.iter().enumerate() {
            if let Some(detail) = wrong(&step) {
                return Err(VerifyError::Step { at: Box::new(At { rank, lane: l, index, window: 0, step }), detail });
            }
        }
    }
    Ok(())
}

/// The required content of a rank's output.
enum Expected {
    /// The finished reduction of the first `of` ranks' inputs at this position.
    Reduction { place: usize, of: usize },
    /// This rank's input at this position.
    Input(usize, usize),
}

impl Expected {
    fn is_met(&self, exprs: &Exprs, value: Value) -> bool {
        match *self {
            Expected::Reduction { place, of } => exprs.is_reduction_of(value, place, of),
            Expected::Input(rank, place) => value == exprs.leaf(rank, place),
        }
    }
}

/// Checks the outputs; returns whether all reductions among them are in rank order.
fn check_outputs(machine: &Machine<'_>, shape: &Shape, extent: &Extent) -> Result<bool, VerifyError> {
    let exprs = &machine.exprs;
    let mut rank_order = true;
    for window in 0..extent.windows {
        for part in 0..extent.parts {
            let place = |segment| extent.place(segment, window, part);
            let mut reduced: Option<(usize, Value)> = None;
            for rank in 0..shape.ranks {
                for segment in 0..shape.output_segments(rank) {
                    let Some((from, ranks)) = shape.result(rank, segment) else {
                        return Err(VerifyError::Programs("point to point is not a schedule".to_owned()));
                    };
                    let of = ranks.len();
                    let expected = if shape.combines() {
                        Expected::Reduction { place: place(from), of }
                    } else {
                        Expected::Input(ranks.start, place(from))
                    };
                    let value = machine.output(rank, segment, window, part);
                    if !expected.is_met(exprs, value) {
                        let expected = match expected {
                            Expected::Reduction { of, .. } => format!("the finished reduction over {of} ranks"),
                            Expected::Input(from, place) => exprs.describe(exprs.leaf(from, place)),
                        };
                        let got = exprs.describe(value);
                        return Err(VerifyError::Output { rank, segment, window, part, expected, got });
                    }
                    rank_order &= matches!(expected, Expected::Input(..)) || exprs.is_in_rank_order(value, of);
                    if shape.is_all_reduce() {
                        let (other, known) = *reduced.get_or_insert((rank, value));
                        if known != value {
                            let first = (other, exprs.expression(known));
                            let second = (rank, exprs.expression(value));
                            return Err(VerifyError::Order { window, part, first, second });
                        }
                    }
                }
            }
        }
    }
    Ok(rank_order)
}

#[cfg(test)]
mod tests;
