//! Simulates indistinguishable ranks once, by colour refinement to the coarsest stable colouring.
//!
//! - The colour of a FIFO: its sender's colour, the steps of the sender's program that use it, its latency, the colours
//!   of its links.
//! - The colour of a link: its bandwidth, and the number of FIFOs of each colour that pass it.
//! - The colour of a rank: its steps, each with the colours of the FIFOs that it receives from and sends to.
//!
//! Colours start equal and are refined until they are stable. Then objects of one colour have the same times, by
//! induction over the events: a FIFO's transfers depend on its sender's times and on the other transfers on its links,
//! and a rank's steps on its received messages. So one object of each colour is simulated, and on a link each FIFO
//! counts once per FIFO of its colour there.
//!
//! A tree of 65,536 ranks has a few dozen colours: the two children of a node differ only by the order in which it
//! serves them, and steps that take no time and wait for nothing have no order here.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::system::{Fifo, Link, NONE, Rank, Reader, Run, System};

/// Most rounds: in a chain every rank differs, and each round separates only one.
const ROUNDS: usize = 100;

/// Returns `system` with one rank of each colour, or unchanged where that saves little.
pub(super) fn refine(system: System) -> System {
    let Some(colours) = Colours::stable(&system) else { return system };
    quotient(&system, &colours)
}

struct Colours {
    ranks: Vec<u64>,
    fifos: Vec<u64>,
    links: Vec<u64>,
}

fn hash(what: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// For each run of a lane: the number of runs up to it that wait or take time.
fn positions(system: &System, runs: &[Run]) -> Vec<u32> {
    let mut at = 0;
    let position = |run: &Run| {
        if run.recv != NONE || system.work(run, 1.0) > 0.0 {
            at += 1;
        }
        at
    };
    runs.iter().map(position).collect()
}

/// The colour-independent part: each FIFO's sends and their positions, and each rank's steps.
struct Fixed {
    fifos: Vec<u64>,
    ranks: Vec<u64>,
}

impl Fixed {
    fn new(system: &System) -> Fixed {
        let mut uses: Vec<Vec<(u32, u32, u32, u32)>> = vec![vec![]; system.fifos.len()];
        let ranks = system.ranks.iter().map(|rank| {
            let mut lanes = vec![];
            for (l, runs) in rank.lanes.iter().enumerate() {
                let mut steps = vec![];
                for (run, position) in runs.iter().zip(positions(system, runs)) {
                    // Their FIFOs represent pure sends.
                    if run.recv != NONE || system.work(run, 1.0) > 0.0 {
                        steps.push((run.kind, run.parts.1, run.times, run.recv != NONE, run.send != NONE));
                    }
                    if run.send != NONE {
                        let what = (l as u32, position, run.parts.1, run.times);
                        uses[run.send as usize].push(what);
                    }
                }
                lanes.push(steps);
            }
            hash(lanes)
        });
        let ranks = ranks.collect();
        let fifos = system.fifos.iter().zip(uses).map(|(fifo, uses)| hash((fifo.latency.to_bits(), uses))).collect();
        Fixed { fifos, ranks }
    }
}

impl Colours {
    /// `None` where there are nearly as many colours as ranks, or they would not settle.
    fn stable(system: &System) -> Option<Colours> {
        let fixed = Fixed::new(system);
        let mut passing: Vec<Vec<(u32, u32)>> = vec![vec![]; system.links.len()];
        let mut sending: Vec<Vec<u32>> = vec![vec![]; system.ranks.len()];
        for (at, fifo) in system.fifos.iter().enumerate() {
            sending[fifo.sender.0 as usize].push(at as u32);
            for &(link, times) in &fifo.links {
                passing[link as usize].push((at as u32, times));
            }
        }
        let mut colours = Colours {
            ranks: fixed.ranks.clone(),
            fifos: fixed.fifos.clone(),
            links: system.links.iter().map(|l| hash((l.id.kind, l.bandwidth.to_bits()))).collect(),
        };
        let mut before = colours.count();
        let mut scratch = vec![];
        for _ in 0..ROUNDS {
            colours.round(system, &passing, &sending, &mut scratch);
            let count = colours.count();
            if count.0 * 4 > 3 * system.ranks.len() {
                return None;
            }
            if count == before {
                return Some(colours);
            }
            before = count;
        }
        None
    }

    fn count(&self) -> (usize, usize, usize) {
        let distinct = |colours: &[u64]| {
            let mut sorted = colours.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            sorted.len()
        };
        (distinct(&self.ranks), distinct(&self.fifos), distinct(&self.links))
    }

    fn round(
        &mut self,
        system: &System,
        passing: &[Vec<(u32, u32)>],
        sending: &[Vec<u32>],
        scratch: &mut Vec<(u64, u32)>,
    ) {
        // Colours of the round before are part of the new ones, so that classes only ever split.
        let fifo = |(at, fifo): (usize, &Fifo)| {
            scratch.clear();
            scratch.extend(fifo.links.iter().map(|&(link, times)| (self.links[link as usize], times)));
            scratch.sort_unstable();
            hash((self.fifos[at], self.ranks[fifo.sender.0 as usize], &*scratch))
        };
        self.fifos = system.fifos.iter().enumerate().map(fifo).collect();
        for (link, passing) in self.links.iter_mut().zip(passing) {
            scratch.clear();
            scratch.extend(passing.iter().map(|&(fifo, times)| (self.fifos[fifo as usize], times)));
            scratch.sort_unstable();
            *link = hash((*link, &*scratch));
        }
        for (at, rank) in system.ranks.iter().enumerate() {
            let mut hasher = DefaultHasher::new();
            self.ranks[at].hash(&mut hasher);
            for run in rank.lanes.iter().flatten().filter(|run| run.recv != NONE) {
                self.fifos[system.readers[run.recv as usize].fifo as usize].hash(&mut hasher);
            }
            scratch.clear();
            scratch.extend(sending[at].iter().map(|&fifo| (self.fifos[fifo as usize], 0)));
            scratch.sort_unstable();
            scratch.hash(&mut hasher);
            self.ranks[at] = hasher.finish();
        }
    }
}

/// One of each colour: the first.
fn firsts(colours: &[u64]) -> (HashMap<u64, u32>, Vec<usize>) {
    let (mut index, mut first) = (HashMap::new(), vec![]);
    for (at, &colour) in colours.iter().enumerate() {
        index.entry(colour).or_insert_with(|| {
            first.push(at);
            first.len() as u32 - 1
        });
    }
    (index, first)
}

fn quotient(system: &System, colours: &Colours) -> System {
    let (rank_index, rank_first) = firsts(&colours.ranks);
    let (link_index, link_first) = firsts(&colours.links);
    // The FIFO that stands for its colour is one of a rank that stands for its.
    let mut fifo_index: HashMap<u64, u32> = HashMap::new();
    let mut fifo_first = vec![];
    for (at, fifo) in system.fifos.iter().enumerate() {
        let sender = fifo.sender.0 as usize;
        if rank_first[rank_index[&colours.ranks[sender]] as usize] == sender {
            fifo_index.entry(colours.fifos[at]).or_insert_with(|| {
                fifo_first.push(at);
                fifo_first.len() as u32 - 1
            });
        }
    }
    // How often FIFOs of a colour pass the link that stands for its colour.
    let mut times: HashMap<(u32, u32), u32> = HashMap::new();
    for (at, fifo) in system.fifos.iter().enumerate() {
        for &(link, n) in &fifo.links {
            let class = link_index[&colours.links[link as usize]];
            if link_first[class as usize] == link as usize {
                *times.entry((fifo_index[&colours.fifos[at]], class)).or_default() += n;
            }
        }
    }
    let fifos = fifo_first.iter().enumerate().map(|(class, &at)| {
        let old = &system.fifos[at];
        let mut links: Vec<(u32, u32)> = vec![];
        for &(link, _) in &old.links {
            let link = link_index[&colours.links[link as usize]];
            if links.iter().all(|l| l.0 != link) {
                links.push((link, times.get(&(class as u32, link)).copied().unwrap_or(1)));
            }
        }
        links.sort_unstable();
        let sender = (rank_index[&colours.ranks[old.sender.0 as usize]], old.sender.1);
        Fifo { sender, links, ..old.clone() }
    });
    let fifos: Vec<Fifo> = fifos.collect();
    let mut readers = vec![];
    let mut reader_at: HashMap<u32, u32> = HashMap::new();
    let mut run = |run: &Run| {
        let mut run = run.clone();
        if run.recv != NONE {
            run.recv = *reader_at.entry(run.recv).or_insert_with(|| {
                let fifo = system.readers[run.recv as usize].fifo as usize;
                readers.push(Reader { fifo: fifo_index[&colours.fifos[fifo]] });
                readers.len() as u32 - 1
            });
        }
        if run.send != NONE {
            let fifo = run.send as usize;
            let class = fifo_index[&colours.fifos[fifo]];
            // Another FIFO of this rank has the same colour and stands for this one.
            run.send = if fifo_first[class as usize] == fifo { class } else { NONE };
        }
        run
    };
    let ranks = rank_first.iter().map(|&at| {
        let lanes = system.ranks[at].lanes.iter();
        Rank { lanes: lanes.map(|runs| runs.iter().map(&mut run).collect()).collect() }
    });
    let ranks = ranks.collect();
    let links = link_first.iter().map(|&at| Link { ..system.links[at].clone() }).collect();
    System { ranks, fifos, readers, links, loads: system.loads.clone(), ..*system }
}
