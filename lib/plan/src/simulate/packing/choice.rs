//! The fastest of several packings, by simulated time.

use super::super::machine::Machine;
use super::super::{Cut, Limits, simulate_together};
use crate::error::{Error, Result};
use crate::schedule::Program;

/// Numbers of channels that are tried. Trees of two channels do not wait for each other, but they share the links.
const CHANNELS: [usize; 4] = [1, 2, 4, 8];
/// Packings that are tried with several channels where more ranks than these have a call: the fastest ones with one.
const TRIED: usize = 3;
const FEW_RANKS: usize = 8;
/// Longest messages that are tried are halves of the longest one, down to this many bytes: the first message of a long
/// tree arrives sooner, but each takes time of both ends' processors, which descriptions seldom have.
const SHORTEST: usize = 32 << 10;
/// Windows of a call that are simulated, at most and at least, and messages of all ranks in them.
const WINDOWS: [usize; 2] = [64, 2];
const MESSAGES: usize = 4_000;
/// Gain that pays for more channels or shorter messages.
pub(super) const GAIN: f64 = 1.03;

/// Seconds of the call `cut` by `programs`, as `time` predicts those of shorter calls: of a long one, by the difference
/// between two that are short enough.
///
/// # Errors
/// Errors of `time`.
pub fn of_long<'p>(
    cut: Cut,
    programs: impl IntoIterator<Item = &'p Program>,
    time: impl Fn(Cut) -> Result<f64>,
) -> Result<f64> {
    let (mut messages, mut windows) = (0, 1);
    for program in programs {
        messages += sends(program);
        windows = windows.max(program.partition(cut.count, cut.elem_size, cut.max_message).windows());
    }
    let [most, least] = WINDOWS;
    let long = (MESSAGES / messages.max(1)).clamp(least, most);
    if windows <= long {
        return time(cut);
    }
    let [half, whole] = [long / 2, long].map(|some| time(Cut { count: cut.count / windows * some, ..cut }));
    let (half, whole) = (half?, whole?);
    Ok(whole + (whole - half) * (windows - long) as f64 / (long - long / 2) as f64)
}

/// Messages that a rank sends in a window.
fn sends(program: &Program) -> usize {
    program.lanes.iter().flat_map(|lane| &lane.steps).filter(|step| step.destination().is_some()).count()
}

/// The fastest of `packings`, whose programs for a number of channels `programs` gives: the channels, the longest
/// message, the seconds of the call `cut`, and the programs by group and rank.
pub(super) fn fastest<P>(
    packings: &[P],
    programs: impl Fn(&P, usize) -> Vec<Vec<Program>>,
    machine: &dyn Machine,
    groups: &[Vec<usize>],
    cut: Cut,
) -> Result<(usize, usize, f64, Vec<Vec<Program>>)> {
    let time = |programs: &[Vec<Program>], message: usize| {
        let calls: Vec<(&[usize], &[Program])> =
            groups.iter().zip(programs).map(|(ranks, programs)| (&**ranks, &**programs)).collect();
        let seconds = |cut| simulate_together(&calls, cut, machine, &Limits::default()).map(|report| report.time);
        of_long(Cut { max_message: message, ..cut }, programs.iter().flatten(), seconds)
    };
    // Short enough that pipelining does not hide how full the links are.
    let short = (cut.max_message / 4).min(cut.count * cut.elem_size / 16);
    let message = short.max(SHORTEST).min(cut.max_message);
    let [one, more @ ..] = CHANNELS;
    let mut first = Vec::new();
    for packing in packings {
        let programs = programs(packing, one);
        // A packing of more trees than can be simulated is none that pays.
        let [_, least] = WINDOWS;
        if first.is_empty() || programs.iter().flatten().map(sends).sum::<usize>() * least <= MESSAGES {
            first.push((time(&programs, message)?, packing));
        }
    }
    first.sort_by(|a, b| a.0.total_cmp(&b.0));
    if groups.iter().map(Vec::len).sum::<usize>() > FEW_RANKS {
        first.truncate(TRIED);
    }
    let Some(&(least, packing)) = first.first() else {
        return Err(Error::invalid("pack", "no packing was tried"));
    };
    let mut best = (least, one, packing);
    for channels in more {
        for &(_, packing) in &first {
            let time = time(&programs(packing, channels), message)?;
            if time * if channels > best.1 { GAIN } else { 1.0 } < best.0 {
                best = (time, channels, packing);
            }
        }
    }
    let (_, channels, packing) = best;
    let programs = programs(packing, channels);
    // The longest message first.
    let halves = (0..usize::BITS).map(|halvings| cut.max_message >> halvings);
    let mut best: Option<(f64, usize)> = None;
    for longest in halves.take_while(|&longest| longest >= SHORTEST || longest == cut.max_message) {
        let time = time(&programs, longest)?;
        if best.is_none_or(|(least, _)| time * GAIN < least) {
            best = Some((time, longest));
        }
    }
    let (time, longest) = best.unwrap_or((least, cut.max_message));
    Ok((channels, longest, time, programs))
}
