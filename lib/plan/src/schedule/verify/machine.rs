//! Runs the lanes of all ranks over bounded FIFOs, on symbolic values.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::error::{At, Blocked, VerifyError, Wait};
use super::expr::{Exprs, Extent, NOTHING, Value};
use crate::schedule::{Buf, Loc, Program, Shape, Step};

/// Messages of one direction of one link.
struct Fifo {
    channel: u32,
    from: usize,
    to: usize,
    /// Lanes at both ends, as indices into [`Machine::lanes`].
    sender: Option<usize>,
    receiver: Option<usize>,
    queue: VecDeque<Message>,
}

struct Message {
    window: usize,
    parts: Range<usize>,
    values: Vec<Value>,
    /// Taken from the sender's input.
    input: bool,
    clock: Vec<u32>,
    hops: u32,
}

/// A lane of a rank, and its position.
struct LaneState {
    rank: usize,
    /// Index in the rank's program.
    lane: usize,
    /// FIFO per step: (received from, sent to).
    links: Vec<(Option<usize>, Option<usize>)>,
    /// [`Program::received_inputs`] of its steps.
    inputs: Vec<bool>,
    window: usize,
    step: usize,
    /// Steps of every lane that are known to have happened before now (a vector clock). Empty if nothing can race.
    clock: Vec<u32>,
    /// Longest chain of messages before it.
    hops: u32,
    queued: bool,
}

/// The last accesses to a cell.
#[derive(Clone, Default)]
struct Access {
    writer: Option<(usize, u32)>,
    readers: Vec<(usize, u32)>,
}

/// One rank's buffers: a cell per part and window (scratch: per part).
struct Memory {
    cells: Vec<Value>,
    /// Cells that were written.
    written: Vec<bool>,
    accesses: Vec<Access>,
    output: usize,
    scratch: usize,
    /// (input segment, output segment) that are the same memory.
    alias: Option<(usize, usize)>,
}

pub(super) struct Machine<'a> {
    programs: &'a [Program],
    shape: Shape,
    extent: Extent,
    pub(super) exprs: Exprs,
    depth: usize,
    lanes: Vec<LaneState>,
    fifos: Vec<Fifo>,
    memory: Vec<Memory>,
    /// Lanes that may be able to advance.
    ready: VecDeque<usize>,
    /// Messages sent in window 0, by rank.
    pub(super) messages: Vec<u64>,
    /// Number of times that each part is sent in window 0, by rank and part.
    pub(super) sent: Vec<Vec<u64>>,
    /// Longest chain of messages in window 0.
    pub(super) hops: u32,
}

impl<'a> Machine<'a> {
    /// `programs` must have passed the static checks.
    pub(super) fn new(
        programs: &'a [Program],
        shape: &Shape,
        extent: Extent,
        leaves: Value,
        depth: usize,
        in_place: bool,
    ) -> Result<Machine<'a>, VerifyError> {
        let exprs = Exprs::new(extent, leaves);
        let (parts, windows) = (extent.parts, extent.windows);
        let mut machine = Machine {
            programs,
            shape: *shape,
            extent,
            exprs,
            depth,
            lanes: vec![],
            fifos: vec![],
            memory: vec![],
            ready: VecDeque::new(),
            messages: vec![0; programs.len()],
            sent: vec![vec![0; parts]; programs.len()],
            hops: 0,
        };
        machine.connect()?;
        let races = programs.iter().any(lanes_share_parts);
        for (rank, program) in programs.iter().enumerate() {
            let output = shape.input_segments(rank) * windows * parts;
            let scratch = output + shape.output_segments(rank) * windows * parts;
            let mut cells = vec![NOTHING; scratch + program.scratch_segments * parts];
            for (place, cell) in cells[..output].iter_mut().enumerate() {
                *cell = machine.exprs.leaf(rank, place);
            }
            let accesses = if races { vec![Access::default(); cells.len()] } else { vec![] };
            let alias = if in_place { shape.in_place(rank) } else { None };
            let written = vec![false; cells.len()];
            machine.memory.push(Memory { cells, written, accesses, output, scratch, alias });
        }
        let lanes = machine.lanes.len();
        for lane in &mut machine.lanes {
            lane.clock = if races { vec![0; lanes] } else { vec![] };
        }
        Ok(machine)
    }

    /// Makes the lanes and their FIFOs, and checks that each end of a FIFO belongs to one lane.
    fn connect(&mut self) -> Result<(), VerifyError> {
        let mut index: HashMap<(u32, usize, usize), usize> = HashMap::new();
        for (rank, program) in self.programs.iter().enumerate() {
            // None: a message is missing, which will be found where it is awaited.
            let mut inputs = program.received_inputs(rank, |r| self.programs.get(r).cloned()).unwrap_or_default();
            for (l, lane) in program.lanes.iter().enumerate() {
                let me = self.lanes.len();
                let channel = lane.channel;
                let mut links = vec![];
                for step in &lane.steps {
                    let mut end = |from: usize, to: usize, sends: bool| {
                        let at = *index.entry((channel, from, to)).or_insert_with(|| {
                            let queue = VecDeque::new();
                            self.fifos.push(Fifo { channel, from, to, sender: None, receiver: None, queue });
                            self.fifos.len() - 1
                        });
                        let fifo = &mut self.fifos[at];
                        let (owner, peer, verb) = if sends {
                            (&mut fifo.sender, to, "send to")
                        } else {
                            (&mut fifo.receiver, from, "receive from")
                        };
                        match *owner.get_or_insert(me) {
                            other if other == me => Ok(at),
                            other => {
                                let lanes = (self.lanes[other].lane, l);
                                Err(VerifyError::LaneRule { rank, channel, peer, verb, lanes })
                            }
                        }
                    };
                    let source = step.source().map(|from| end(from, rank, false)).transpose()?;
                    let destination = step.destination().map(|to| end(rank, to, true)).transpose()?;
                    links.push((source, destination));
                }
                let later = inputs.split_off(inputs.len().min(lane.steps.len()));
                let inputs = std::mem::replace(&mut inputs, later);
                let (clock, queued) = (vec![], false);
                self.lanes.push(LaneState { rank, lane: l, links, inputs, window: 0, step: 0, clock, hops: 0, queued });
            }
        }
        Ok(())
    }

    /// Runs until all lanes are done. The order of lanes does not matter: every FIFO has one writer and one reader, and
    /// neither can poll, so termination and results are the same for every order (a Kahn network with bounded
    /// channels). Only shared memory could break that; see [`Machine::touch`].
    pub(super) fn run(&mut self) -> Result<(), VerifyError> {
        (0..self.lanes.len()).for_each(|lane| self.wake(Some(lane)));
        while let Some(lane) = self.ready.pop_front() {
            self.lanes[lane].queued = false;
            while self.lanes[lane].window < self.extent.windows && self.wait(lane).is_none() {
                self.step(lane)?;
            }
        }
        let unfinished = |lane: &usize| self.lanes[*lane].window < self.extent.windows;
        let blocked: Vec<Blocked> = (0..self.lanes.len())
            .filter(unfinished)
            .filter_map(|lane| Some(Blocked { at: self.at(lane)?, waits_for: self.wait(lane)? }))
            .collect();
        if !blocked.is_empty() {
            return Err(VerifyError::Deadlock { blocked });
        }
        match self.fifos.iter().find(|fifo| !fifo.queue.is_empty()) {
            Some(f) => {
                Err(VerifyError::Leftover { from: f.from, to: f.to, channel: f.channel, messages: f.queue.len() })
            }
            None => Ok(()),
        }
    }

    /// The content of a memory cell at the end.
    pub(super) fn output(&self, rank: usize, segment: usize, window: usize, part: usize) -> Value {
        let loc = Loc::output(segment, part);
        self.memory[rank].cells[self.address(rank, loc, window, part)]
    }

    fn wake(&mut self, lane: Option<usize>) {
        if let Some(lane) = lane
            && !self.lanes[lane].queued
        {
            self.lanes[lane].queued = true;
            self.ready.push_back(lane);
        }
    }

    fn current(&self, lane: usize) -> Option<Step> {
        let state = &self.lanes[lane];
        self.programs[state.rank].lanes[state.lane].steps.get(state.step).copied()
    }

    fn at(&self, lane: usize) -> Option<At> {
        let &LaneState { rank, lane: l, window, step: index, .. } = &self.lanes[lane];
        Some(At { rank, lane: l, index, window, step: self.current(lane)? })
    }

    /// The event that the lane's next step waits for.
    fn wait(&self, lane: usize) -> Option<Wait> {
        let state = &self.lanes[lane];
        let &(source, destination) = state.links.get(state.step)?;
        if let Some(fifo) = source.map(|i| &self.fifos[i])
            && fifo.queue.is_empty()
        {
            return Some(Wait::Message(fifo.from));
        }
        let fifo = destination.map(|i| &self.fifos[i])?;
        (fifo.queue.len() >= self.depth).then_some(Wait::Credit(fifo.to))
    }

    fn error(&self, lane: usize, detail: String) -> VerifyError {
        match self.at(lane) {
            Some(at) => VerifyError::Step { at: Box::new(at), detail },
            None => VerifyError::Programs(detail),
        }
    }

    /// Takes one step that does not have to wait, and wakes lanes that it unblocks.
    fn step(&mut self, lane: usize) -> Result<(), VerifyError> {
        let Some(step) = self.current(lane) else {
            self.next_window(lane);
            return Ok(());
        };
        let state = &self.lanes[lane];
        let (rank, window, parts) = (state.rank, state.window, step.parts());
        let (source, destination) = state.links[state.step];
        let mut received = vec![];
        if let Some(i) = source {
            if let Some(message) = self.fifos[i].queue.pop_front() {
                if (message.window, &message.parts) != (window, &parts) {
                    let (came, part) = (message.parts, message.window);
                    return Err(self.error(lane, format!("the message carries parts {came:?} of window {part}")));
                }
                if self.lanes[lane].inputs.get(self.lanes[lane].step).is_some_and(|&input| input != message.input) {
                    return Err(
                        self.error(lane, "is not known to receive an input, or known to receive one".to_owned())
                    );
                }
                let state = &mut self.lanes[lane];
                state.clock.iter_mut().zip(&message.clock).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
                state.hops = state.hops.max(message.hops + 1);
                received = message.values;
            }
            self.wake(self.fifos[i].sender);
        }
        if let Some(now) = self.lanes[lane].clock.get_mut(lane) {
            *now += 1;
        }
        let mut result = Vec::with_capacity(parts.len());
        for (i, part) in parts.clone().enumerate() {
            result.push(self.compute(lane, rank, window, part, step, received.get(i).copied().unwrap_or(NOTHING))?);
        }
        if let Some(i) = destination {
            if window == 0 {
                self.messages[rank] += 1;
                parts.clone().for_each(|p| self.sent[rank][p] += 1);
            }
            let state = &self.lanes[lane];
            let (clock, hops) = (state.clock.clone(), state.hops);
            let input = matches!(step, Step::Send { src, .. } if src.buf == Buf::Input);
            self.fifos[i].queue.push_back(Message { window, parts, values: result, input, clock, hops });
            self.wake(self.fifos[i].receiver);
        }
        self.lanes[lane].step += 1;
        if self.current(lane).is_none() {
            self.next_window(lane);
        }
        Ok(())
    }

    fn next_window(&mut self, lane: usize) {
        let state = &mut self.lanes[lane];
        if state.window == 0 {
            self.hops = self.hops.max(state.hops);
        }
        state.window += 1;
        state.step = 0;
    }

    /// Applies a step to one part; returns the value that it sends, if any.
    fn compute(
        &mut self,
        lane: usize,
        rank: usize,
        window: usize,
        part: usize,
        step: Step,
        received: Value,
    ) -> Result<Value, VerifyError> {
        let address = |loc: Loc| self.address(rank, loc, window, part);
        let src = step.read().map(|loc| (loc, address(loc)));
        let dst = step.write().map(|loc| (loc, address(loc)));
        let own = match src {
            // An average scales what it reads from the input: a result in its place would be scaled once more.
            Some((loc, cell)) if loc.buf == Buf::Input && self.shape.combines() && self.memory[rank].written[cell] => {
                return Err(self.error(lane, format!("reads {loc}, where a result is already")));
            }
            Some((loc, cell)) => self.load(lane, rank, loc, cell)?,
            None => NOTHING,
        };
        let value = match (step, dst) {
            (Step::Send { .. }, _) => own,
            // In place there is nothing to copy, and no write, unless an average scales.
            (Step::Copy { .. }, Some((_, cell)))
                if src.is_some_and(|(_, from)| from == cell) && !self.shape.combines() =>
            {
                return Ok(own);
            }
            (Step::Copy { .. }, _) => own,
            (Step::Recv { .. } | Step::RecvCopySend { .. }, _) => received,
            (Step::Reduce { .. }, Some((loc, cell))) => {
                let left = self.load(lane, rank, loc, cell)?;
                self.exprs.reduce(left, own).map_err(|detail| self.error(lane, detail))?
            }
            _ => self.exprs.reduce(own, received).map_err(|detail| self.error(lane, detail))?,
        };
        let last = match step {
            Step::Reduce { last, .. } | Step::RecvReduceCopy { last, .. } | Step::RecvReduceCopySend { last, .. } => {
                last
            }
            _ => false,
        };
        let of = self.shape.result(rank, 0).map_or(0, |(_, ranks)| ranks.len());
        let value = if last { self.exprs.finish(value, of).map_err(|d| self.error(lane, d))? } else { value };
        if let Some((loc, cell)) = dst {
            self.touch(lane, rank, loc, cell, true)?;
            self.memory[rank].cells[cell] = value;
            self.memory[rank].written[cell] = true;
        }
        Ok(value)
    }

    fn load(&mut self, lane: usize, rank: usize, loc: Loc, cell: usize) -> Result<Value, VerifyError> {
        self.touch(lane, rank, loc, cell, false)?;
        match self.memory[rank].cells[cell] {
            NOTHING => Err(self.error(lane, format!("reads {loc}, which nothing was written to"))),
            value => Ok(value),
        }
    }

    /// Records an access, and checks that messages order it with every conflicting access of the other lanes.
    /// Credits do not count: a program must not depend on the depth of a link.
    fn touch(&mut self, lane: usize, rank: usize, loc: Loc, cell: usize, write: bool) -> Result<(), VerifyError> {
        let Some(access) = self.memory[rank].accesses.get_mut(cell) else { return Ok(()) };
        let clock = &self.lanes[lane].clock;
        let unordered = |&(other, time): &(usize, u32)| other != lane && clock[other] < time;
        let readers = if write { access.readers.as_slice() } else { &[] };
        if let Some(&(other, _)) = access.writer.iter().chain(readers).find(|a| unordered(a)) {
            let other = self.lanes[other].lane;
            let at = self.at(lane).map(Box::new);
            return Err(at.map_or(VerifyError::Programs("race".to_owned()), |at| VerifyError::Race {
                at,
                other,
                memory: loc.to_string(),
            }));
        }
        let now = (lane, clock[lane]);
        if write {
            *access = Access { writer: Some(now), readers: vec![] };
        } else if let Some(entry) = access.readers.iter_mut().find(|(other, _)| *other == lane) {
            *entry = now;
        } else {
            access.readers.push(now);
        }
        Ok(())
    }

    /// The cell of a part. Output that is the same memory as input has the input's cells.
    fn address(&self, rank: usize, loc: Loc, window: usize, part: usize) -> usize {
        let memory = &self.memory[rank];
        let segment = loc.segment as usize;
        match (loc.buf, memory.alias) {
            (Buf::Input, _) => self.extent.place(segment, window, part),
            (Buf::Output, Some((input, output))) if segment == output => self.extent.place(input, window, part),
            (Buf::Output, _) => memory.output + self.extent.place(segment, window, part),
            (Buf::Scratch, _) => memory.scratch + segment * self.extent.parts + part,
        }
    }
}

/// Returns true if two lanes of a program may touch the same memory.
fn lanes_share_parts(program: &Program) -> bool {
    let mut owner: Vec<Option<usize>> = vec![None; program.parts];
    for (l, lane) in program.lanes.iter().enumerate() {
        for part in lane.steps.iter().flat_map(Step::parts) {
            if *owner[part].get_or_insert(l) != l {
                return true;
            }
        }
    }
    false
}
