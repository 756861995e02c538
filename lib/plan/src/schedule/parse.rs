//! A schedule from its text: the inverse of [`draw`](super::draw).

use std::str::FromStr;

use super::{Lane, Loc, Program, Schedule, Shape, Step};
use crate::error::{Error, Result};
use crate::wire::Collective;

/// More ranks and parts than a text has lines for.
const MOST: usize = 1 << 16;

/// Name of a lane in the text: its channel, and its number where the channel has several.
type Name = (u32, Option<u32>);

impl FromStr for Schedule {
    type Err = Error;

    /// Parses and proves it. `->` stands for `→`; empty lines and those that begin with `#` are skipped.
    fn from_str(text: &str) -> Result<Schedule> {
        let mut head: Option<(Shape, Vec<Program>, Option<usize>)> = None;
        // Of each rank, what its lanes are called in the text.
        let mut names: Vec<Vec<Name>> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim().replace("->", "→");
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |detail: String| Error::invalid("schedule", format!("line {}: {detail}: {line}", index + 1));
            match &mut head {
                None => {
                    let (shape, program, message) = shape(&line).map_err(wrong)?;
                    names = vec![Vec::new(); shape.ranks];
                    head = Some((shape, vec![program; shape.ranks], message));
                }
                Some((shape, programs, _)) => {
                    let (rank, name, step) = numbered(&line).map_err(wrong)?;
                    if rank >= shape.ranks {
                        return Err(wrong(format!("expected a rank below {}, got {rank}", shape.ranks)));
                    }
                    let lanes = &mut programs[rank].lanes;
                    let lane = names[rank].iter().position(|known| *known == name).unwrap_or_else(|| {
                        names[rank].push(name);
                        lanes.push(Lane { channel: name.0, steps: Vec::new() });
                        lanes.len() - 1
                    });
                    lanes[lane].steps.push(step);
                }
            }
        }
        let Some((shape, programs, message)) = head else {
            return Err(Error::invalid("schedule", "no line: expected \"schedule: COLLECTIVE, N ranks, N parts\""));
        };
        let schedule = Schedule::new(shape, programs)?;
        Ok(match message {
            Some(message) => schedule.with_message(message),
            None => schedule,
        })
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|_| format!("expected a number, got {:?}", text.trim()))
}

/// `schedule: reduce, 4 ranks, root 2, 4 parts, span 2, message 65536, scratch 1`: the shape, the program that all ranks
/// begin with, and the longest message.
fn shape(line: &str) -> Result<(Shape, Program, Option<usize>), String> {
    let expected = "expected \"schedule: COLLECTIVE, N ranks, N parts\"";
    let mut words = line.strip_prefix("schedule:").ok_or(expected)?.split(',').map(str::trim);
    let name = words.next().unwrap_or_default().replace('-', "_");
    let collective = Collective::ALL.into_iter().find(|c| c.name() == name);
    let collective = collective.ok_or_else(|| format!("no collective is called {name:?}"))?;
    let mut shape = Shape { collective, ranks: 0, root: 0, channels: 1 };
    let mut message = None;
    let mut program = Program { parts: 0, span: 1, scratch_segments: 0, lanes: Vec::new() };
    for word in words {
        match word.split_once(' ') {
            Some((count, "ranks")) => shape.ranks = number(count)?,
            Some((count, "parts")) => program.parts = number(count)?,
            Some(("root", rank)) => shape.root = number(rank)?,
            Some(("span", span)) => program.span = number(span)?,
            Some(("scratch", segments)) => program.scratch_segments = number(segments)?,
            Some(("message", bytes)) => message = Some(number::<usize>(bytes)?.max(1)),
            _ => return Err(format!("expected ranks, parts, root, span, message or scratch, got {word:?}")),
        }
    }
    let counts = [shape.ranks, program.parts, program.span];
    if counts.iter().any(|&count| count == 0 || count > MOST) || program.scratch_segments > MOST {
        return Err(format!("{expected}, each from 1 to {MOST}"));
    }
    Ok((shape, program, message))
}

/// `rank 0 ch 0 lane 1: step`: the rank, the channel with the lane's name, the step.
fn numbered(line: &str) -> Result<(usize, Name, Step), String> {
    let (place, step) = line.split_once(':').ok_or("expected \"rank N ch N: STEP\"")?;
    let place: Vec<&str> = place.split_whitespace().collect();
    let (rank, name) = match place[..] {
        ["rank", rank, "ch", channel] => (number(rank)?, (number(channel)?, None)),
        ["rank", rank, "ch", channel, "lane", lane] => (number(rank)?, (number(channel)?, Some(number(lane)?))),
        _ => return Err("expected \"rank N ch N: STEP\"".to_owned()),
    };
    Ok((rank, name, self::step(step.trim())?))
}

/// A clause of a step.
enum Clause {
    Recv(u32, Option<Loc>),
    Reduce(Loc, Option<Loc>, bool),
    Copy(Loc, Loc),
    Send(u32, Option<Loc>),
}

fn step(text: &str) -> Result<Step, String> {
    let clauses = text.split(", ").map(|text| clause(text.trim())).collect::<Result<Vec<Clause>, String>>()?;
    use Clause::{Copy, Recv, Reduce, Send};
    Ok(match clauses[..] {
        [Send(to, Some(src))] => Step::Send { to, src },
        [Recv(from, Some(dst))] => Step::Recv { from, dst },
        [Copy(src, dst)] => Step::Copy { src, dst },
        [Reduce(src, Some(dst), last)] => Step::Reduce { src, dst, last },
        [Recv(from, None), Reduce(src, Some(dst), last)] => Step::RecvReduceCopy { from, src, dst, last },
        [Recv(from, Some(dst)), Send(to, None)] => Step::RecvCopySend { from, to, dst },
        [Recv(from, None), Reduce(src, None, false), Send(to, None)] => Step::RecvReduceSend { from, to, src },
        [Recv(from, None), Reduce(src, Some(dst), last), Send(to, None)] => {
            Step::RecvReduceCopySend { from, to, src, dst, last }
        }
        _ => return Err(format!("no step has these parts in this order: {text:?}")),
    })
}

fn clause(text: &str) -> Result<Clause, String> {
    let (text, last) = text.strip_suffix("(last)").map_or((text, false), |text| (text.trim(), true));
    let (verb, rest) = text.split_once(' ').ok_or_else(|| format!("expected a verb and its object, got {text:?}"))?;
    let (left, right) = rest.split_once('→').map_or((rest, None), |(left, right)| (left, Some(right)));
    let to = right.map(place);
    match (verb, right) {
        ("reduce", _) => Ok(Clause::Reduce(place(left)?, to.transpose()?, last)),
        _ if last => Err(format!("(last) stands behind a reduction, got {text:?}")),
        ("recv", _) => Ok(Clause::Recv(number(left)?, to.transpose()?)),
        ("copy", Some(right)) => Ok(Clause::Copy(place(left)?, place(right)?)),
        ("send", Some(right)) if left.trim().is_empty() => Ok(Clause::Send(number(right)?, None)),
        ("send", Some(right)) => Ok(Clause::Send(number(right)?, Some(place(left)?))),
        _ => Err(format!("expected send, recv, copy or reduce, got {text:?}")),
    }
}

/// `out[0.1]`, or `in[0.2..4]`.
fn place(text: &str) -> Result<Loc, String> {
    let text = text.trim();
    let expected = || format!("expected in[SEGMENT.PART], out[…] or tmp[…], got {text:?}");
    let (buffer, inside) = text.strip_suffix(']').and_then(|text| text.split_once('[')).ok_or_else(expected)?;
    let (segment, parts) = inside.split_once('.').ok_or_else(expected)?;
    let (first, end) = match parts.split_once("..") {
        Some((first, end)) => (number::<u32>(first)?, number::<u32>(end)?),
        None => number::<u32>(parts).map(|part| (part, part.saturating_add(1)))?,
    };
    let at = match buffer {
        "in" => Loc::input,
        "out" => Loc::output,
        "tmp" => Loc::scratch,
        _ => return Err(expected()),
    };
    let span = end.checked_sub(first).filter(|span| *span > 0).ok_or_else(expected)?;
    Ok(at(number::<u32>(segment)? as usize, first as usize).spanning(span as usize))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Schedule>().unwrap_err().to_string()
    }

    const HEAD: &str = "schedule: all-reduce, 2 ranks, 2 parts\n";

    #[test]
    fn a_line_that_is_wrong_is_named() {
        assert!(error("# nothing").contains("expected \"schedule: COLLECTIVE, N ranks, N parts\""));
        for (text, words) in [
            ("schedule: all, 2 ranks, 1 parts", "line 1: no collective is called \"all\""),
            ("schedule: all_reduce, 2 ranks", "each from 1 to 65536"),
            ("schedule: all_reduce, 2 ranks, 99999999 parts", "each from 1 to 65536"),
            ("schedule: all_reduce, two ranks, 1 parts", "expected a number, got \"two\""),
            ("schedule: all_reduce, 2 ranks, 1 parts, big", "got \"big\""),
        ] {
            assert!(error(text).contains(words), "{text}: {}", error(text));
        }
        for (line, words) in [
            ("send in[0.0] -> 1", "line 2: expected \"rank N ch N: STEP\""),
            ("rank 2 ch 0: send in[0.0] -> 1", "expected a rank below 2, got 2"),
            ("rank 0 ch 0: sends in[0.0] -> 1", "expected send, recv, copy or reduce"),
            ("rank 0 ch 0: send -> 1", "no step has these parts"),
            ("rank 0 ch 0: send on[0.0] -> 1", "expected in[SEGMENT.PART]"),
            ("rank 0 ch 0: send in[0.1..1] -> 1", "expected in[SEGMENT.PART]"),
            ("rank 0 ch 0: recv 1 -> out[0.0] (last)", "(last) stands behind a reduction"),
            ("rank 0 ch 0: recv 1, send -> 1, copy in[0.0] -> out[0.0]", "no step has these parts"),
        ] {
            let said = error(&format!("{HEAD}{line}\n"));
            assert!(said.contains(words) && said.contains("line 2: "), "{line}: {said}");
        }
        assert!(error(&format!("{HEAD}rank 0 ch 0: send in[0.0] -> 0")).contains("rank 0 is not a peer of rank 0"));
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in "(schedule: (all_reduce|scan|reduce), [0-9]{1,3} ranks, [0-9]{1,3} parts\n)?\
                                       (rank [0-9] ch [0-9]: (send|recv|reduce|copy) [a-z0-9.\\[\\]→, ]{0,30}\n){0,4}.{0,20}") {
            let _ = text.parse::<Schedule>();
        }
    }
}
