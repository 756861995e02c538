//! Plays a schedule on numbers that round, so that another order of additions is seen.

use std::collections::{HashMap, VecDeque};

use super::super::order;
use crate::schedule::{Buf, Loc, Schedule, Step};

/// The bits of all outputs: by rank, segment and part.
pub(super) fn played(schedule: &Schedule) -> Vec<u32> {
    let shape = schedule.shape();
    let parts = schedule.programs()[0].parts;
    let mut memory: HashMap<(usize, Buf, u32, u32), f32> = HashMap::new();
    for rank in 0..shape.ranks {
        for segment in 0..shape.input_segments(rank) as u32 {
            for part in 0..parts as u32 {
                let seed = (rank as u32 * 7919 + segment * 104_729 + part * 1_299_709).wrapping_mul(2_654_435_761);
                memory.insert((rank, Buf::Input, segment, part), seed as f32 / 1e9 + 0.1);
            }
        }
    }
    let mut links: HashMap<(u32, usize, usize), VecDeque<Vec<f32>>> = HashMap::new();
    for (rank, lane, step) in order::played(schedule.programs()) {
        let channel = schedule.programs()[rank].lanes[lane].channel;
        let received = step.source().map(|from| links.get_mut(&(channel, from, rank)).unwrap().pop_front().unwrap());
        let mut sent = vec![];
        for at in 0..step.parts().len() {
            let key = |loc: Loc| (rank, loc.buf, loc.segment, loc.part + at as u32);
            let own = step.read().map(|loc| memory[&key(loc)]);
            let came = received.as_ref().map(|values| values[at]);
            let value = match step {
                Step::Reduce { dst, .. } => memory[&key(dst)] + own.unwrap(),
                _ => own.into_iter().chain(came).reduce(|a, b| a + b).unwrap(),
            };
            if let Some(dst) = step.write() {
                memory.insert(key(dst), value);
            }
            sent.push(value);
        }
        if let Some(to) = step.destination() {
            links.entry((channel, rank, to)).or_default().push_back(sent);
        }
    }
    let mut outputs = vec![];
    for rank in 0..shape.ranks {
        for segment in 0..shape.output_segments(rank) as u32 {
            outputs.extend((0..parts as u32).map(|part| memory[&(rank, Buf::Output, segment, part)].to_bits()));
        }
    }
    outputs
}
