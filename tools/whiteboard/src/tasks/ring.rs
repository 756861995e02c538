//! A schedule of all_reduce, line by line: made into programs, which the library's verifier proves.

use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::schedule::verify::verify;
use tinynccl_plan::schedule::{Lane, Loc, Program, Step};
use tinynccl_plan::wire::Collective;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Message {
    round: usize,
    from: usize,
    to: usize,
    part: usize,
}

/// Part p starts at rank p, and goes round twice.
pub(super) fn ours(ranks: usize) -> Vec<String> {
    let round = |k: usize| {
        (0..ranks).map(move |r| format!("{} {r}->{} {}", k + 1, (r + 1) % ranks, (r + 2 * ranks - k) % ranks))
    };
    (0..2 * (ranks - 1)).flat_map(round).collect()
}

pub(super) fn faults(ranks: usize, lines: &[&str]) -> Vec<String> {
    let mut messages = Vec::new();
    for line in lines {
        match parse(line) {
            Some(m) if m.from.max(m.to).max(m.part) >= ranks => {
                return vec![format!("'{line}': ranks and parts are 0 to {}", ranks - 1)];
            }
            Some(m) if m.to != (m.from + 1) % ranks => {
                return vec![format!("'{line}': a ring sends to the next rank only")];
            }
            Some(m) => messages.push(m),
            None => return vec![format!("'{line}': expected a line like 1 0->1 0")],
        }
    }
    let per_rank = 2 * (ranks - 1);
    for rank in 0..ranks {
        let sent = messages.iter().filter(|m| m.from == rank).count();
        if sent != per_rank {
            return vec![format!("rank {rank} sends {sent} parts: a ring's rank sends 2(n-1), {per_rank}")];
        }
    }
    messages.sort_by_key(|m| m.round); // stable: a link keeps the order of the lines
    let last = messages.last().map_or(0, |m| m.round);
    if messages.first().is_some_and(|m| m.round == 0) || last > per_rank {
        return vec![format!("the rounds are 1 to {per_rank}: in each, every rank sends")];
    }
    let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
    // As many messages as a link ever carries: what a rank sends waits for no rank.
    match verify(&programs(ranks, &messages), &shape, messages.len(), 1, false) {
        Ok(_) => Vec::new(),
        Err(error) => vec![error.to_string()],
    }
}

fn parse(line: &str) -> Option<Message> {
    let mut words = line.split_whitespace();
    let (round, pair, part) = (words.next()?, words.next()?, words.next()?);
    let (from, to) = pair.split_once("->")?;
    let number = |text: &str| text.parse::<usize>().ok();
    let message = Message { round: number(round)?, from: number(from)?, to: number(to)?, part: number(part)? };
    words.next().is_none().then_some(message)
}

/// Each rank's program: in a round it first sends, then receives. What a rank holds of a part is its input until
/// something was received.
fn programs(ranks: usize, messages: &[Message]) -> Vec<Program> {
    let mut steps: Vec<Vec<Step>> = vec![Vec::new(); ranks];
    // The contributions in what each rank holds of each part.
    let mut held = vec![vec![1usize; ranks]; ranks];
    let mut stored = vec![vec![false; ranks]; ranks];
    for round in messages.chunk_by(|a, b| a.round == b.round) {
        let before = held.clone();
        for m in round {
            let place = if stored[m.from][m.part] { Loc::output(0, m.part) } else { Loc::input(0, m.part) };
            steps[m.from].push(Step::send(m.to, place));
        }
        for m in round {
            let (arrived, output) = (before[m.from][m.part], Loc::output(0, m.part));
            let own = if stored[m.to][m.part] { output } else { Loc::input(0, m.part) };
            let count = &mut held[m.to][m.part];
            let step = if arrived >= ranks {
                *count = ranks;
                Step::recv(m.from, output)
            } else {
                *count += arrived;
                Step::recv_reduce_copy(m.from, own, output, *count == ranks)
            };
            steps[m.to].push(step);
            stored[m.to][m.part] = true;
        }
    }
    let program =
        |steps| Program { parts: ranks, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps }] };
    steps.into_iter().map(program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(ranks: usize) -> Vec<String> {
        ours(ranks)
    }

    fn found(ranks: usize, lines: &[String]) -> Vec<String> {
        faults(ranks, &lines.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[test]
    fn rings_of_any_rotation_are_right() {
        for ranks in 2..=9 {
            assert_eq!(found(ranks, &lines(ranks)), [""; 0], "{ranks} ranks");
            // Part p may start anywhere, as long as all start at different ranks.
            let turned: Vec<String> = lines(ranks)
                .iter()
                .map(|l| {
                    let m = parse(l).unwrap();
                    format!("{} {}->{} {}", m.round, m.from, m.to, (m.part + 1) % ranks)
                })
                .collect();
            assert_eq!(found(ranks, &turned), [""; 0], "{ranks} ranks");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let mut swapped = lines(4);
        swapped[4] = "2 0->1 2".into();
        let fault = &found(4, &swapped)[0];
        assert!(fault.contains("rank"), "{fault}");
        for (line, words) in [
            ("1 0->2 0", "next rank only"),
            ("1 0->1 4", "0 to 3"),
            ("one", "expected a line like"),
            ("9 0->1 0", "1 to 6"),
        ] {
            let mut wrong = lines(4);
            wrong[0] = line.into();
            assert!(found(4, &wrong)[0].contains(words), "{line}: {:?}", found(4, &wrong));
        }
        assert!(found(4, &lines(4)[1..])[0].contains("rank 0 sends 5 parts"));
    }

    proptest::proptest! {
        #[test]
        fn a_line_alone_is_never_right(text in "[-0-9> a]{0,16}") {
            assert!(!faults(4, &[&text]).is_empty());
        }
    }
}
