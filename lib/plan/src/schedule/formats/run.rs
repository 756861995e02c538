//! Runs threadblocks on symbolic values: which part of which segment each chunk holds, and so where it lies in a
//! [`Program`](crate::schedule::Program).
//!
//! The formats name a chunk of a buffer whatever it holds. A schedule's step names a part, so scratch memory has a
//! place per part, and a chunk that holds another part than its own place in the output lies in scratch memory, too.
//! Inputs are never written: in place, a chunk is read from the input until it is written, and from the output
//! afterwards.

mod value;

use std::collections::{HashMap, HashSet, VecDeque};

use self::value::Value;
use super::threads::{Cell, Threads};
use crate::error::Error;
use crate::schedule::{Buf, Loc, Step};

/// Blocked threadblocks that an error lists.
const LISTED: usize = 6;

/// Reason for the end of a run.
#[derive(Debug)]
pub(super) enum Stop {
    /// These steps of several chunks, as (rank, threadblock, step), are none of a schedule; chunk by chunk they may be.
    Narrow(Vec<(usize, usize, usize)>),
    /// The threadblocks wait for each other.
    Stuck(Error),
    Wrong(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Wrong(error)
    }
}

/// Result of a run.
#[derive(Debug, Default)]
pub(super) struct Ran {
    /// Of each rank the steps in the order in which they were taken, with their threadblocks.
    pub(super) steps: Vec<Vec<(usize, Step)>>,
    /// All steps of all ranks in that order: (rank, threadblock, step).
    pub(super) sequence: Vec<(usize, usize, usize)>,
    /// The messages in the order in which they were received, by [`Threads::conns`].
    pub(super) received: Vec<usize>,
    pub(super) scratch_segments: usize,
    pub(super) span: usize,
    /// Parts of a rank's input that are its output in place, and were never moved: (rank, from, to).
    pub(super) kept: Vec<(usize, Loc, Loc)>,
}

/// A chunk's value, and where it lies in the schedule.
#[derive(Debug, Clone)]
struct Held {
    value: Value,
    loc: Loc,
}

#[derive(Debug)]
struct Message {
    conn: usize,
    round: usize,
    values: Vec<Value>,
    clock: Vec<u32>,
}

#[derive(Debug)]
struct State {
    rank: usize,
    /// Place in the rank.
    thread: usize,
    /// The next step.
    op: usize,
    /// Rounds in which its steps were taken.
    taken: Vec<usize>,
    /// Steps of all threadblocks that have happened before now; empty where races are not looked for.
    clock: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
struct Access {
    writer: Option<(usize, u32)>,
    readers: Vec<(usize, u32)>,
}

/// Rule by which links are run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    /// The link of each of [`Threads::conns`].
    pub(super) links: &'a [usize],
    /// Messages that a link holds.
    pub(super) depth: usize,
    /// The order in which messages are sent into a link, as that of all messages, by [`Threads::conns`]. `None`: any.
    pub(super) like: Option<&'a [usize]>,
    /// A message that is not passed on waits until its link is empty, and leaves room for those that are.
    pub(super) spare: bool,
    /// Looks for accesses that nothing orders.
    pub(super) races: bool,
}

struct Player<'a> {
    plan: &'a Threads,
    rules: Rules<'a>,
    threads: Vec<State>,
    /// Place of a rank's first threadblock in `threads`.
    first: Vec<usize>,
    cells: Vec<Vec<Option<Held>>>,
    accesses: Vec<Vec<Access>>,
    /// Chunk of the output that a cell is.
    output: Vec<Vec<Option<usize>>>,
    links: Vec<VecDeque<Message>>,
    /// Clocks behind the steps that others wait for.
    clocks: HashMap<(usize, usize), Vec<u32>>,
    waited: HashSet<(usize, usize)>,
    scratch: HashMap<(usize, usize, usize), u32>,
    scratch_parts: HashMap<(usize, usize), u32>,
    narrow: Vec<(usize, usize, usize)>,
    /// Messages that are still to be sent into each link, in their order, where one is given.
    turns: Vec<VecDeque<usize>>,
    ran: Ran,
}

/// Runs all threadblocks to their ends. In each round each takes at most one step, and sees what was done in earlier
/// rounds, so that the order of a rank's steps is near to that of threadblocks that run beside each other.
pub(super) fn run(plan: &Threads, rules: Rules<'_>) -> Result<Ran, Stop> {
    let mut player = Player::new(plan, rules);
    let mut round = 0;
    loop {
        let (mut left, mut moved) = (false, false);
        for t in 0..player.threads.len() {
            if player.is_done(t) {
                continue;
            }
            left = true;
            if player.wait(t, round).is_none() {
                player.step(t, round)?;
                moved = true;
            }
        }
        if !left {
            return player.end();
        }
        if !moved {
            return Err(Stop::Stuck(player.stuck(round)));
        }
        round += 1;
    }
}

impl<'a> Player<'a> {
    fn new(plan: &'a Threads, rules: Rules<'a>) -> Player<'a> {
        let ranks = plan.shape.ranks;
        let count: usize = plan.ranks.iter().map(Vec::len).sum();
        let mut player = Player {
            plan,
            rules,
            threads: vec![],
            first: vec![],
            cells: vec![],
            accesses: vec![],
            output: vec![],
            links: (0..rules.links.iter().max().map_or(0, |most| most + 1)).map(|_| VecDeque::new()).collect(),
            clocks: HashMap::new(),
            waited: HashSet::new(),
            scratch: HashMap::new(),
            scratch_parts: HashMap::new(),
            narrow: vec![],
            turns: vec![],
            ran: Ran { steps: vec![vec![]; ranks], span: 1, ..Ran::default() },
        };
        if let Some(like) = rules.like {
            player.turns = player.links.iter().map(|_| VecDeque::new()).collect();
            like.iter().for_each(|&conn| player.turns[rules.links[conn]].push_back(conn));
        }
        for (rank, threads) in plan.ranks.iter().enumerate() {
            let first = player.threads.len();
            player.first.push(first);
            for (thread, t) in threads.iter().enumerate() {
                let clock = if rules.races { vec![0; count] } else { vec![] };
                player.threads.push(State { rank, thread, op: 0, taken: vec![], clock });
                player.waited.extend(t.ops.iter().flat_map(|op| &op.after).map(|&(thread, op)| (first + thread, op)));
            }
            let inputs = plan.shape.input_segments(rank) * plan.parts;
            let outputs = plan.shape.output_segments(rank) * plan.parts;
            let all = inputs + outputs + plan.scratch[rank];
            let mut cells = vec![None; all];
            let own = Value::input(rank, plan.shape.ranks);
            for (chunk, cell) in cells.iter_mut().enumerate().take(inputs) {
                let (segment, part) = (chunk / plan.parts, chunk % plan.parts);
                let value = own.at(segment, part);
                *cell = Some(Held { value, loc: Loc::input(segment, part) });
            }
            player.cells.push(cells);
            player.accesses.push(if rules.races { vec![Access::default(); all] } else { vec![] });
            let mut output = vec![None; all];
            for chunk in 0..outputs {
                output[plan.place(rank, Cell { buf: Buf::Output, chunk })] = Some(chunk);
            }
            player.output.push(output);
        }
        player
    }

    /// Place in the schedule of a part that is written to a cell.
    fn home(&mut self, rank: usize, place: usize, part: usize) -> Loc {
        let parts = self.plan.parts;
        if let Some(chunk) = self.output[rank][place]
            && chunk % parts == part
        {
            return Loc::output(chunk / parts, part);
        }
        let next = self.scratch_parts.entry((rank, part)).or_default();
        let segment = *self.scratch.entry((rank, place, part)).or_insert_with(|| {
            *next += 1;
            *next - 1
        });
        self.ran.scratch_segments = self.ran.scratch_segments.max(segment as usize + 1);
        Loc::scratch(segment as usize, part)
    }

    fn is_done(&self, t: usize) -> bool {
        let state = &self.threads[t];
        state.op == self.plan.ranks[state.rank][state.thread].ops.len()
    }

    /// Words for what the next step waits for.
    fn wait(&self, t: usize, round: usize) -> Option<String> {
        let state = &self.threads[t];
        let threads = &self.plan.ranks[state.rank];
        let op = &threads[state.thread].ops[state.op];
        for &(thread, other) in &op.after {
            let taken = self.threads[self.first[state.rank] + thread].taken.get(other);
            if taken.is_none_or(|&taken| taken >= round) {
                let number = threads[thread].ops.get(other).map_or(other, |op| op.number);
                return Some(format!("threadblock {}, step {number}", threads[thread].id));
            }
        }
        let step = op.step.as_ref()?;
        if let Some(conn) = step.from() {
            let from = self.plan.conns[conn].from.0;
            match self.links[self.rules.links[conn]].front() {
                Some(message) if message.conn != conn => {
                    return Some(format!("a message from rank {from} that is behind one for another threadblock"));
                }
                Some(message) if message.round < round => {}
                _ => return Some(format!("a message from rank {from}")),
            }
        }
        let conn = step.to()?;
        let turn = self.turns.get(self.rules.links[conn]).and_then(VecDeque::front);
        if turn.is_some_and(|turn| *turn != conn) {
            return Some(format!("another threadblock's message to rank {}", self.plan.conns[conn].to.0));
        }
        let depth = if self.rules.spare && step.from().is_none() { 1 } else { self.rules.depth };
        let full = self.links[self.rules.links[conn]].len() >= depth;
        full.then(|| format!("rank {} to take a message", self.plan.conns[conn].to.0))
    }

    fn stuck(&self, round: usize) -> Error {
        let mut lines: Vec<String> = Vec::new();
        let mut more = 0;
        for t in (0..self.threads.len()).filter(|&t| !self.is_done(t)) {
            let State { rank, thread, op, .. } = self.threads[t];
            match self.wait(t, round) {
                Some(cause) if lines.len() < LISTED => {
                    lines.push(format!("{} waits for {cause}", self.plan.name(rank, thread, op)));
                }
                _ => more += 1,
            }
        }
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        let how = match self.rules.depth {
            usize::MAX => String::new(),
            depth => format!(
                ", once threadblocks that depend on each other are one lane and links hold {depth} messages: no order of \
                 their steps was found"
            ),
        };
        Error::invalid(self.plan.format, format!("deadlock{how}: {}", lines.join("; ")))
    }

    fn wrong(&self, t: usize, detail: &str) -> Stop {
        let State { rank, thread, op, .. } = self.threads[t];
        Stop::Wrong(self.plan.wrong(rank, thread, op, detail))
    }

    /// Takes a step that does not have to wait.
    fn step(&mut self, t: usize, round: usize) -> Result<(), Stop> {
        let plan = self.plan;
        let State { rank, thread, op: at, .. } = self.threads[t];
        let op = &plan.ranks[rank][thread].ops[at];
        for &(other, step) in &op.after {
            if let Some(clock) = self.clocks.get(&(self.first[rank] + other, step)) {
                join(&mut self.threads[t].clock, clock);
            }
        }
        if let Some(step) = op.step {
            let received = match step.from() {
                Some(conn) => match self.links[self.rules.links[conn]].pop_front() {
                    Some(message) => {
                        self.ran.received.push(conn);
                        join(&mut self.threads[t].clock, &message.clock);
                        message.values
                    }
                    None => return Err(self.wrong(t, "receives nothing")),
                },
                None => vec![],
            };
            if step.from().is_some() && received.len() != op.count {
                let detail = format!("expects {} chunks, the message has {}", op.count, received.len());
                return Err(self.wrong(t, &detail));
            }
            if let Some(now) = self.threads[t].clock.get_mut(t) {
                *now += 1;
            }
            let values = self.compute(t, rank, step, op.count, received)?;
            if let Some(conn) = step.to() {
                let clock = self.threads[t].clock.clone();
                if let Some(turns) = self.turns.get_mut(self.rules.links[conn]) {
                    turns.pop_front();
                }
                self.links[self.rules.links[conn]].push_back(Message { conn, round, values, clock });
            }
        }
        if self.waited.contains(&(t, at)) {
            self.clocks.insert((t, at), self.threads[t].clock.clone());
        }
        self.ran.sequence.push((rank, thread, at));
        let state = &mut self.threads[t];
        state.taken.push(round);
        state.op += 1;
        Ok(())
    }

    /// Applies a step to its chunks, and notes the steps that it is in the schedule; returns what it sends.
    fn compute(
        &mut self,
        t: usize,
        rank: usize,
        step: Step<usize, Cell>,
        count: usize,
        received: Vec<Value>,
    ) -> Result<Vec<Value>, Stop> {
        let mut values = Vec::with_capacity(count);
        let (mut reads, mut writes) = (vec![], vec![]);
        let (mut last, mut whole) = (None, true);
        for at in 0..count {
            let moved = |cell: Cell| Cell { chunk: cell.chunk + at, ..cell };
            let own = step.read().map(|cell| self.load(t, rank, moved(cell))).transpose()?;
            let came = received.get(at);
            let value = match (step, &own, came) {
                (Step::Send { .. } | Step::Copy { .. }, Some(own), _) => own.value.clone(),
                (Step::Recv { .. } | Step::RecvCopySend { .. }, _, Some(came)) => came.clone(),
                (Step::Reduce { dst, .. }, Some(own), _) => {
                    let left = self.load(t, rank, moved(dst))?;
                    let sum = self.combine(t, &left.value, &own.value)?;
                    let place = self.plan.place(rank, moved(dst));
                    let home = self.home(rank, place, sum.part);
                    // Its left operand is still in the input, or in the place of another part.
                    if left.loc != home {
                        self.note(t, rank, Step::Copy { src: left.loc, dst: home });
                    }
                    sum
                }
                (_, Some(own), Some(came)) => self.combine(t, &own.value, came)?,
                _ => return Err(self.wrong(t, "has no operand")),
            };
            let reduces = matches!(
                step,
                Step::Reduce { .. }
                    | Step::RecvReduceCopy { .. }
                    | Step::RecvReduceSend { .. }
                    | Step::RecvReduceCopySend { .. }
            );
            let complete = reduces && self.plan.shape.combines() && value.ranks() == self.plan.shape.ranks;
            // A message of several chunks is one step, which is the last for all of them or for none.
            whole &= *last.get_or_insert(complete) == complete;
            reads.extend(own.map(|own| own.loc));
            if let Some(cell) = step.write() {
                let place = self.plan.place(rank, moved(cell));
                self.touch(t, rank, place, cell, true)?;
                let loc = self.home(rank, place, value.part);
                self.cells[rank][place] = Some(Held { value: value.clone(), loc });
                writes.push(loc);
            }
            if step.from().is_none()
                && step.to().is_none()
                && let Some(step) = self.located(step, reads.pop(), writes.pop(), complete)
            {
                self.note(t, rank, step);
            }
            values.push(value);
        }
        if step.from().is_some() || step.to().is_some() {
            let mut one = |locs: &[Loc]| {
                let first = *locs.first()?;
                let follows = |(at, loc): (usize, &Loc)| {
                    let part = first.part as usize + at;
                    (loc.buf, loc.segment, loc.part as usize) == (first.buf, first.segment, part)
                };
                whole &= locs.len() == 1 || first.buf != Buf::Scratch && locs.iter().enumerate().all(follows);
                Some(first.spanning(locs.len()))
            };
            let (read, write) = (one(&reads), one(&writes));
            if let Some(step) = self.located(step, read, write, last == Some(true)) {
                self.note(t, rank, step);
            }
            self.ran.span = self.ran.span.max(count);
            if !whole {
                let State { thread, op, .. } = self.threads[t];
                self.narrow.push((rank, thread, op));
            }
        }
        Ok(values)
    }

    fn note(&mut self, t: usize, rank: usize, step: Step) {
        self.ran.steps[rank].push((self.threads[t].thread, step));
    }

    /// The step with its places. `None`: it copies a place to itself.
    fn located(&self, step: Step<usize, Cell>, read: Option<Loc>, write: Option<Loc>, last: bool) -> Option<Step> {
        let source = step.from().map_or(0, |conn| self.plan.conns[conn].from.0 as u32);
        let target = step.to().map_or(0, |conn| self.plan.conns[conn].to.0 as u32);
        Some(match (step, read, write) {
            (Step::Send { .. }, Some(src), _) => Step::Send { to: target, src },
            (Step::Recv { .. }, _, Some(dst)) => Step::Recv { from: source, dst },
            (Step::Copy { .. }, Some(src), Some(dst)) if src != dst => Step::Copy { src, dst },
            (Step::Reduce { .. }, Some(src), Some(dst)) => Step::Reduce { src, dst, last },
            (Step::RecvReduceCopy { .. }, Some(src), Some(dst)) => {
                Step::RecvReduceCopy { from: source, src, dst, last }
            }
            (Step::RecvCopySend { .. }, _, Some(dst)) => Step::RecvCopySend { from: source, to: target, dst },
            (Step::RecvReduceSend { .. }, Some(src), _) => Step::RecvReduceSend { from: source, to: target, src },
            (Step::RecvReduceCopySend { .. }, Some(src), Some(dst)) => {
                Step::RecvReduceCopySend { from: source, to: target, src, dst, last }
            }
            _ => return None,
        })
    }

    fn load(&mut self, t: usize, rank: usize, cell: Cell) -> Result<Held, Stop> {
        let place = self.plan.place(rank, cell);
        self.touch(t, rank, place, cell, false)?;
        match &self.cells[rank][place] {
            Some(held) => Ok(held.clone()),
            None => Err(self.wrong(t, &format!("reads {cell}, which nothing was written to"))),
        }
    }

    /// Notes an access, and checks that every conflicting one of the rank's other threadblocks is known to be over.
    fn touch(&mut self, t: usize, rank: usize, place: usize, cell: Cell, write: bool) -> Result<(), Stop> {
        let Some(access) = self.accesses[rank].get_mut(place) else { return Ok(()) };
        let clock = &self.threads[t].clock;
        let unordered = |&&(other, time): &&(usize, u32)| other != t && clock[other] < time;
        let readers = if write { access.readers.as_slice() } else { &[] };
        if let Some(&(other, _)) = access.writer.iter().chain(readers).find(unordered) {
            let id = self.plan.ranks[rank][self.threads[other].thread].id;
            let verb = if write { "writes" } else { "reads" };
            let detail = format!("{verb} {cell}, and nothing orders that with what threadblock {id} does to it");
            return Err(self.wrong(t, &detail));
        }
        let now = (t, clock[t]);
        if write {
            *access = Access { writer: Some(now), readers: vec![] };
        } else {
            access.readers.retain(|&(other, _)| other != t);
            access.readers.push(now);
        }
        Ok(())
    }

    fn combine(&self, t: usize, a: &Value, b: &Value) -> Result<Value, Stop> {
        a.combine(b).map_err(|detail| self.wrong(t, &detail))
    }

    /// Checks that no message is left, and finds what in place is a result from the start.
    fn end(mut self) -> Result<Ran, Stop> {
        let left = self.links.iter().flatten().next().map(|message| message.conn);
        if let Some(conn) = left {
            let (from, to) = (self.plan.conns[conn].from, self.plan.conns[conn].to.0);
            let count = self.links[self.rules.links[conn]].len();
            let id = self.plan.ranks[from.0][from.1].id;
            let detail =
                format!("{count} message(s) of rank {}, threadblock {id}, are not received by rank {to}", from.0);
            return Err(Stop::Wrong(Error::invalid(self.plan.format, detail)));
        }
        if !self.narrow.is_empty() {
            return Err(Stop::Narrow(self.narrow));
        }
        for rank in 0..self.plan.shape.ranks {
            for (place, chunk) in self.output[rank].iter().enumerate() {
                let held = self.cells[rank][place].as_ref();
                let (Some(chunk), Some(Held { loc, value })) = (chunk, held) else { continue };
                let to = Loc::output(chunk / self.plan.parts, chunk % self.plan.parts);
                if *loc != to && loc.part == to.part && value.part == to.part as usize {
                    self.ran.kept.push((rank, *loc, to));
                }
            }
        }
        Ok(self.ran)
    }
}

fn join(ours: &mut [u32], theirs: &[u32]) {
    ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
}
