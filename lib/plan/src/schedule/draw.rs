//! Programs as text: one line per step.
//!
//! ```text
//! rank 0 ch 0: send in[0.0] → 1
//! rank 0 ch 0: recv 1, reduce in[0.1] → out[0.1] (last), send → 1
//! rank 0 ch 0: recv 1 → out[0.0]
//! ```
//! A location is `buffer[segment.part]`, or `buffer[segment.first..end]` for a span of parts.

use std::fmt::{self, Display, Formatter};

use super::{Buf, Loc, Program, Step};

impl Display for Loc {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let buf = match self.buf {
            Buf::Input => "in",
            Buf::Output => "out",
            Buf::Scratch => "tmp",
        };
        match self.span {
            1 => write!(f, "{buf}[{}.{}]", self.segment, self.part),
            _ => write!(f, "{buf}[{}.{:?}]", self.segment, self.parts()),
        }
    }
}

impl Display for Step {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let done = |last: bool| if last { " (last)" } else { "" };
        match *self {
            Step::Send { to, src } => write!(f, "send {src} → {to}"),
            Step::Recv { from, dst } => write!(f, "recv {from} → {dst}"),
            Step::Copy { src, dst } => write!(f, "copy {src} → {dst}"),
            Step::Reduce { src, dst, last } => write!(f, "reduce {src} → {dst}{}", done(last)),
            Step::RecvReduceCopy { from, src, dst, last } => {
                write!(f, "recv {from}, reduce {src} → {dst}{}", done(last))
            }
            Step::RecvCopySend { from, to, dst } => write!(f, "recv {from} → {dst}, send → {to}"),
            Step::RecvReduceSend { from, to, src } => write!(f, "recv {from}, reduce {src}, send → {to}"),
            Step::RecvReduceCopySend { from, to, src, dst, last } => {
                write!(f, "recv {from}, reduce {src} → {dst}{}, send → {to}", done(last))
            }
        }
    }
}

/// One rank's program as text; made by [`draw`].
#[derive(Debug, Clone, Copy)]
pub struct Drawing<'a> {
    program: &'a Program,
    rank: usize,
}

/// The program of `rank`, to be formatted. The lane is named where a channel has several.
pub fn draw(program: &Program, rank: usize) -> Drawing<'_> {
    Drawing { program, rank }
}

/// The programs of all ranks, one after the other.
pub fn draw_all(programs: &[Program]) -> String {
    programs.iter().enumerate().map(|(rank, program)| draw(program, rank).to_string()).collect()
}

impl Display for Drawing<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Drawing { program, rank } = *self;
        for (l, lane) in program.lanes.iter().enumerate() {
            let shared = program.lanes.iter().filter(|other| other.channel == lane.channel).count() > 1;
            let lane_name = if shared { format!(" lane {l}") } else { String::new() };
            for step in &lane.steps {
                writeln!(f, "rank {rank} ch {}{lane_name}: {step}", lane.channel)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::program;
    use crate::schedule::Shape;
    use crate::wire::{Algorithm, Collective};

    fn text(algorithm: Algorithm, ranks: usize) -> String {
        let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
        let programs: Vec<_> = (0..ranks).map(|r| program(algorithm, &shape, r).unwrap()).collect();
        draw_all(&programs)
    }

    #[test]
    fn the_ring_of_two() {
        assert_eq!(
            text(Algorithm::Ring, 2),
            "rank 0 ch 0: send in[0.0] → 1\n\
             rank 0 ch 0: recv 1, reduce in[0.1] → out[0.1] (last), send → 1\n\
             rank 0 ch 0: recv 1 → out[0.0]\n\
             rank 1 ch 0: send in[0.1] → 0\n\
             rank 1 ch 0: recv 0, reduce in[0.0] → out[0.0] (last), send → 0\n\
             rank 1 ch 0: recv 0 → out[0.1]\n"
        );
    }

    #[test]
    fn lanes_and_spans_have_names() {
        assert!(text(Algorithm::Tree, 2).contains("rank 1 ch 0 lane 1: recv 0 → out[0.0]\n"));
        assert!(text(Algorithm::HalvingDoubling, 4).starts_with("rank 0 ch 0: send in[0.2..4] → 2\n"));
    }
}
