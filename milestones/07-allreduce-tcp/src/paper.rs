//! Runs a schedule on paper: the very programs that the library executes, with lists of ranks in place of numbers.
//!
//! One line per hop. In a hop every rank takes the steps it can take with what has arrived by then, until it has sent one
//! message. A cell is that message: which part, and whose contributions are already summed in it.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;

use tinynccl::schedule::{Buf, Loc, Program, Step};

/// Ranks whose values are summed in a value, in the order they were added.
type Sum = Vec<usize>;

/// A message of a hop.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Message {
    part: usize,
    sum: Sum,
}

/// What a run on paper gives.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    /// Per hop and rank the message sent.
    hops: Vec<Vec<Option<Message>>>,
    /// Per rank, the output's parts.
    outputs: Vec<HashMap<usize, Sum>>,
}

/// Runs single-lane programs of all ranks over one window. `None` when they cannot finish, or are of another shape.
pub(crate) fn run(programs: &[Program]) -> Option<Trace> {
    let ranks = programs.len();
    let mut trace = Trace { hops: Vec::new(), outputs: vec![HashMap::new(); ranks] };
    let steps: Vec<&[Step]> = programs
        .iter()
        .map(|p| match p.lanes.as_slice() {
            [lane] => Some(lane.steps.as_slice()),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let mut next = vec![0; ranks];
    let mut queues: HashMap<(usize, usize), VecDeque<Message>> = HashMap::new();
    while (0..ranks).any(|r| next[r] < steps[r].len()) {
        let mut hop = vec![None; ranks];
        let mut moved = false;
        for rank in 0..ranks {
            while let Some(step) = steps[rank].get(next[rank]) {
                if step.destination().is_some() && hop[rank].is_some() {
                    break;
                }
                let incoming = match step.source() {
                    Some(from) => match queues.entry((from, rank)).or_default().pop_front() {
                        Some(message) => Some(message.sum),
                        None => break,
                    },
                    None => None,
                };
                let value = apply(step, rank, incoming, &mut trace.outputs[rank])?;
                if step.destination().is_some() {
                    hop[rank] = Some(Message { part: step.parts().start, sum: value });
                }
                next[rank] += 1;
                moved = true;
            }
        }
        // What was sent in this hop arrives in the next one.
        for (rank, message) in hop.iter().enumerate() {
            if let Some(message) = message {
                let to = steps[rank][..next[rank]].iter().rev().find_map(Step::destination)?;
                queues.entry((rank, to)).or_default().push_back(message.clone());
            }
        }
        if !moved {
            return None;
        }
        trace.hops.push(hop);
    }
    Some(trace)
}

/// The value a step makes, and sends if it sends. Writes it to the output if the step does.
fn apply(step: &Step, rank: usize, incoming: Option<Sum>, output: &mut HashMap<usize, Sum>) -> Option<Sum> {
    let mut value = incoming.unwrap_or_default();
    if let Some(src) = step.read() {
        value.extend(read(src, rank, output)?);
    }
    if let Some(dst) = step.write() {
        if matches!(step, Step::Reduce { .. }) {
            let mut sum = read(dst, rank, output)?;
            sum.append(&mut value);
            value = sum;
        }
        output.insert(dst.part as usize, value.clone());
    }
    Some(value)
}

fn read(loc: Loc, rank: usize, output: &HashMap<usize, Sum>) -> Option<Sum> {
    match loc.buf {
        Buf::Input => Some(vec![rank]),
        Buf::Output => output.get(&(loc.part as usize)).cloned(),
        Buf::Scratch => None,
    }
}

impl Trace {
    /// Hops that carry a message.
    pub(crate) fn hops(&self) -> usize {
        self.hops.iter().filter(|hop| hop.iter().any(Option::is_some)).count()
    }

    /// True when every rank's output has `parts` parts, each the sum over all ranks.
    pub(crate) fn complete(&self, parts: usize) -> bool {
        let ranks: Vec<usize> = (0..self.outputs.len()).collect();
        self.outputs.iter().all(|output| {
            output.len() == parts
                && output.values().all(|sum| {
                    let mut sum = sum.clone();
                    sum.sort_unstable();
                    sum == ranks
                })
        })
    }

    /// The table: one line per hop, one column per rank.
    pub(crate) fn table(&self) -> String {
        let ranks = self.outputs.len();
        let cell = |m: &Message| {
            let all = m.sum.len() == ranks;
            let sum: Vec<String> = m.sum.iter().map(usize::to_string).collect();
            format!("p{}={}", m.part, if all { "all".to_owned() } else { sum.join("+") })
        };
        let width = self.hops.iter().flatten().flatten().map(|m| cell(m).len()).max().unwrap_or(0).max(7) + 2;
        let mut text = String::from("  hop   ");
        for rank in 0..ranks {
            let _ = write!(text, "{:<width$}", format!("rank {rank}"));
        }
        let lines = self.hops.iter().filter(|hop| hop.iter().any(Option::is_some));
        for (number, hop) in lines.enumerate() {
            text.truncate(text.trim_end().len());
            let _ = write!(text, "\n  {:<6}", number + 1);
            for message in hop {
                let _ = write!(text, "{:<width$}", message.as_ref().map_or("-".to_owned(), cell));
            }
        }
        text.truncate(text.trim_end().len());
        text
    }
}

#[cfg(test)]
mod tests {
    use tinynccl::algorithm::{Shape, program};
    use tinynccl::wire::{Algorithm, Collective};

    use super::*;

    fn ring(ranks: usize) -> Vec<Program> {
        let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
        (0..ranks).map(|r| program(Algorithm::Ring, &shape, r).unwrap()).collect()
    }

    #[test]
    fn the_ring_completes_in_2n_minus_2_hops() {
        for ranks in 2..=9 {
            let trace = run(&ring(ranks)).unwrap();
            assert!(trace.complete(ranks), "{ranks} ranks: {trace:?}");
            assert_eq!(trace.hops(), 2 * (ranks - 1), "{ranks} ranks");
        }
    }

    #[test]
    fn the_table_of_two_ranks() {
        let table = run(&ring(2)).unwrap().table();
        assert_eq!(table, "  hop   rank 0   rank 1\n  1     p0=0     p1=1\n  2     p1=all   p0=all");
    }

    #[test]
    fn a_schedule_that_waits_for_ever_is_noticed() {
        let mut programs = ring(3);
        programs[1].lanes[0].steps.remove(0);
        assert!(run(&programs).is_none_or(|t| !t.complete(3)));
    }
}
