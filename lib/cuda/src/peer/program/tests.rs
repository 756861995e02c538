//! Runs device programs in an interpreter with the kernel's blocks, lanes, and FIFOs of a few slots.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use proptest::prelude::*;

use super::*;

const SLOTS: usize = 3;
/// Factor of a finished value: each must be finished once.
const FINISHED: u64 = 1_000_003;
/// The factor that every rank's input gets once.
const SCALED: u64 = 1_000_033;

/// The arithmetic of `part_of` in `kernels/primitives.cuh`.
impl Cut {
    fn part(&self, window: u64, first: u64, span: u64) -> Range<u64> {
        let start = window * self.base + window.min(self.extra);
        let [each, more] = if window < self.extra { self.large } else { self.small };
        let border = |p: u64| ((start + p * each + p.min(more)) * self.unit).min(self.count);
        border(first)..border(first + span)
    }

    fn scratch_start(&self, part: u64) -> u64 {
        let [each, more] = if self.extra > 0 { self.large } else { self.small };
        ((part * each + part.min(more)) * self.unit).min(self.count)
    }
}

struct Memory {
    cells: Vec<u64>,
    input: usize,
    output: usize,
    scratch: usize,
}

struct LaneState {
    rank: usize,
    channel: usize,
    steps: Range<usize>,
    window: u64,
    at: usize,
}

struct Machine<'a> {
    all: &'a [Compiled],
    /// Inputs are scaled.
    reduces: bool,
    cut: Cut,
    slots: usize,
    memory: Vec<Memory>,
    fifos: HashMap<(usize, usize, usize), VecDeque<Vec<u64>>>,
    /// Elements sent by each rank, and words of lines that went through a FIFO.
    sent: Vec<u64>,
    lines: HashMap<(usize, usize, usize), usize>,
    /// Lines of LL128 of all messages of a FIFO, and of its longest.
    lines128: HashMap<(usize, usize, usize), [usize; 2]>,
}

impl<'a> Machine<'a> {
    fn new(all: &'a [Compiled], shape: &Shape, partition: &Partition, slots: usize, in_place: bool) -> Machine<'a> {
        let cut = Cut::new(partition);
        let memory = (0..shape.ranks)
            .map(|rank| {
                let count = partition.count();
                let (inputs, outputs) = (shape.input_segments(rank), shape.output_segments(rank));
                let input = if in_place { shape.in_place(rank) } else { None };
                // Both begin at the other's offset, or one after the other.
                let (input, output) = match input {
                    Some((i, o)) => (o.saturating_sub(i) * count, i.saturating_sub(o) * count),
                    None => (0, inputs * count),
                };
                let scratch = (input + inputs * count).max(output + outputs * count);
                let mut cells = vec![u64::MAX; scratch + all[rank].scratch_segments * cut.scratch as usize];
                (0..inputs * count).for_each(|i| cells[input + i] = value(rank, i));
                Memory { cells, input, output, scratch }
            })
            .collect();
        let sent = vec![0; shape.ranks];
        let (fifos, lines, lines128) = (HashMap::new(), HashMap::new(), HashMap::new());
        Machine { all, reduces: shape.collective.reduces(), cut, slots, memory, fifos, sent, lines, lines128 }
    }

    fn address(&self, rank: usize, place: u8, part: u64, range: &Range<u64>) -> usize {
        let (memory, segment) = (&self.memory[rank], usize::from(place & 63));
        match place >> 6 {
            0 => memory.input + segment * self.cut.count as usize + range.start as usize,
            1 => memory.output + segment * self.cut.count as usize + range.start as usize,
            _ => memory.scratch + segment * self.cut.scratch as usize + self.cut.scratch_start(part) as usize,
        }
    }

    /// False: it has to wait.
    fn step(&mut self, lane: &LaneState) -> bool {
        let (rank, channel) = (lane.rank, lane.channel);
        let program = &self.all[rank].program;
        let step = program.steps[lane.at];
        let part = channel as u64 * u64::from(program.parts) + u64::from(step.part);
        let range = self.cut.part(lane.window, part, u64::from(step.span));
        if range.is_empty() {
            return true;
        }
        let (from, to) = ((channel, usize::from(step.from), rank), (channel, rank, usize::from(step.to)));
        let (receives, sends) = (step.from != NOBODY, step.to != NOBODY);
        if receives && self.fifos.get(&from).is_none_or(VecDeque::is_empty)
            || sends && self.fifos.get(&to).is_some_and(|fifo| fifo.len() >= self.slots)
        {
            return false;
        }
        let has = |flag| step.flags & flag != 0;
        let places = |this: &Self, place| {
            let at = this.address(rank, place, part, &range);
            at..at + (range.end - range.start) as usize
        };
        let load = |this: &Self, place| this.memory[rank].cells[places(this, place)].to_vec();
        let received = match (receives, has(DeviceStep::LOCAL)) {
            (true, _) => self.fifos.get_mut(&from).and_then(VecDeque::pop_front),
            (false, true) => Some(load(self, step.dst)),
            (false, false) => None,
        };
        let scale = if step.src >> 6 == 0 && self.reduces { SCALED } else { 1 };
        let scaled = |own: Vec<u64>| own.into_iter().map(|x| x.wrapping_mul(scale)).collect::<Vec<u64>>();
        let own = has(DeviceStep::READS).then(|| scaled(load(self, step.src)));
        let mut result = match (own, received) {
            (Some(own), Some(received)) => {
                assert_eq!(own.len(), received.len());
                own.iter().zip(&received).map(|(a, b)| a.wrapping_add(*b)).collect()
            }
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => panic!("a step of nothing"),
        };
        if has(DeviceStep::LAST) {
            result.iter_mut().for_each(|x| *x = x.wrapping_mul(FINISHED));
        }
        if has(DeviceStep::WRITES) {
            let to = places(self, step.dst);
            self.memory[rank].cells[to].copy_from_slice(&result);
        }
        if sends {
            self.sent[rank] += result.len() as u64;
            let words = (result.len() * self.cut.elem as usize).div_ceil(8);
            *self.lines.entry(to).or_default() += words;
            let [all, longest] = self.lines128.entry(to).or_default();
            let lines = words.div_ceil(60) * 4;
            (*all, *longest) = (*all + lines, lines.max(*longest));
            self.fifos.entry(to).or_default().push_back(result);
        }
        true
    }

    fn run(&mut self) -> Result<(), String> {
        let mut lanes = vec![];
        for (rank, compiled) in self.all.iter().enumerate() {
            for channel in 0..compiled.channels {
                let program = &compiled.program;
                for l in 0..program.lane_count[channel % 2] as usize {
                    let [first, end] = program.lanes[channel % 2][l].map(usize::from);
                    lanes.push(LaneState { rank, channel, steps: first..end, window: 0, at: first });
                }
            }
        }
        loop {
            let mut moved = false;
            for lane in lanes.iter_mut() {
                while lane.window < self.cut.windows && !lane.steps.is_empty() && self.step(lane) {
                    moved = true;
                    lane.at += 1;
                    if lane.at == lane.steps.end {
                        (lane.at, lane.window) = (lane.steps.start, lane.window + 1);
                    }
                }
            }
            if !moved {
                break;
            }
        }
        match lanes.iter().find(|lane| lane.window < self.cut.windows && !lane.steps.is_empty()) {
            Some(lane) => Err(format!("rank {} channel {} stands at step {}", lane.rank, lane.channel, lane.at)),
            None if self.fifos.values().any(|fifo| !fifo.is_empty()) => Err("a message is left over".to_owned()),
            None => Ok(()),
        }
    }
}

fn value(rank: usize, i: usize) -> u64 {
    (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(rank as u32 * 7 + 1)
}

/// The expected output of rank `rank`.
fn expected(shape: &Shape, rank: usize, count: usize, i: usize) -> u64 {
    let sum = |at: usize| {
        (0..shape.ranks).fold(0u64, |s, r| s.wrapping_add(value(r, at))).wrapping_mul(SCALED).wrapping_mul(FINISHED)
    };
    match shape.collective {
        Collective::AllReduce | Collective::Reduce => sum(i),
        Collective::ReduceScatter => sum(rank * count + i),
        Collective::Broadcast => value(shape.root, i),
        Collective::Scatter => value(shape.root, rank * count + i),
        Collective::AllGather | Collective::Gather => value(i / count, i % count),
        _ => value(i / count, rank * count + i % count),
    }
}

#[derive(Clone, Copy)]
enum Way {
    Slots(usize),
    Lines(usize),
    /// Lines of LL128 of a sender.
    Lines128(usize),
}

const SCRATCH: usize = 1 << 20;

/// False if the algorithm cannot do it, or if it does not fit.
fn check(algorithm: Algorithm, shape: &Shape, count: usize, elem: usize, way: Way, in_place: bool) -> bool {
    if !algorithm::supports(algorithm, shape) {
        return false;
    }
    let what = format!("{algorithm} {shape:?} count {count} x {elem}, in place {in_place}");
    let all: Vec<Compiled> = (0..shape.ranks)
        .map(|rank| Compiled::new(algorithm, shape, rank).unwrap_or_else(|| panic!("{what}: not compiled")))
        .collect();
    let layout = Layout::new(shape.ranks, 1, &tinynccl_sys::Config::default());
    let cut = |one: &Compiled| match way {
        Way::Slots(slot_bytes) => one.for_slots(count, elem, &Layout { slot_bytes, ..layout }, SCRATCH),
        Way::Lines(lines) => one.for_lines(count, elem, lines, SCRATCH),
        Way::Lines128(lines128) => one.for_lines128(count, elem, &Layout { lines128, ..layout }, SCRATCH),
    };
    let Some(partition) = cut(&all[0]) else { return false };
    assert!(all.iter().all(|one| cut(one) == Some(partition)), "{what}: ranks cut differently");
    let in_shares = match way {
        Way::Lines128(lines128) => all[0].takes_shares(&partition, &Layout { lines128, ..layout }),
        _ => false,
    };
    let slots = if in_shares || matches!(way, Way::Slots(_)) { SLOTS } else { usize::MAX };
    let mut machine = Machine::new(&all, shape, &partition, slots, in_place);
    machine.run().unwrap_or_else(|e| panic!("{what}: {e}"));
    for rank in 0..shape.ranks {
        let memory = &machine.memory[rank];
        for i in 0..shape.output_segments(rank) * count {
            assert_eq!(memory.cells[memory.output + i], expected(shape, rank, count, i), "{what}: rank {rank}, {i}");
        }
    }
    let bytes = |rank| algorithm::bytes_sent(algorithm, shape, rank, &partition).expect("supported");
    let sent: Vec<u64> = machine.sent.iter().map(|elements| elements * elem as u64).collect();
    assert_eq!(sent.iter().sum::<u64>(), (0..shape.ranks).map(bytes).sum::<u64>(), "{what}: bytes");
    // On the CPU some channels of a ring go the other way.
    if algorithm != Algorithm::Ring || shape.channels == 1 {
        assert_eq!(sent, (0..shape.ranks).map(bytes).collect::<Vec<_>>(), "{what}: bytes of each rank");
    }
    if all[0].program.sources == 1 {
        let mut senders = HashMap::<(usize, usize), std::collections::HashSet<usize>>::new();
        machine.fifos.keys().for_each(|&(channel, from, to)| {
            senders.entry((channel, to)).or_default().insert(from);
        });
        assert!(senders.values().all(|from| from.len() == 1), "{what}: others use the slots or lines");
    }
    if let Way::Lines(most) = way {
        assert!(machine.lines.values().all(|&lines| lines <= most), "{what}: lines");
    }
    if let Way::Lines128(of_sender) = way {
        let room = of_sender * if all[0].program.sources == 1 { shape.ranks - 1 } else { 1 };
        let fits = |&[total, longest]: &[usize; 2]| match in_shares {
            true => longest <= room / SLOTS / 8 * 8,
            false => total <= room,
        };
        assert!(machine.lines128.values().all(fits), "{what}: {:?} lines of {room}", machine.lines128);
    }
    true
}

const COLLECTIVES: [Collective; 8] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
];

#[test]
fn every_algorithm_and_collective_gives_the_result_through_three_slots() {
    let mut checked = 0;
    for algorithm in Algorithm::ALL {
        for collective in COLLECTIVES {
            for ranks in 2..=8 {
                for channels in [1, 2, 5] {
                    let shape = Shape { collective, ranks, root: ranks - 1, channels };
                    for count in [0, 1, 7, 1001] {
                        for way in [
                            Way::Slots(256),
                            Way::Slots(1 << 20),
                            Way::Lines(1024),
                            Way::Lines128(24),
                            Way::Lines128(368),
                        ] {
                            checked += usize::from(check(algorithm, &shape, count, 8, way, count % 2 == 1));
                        }
                    }
                }
            }
        }
    }
    assert!(checked > 5000, "{checked}");
}

#[test]
fn every_program_fits_up_to_128_blocks() {
    for algorithm in Algorithm::ALL {
        for collective in COLLECTIVES {
            for ranks in 2..=8 {
                for channels in [1, 2, 3, 16, 128] {
                    let shape = Shape { collective, ranks, root: ranks / 2, channels };
                    if algorithm::supports(algorithm, &shape) {
                        for rank in 0..ranks {
                            let compiled = Compiled::new(algorithm, &shape, rank);
                            assert!(compiled.is_some_and(|c| c.channels <= channels.max(2)), "{algorithm} {shape:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_too_long_for_lines_or_scratch_memory_is_refused() {
    let shape = Shape { collective: Collective::AllReduce, ranks: 4, root: 0, channels: 2 };
    let ring = Compiled::new(Algorithm::Ring, &shape, 0).expect("supported");
    // A rank sends 6 parts of a quarter of a channel's half each.
    let largest = 2 * 4 * 160;
    assert!(ring.for_lines(largest, 8, 1024, 0).is_some());
    assert!(ring.for_lines(2 * largest, 8, 1024, 0).is_none());
    let tree = Compiled::new(Algorithm::Tree, &shape, 0).expect("supported");
    let layout = Layout { slot_bytes: 64 << 10, ..Layout::new(4, 1, &tinynccl_sys::Config::default()) };
    assert!(tree.for_slots(1 << 20, 8, &layout, 64).is_none());
    let cut = tree.for_slots(1 << 20, 8, &layout, 32 << 10).expect("cut smaller");
    assert!(cut.largest_window() * 8 <= 32 << 10);
    assert!(Compiled::new(Algorithm::OneShot, &shape, 0).is_none());
}

#[test]
fn a_launch_can_pass_it() {
    let all = size_of::<crate::kernels::Args>() + size_of::<DeviceProgram>() + size_of::<Cut>();
    assert!(all <= 4096, "{all} bytes");
}

proptest! {
    #[test]
    fn a_cut_is_its_partition(
        count in 0usize..300_000, elem in prop_oneof![Just(1usize), Just(2), Just(4), Just(8)], parts in 1usize..40,
        message in 64usize..70_000, first in 0usize..40, span in 1usize..4,
    ) {
        let partition = Partition::new(count, elem, parts, message);
        let cut = Cut::new(&partition);
        let first = first % parts;
        let span = span.min(parts - first);
        for w in 0..partition.windows() {
            let expected = partition.parts(w, first..first + span);
            prop_assert_eq!(cut.part(w as u64, first as u64, span as u64), expected.start as u64..expected.end as u64);
        }
        prop_assert_eq!(cut.scratch_start(first as u64), partition.scratch_start(first) as u64);
    }

    #[test]
    fn any_call_gives_its_result(
        which in (0usize..10, 0usize..8), ranks in 2usize..=8, root in 0usize..8, channels in 1usize..9,
        count in 0usize..5000, elem in prop_oneof![Just(1usize), Just(2), Just(4), Just(8)], slot in 16usize..20_000,
        lines in 0usize..3, in_place in any::<bool>(),
    ) {
        let shape = Shape { collective: COLLECTIVES[which.1], ranks, root: root % ranks, channels };
        let way = match lines {
            0 => Way::Slots(slot * 16),
            1 => Way::Lines(1024),
            _ => Way::Lines128(slot / 64 * 8),
        };
        check(Algorithm::ALL[which.0], &shape, count, elem, way, in_place);
    }
}
