//! Measuring the links and the memory, when a communicator starts.
//!
//! Rank 0 leads; one peer per kind of link follows: it is told what comes next, so that only rank 0 looks at the clock.
//! What is timed are small programs in the executor, so that a hop, a window and a call here cost what they cost in a collective:
//! ```text
//! ping k        leader    send recv send recv ...        follower    recv send recv send ...     2k hops in one call
//! exchange      leader    send | recv                    follower    send | recv                 both ways at once
//! ```
//! The clock is looked at before each batch; a batch is started when what the last one took says that it will be over in time.

use std::time::{Duration, Instant};

use super::state::lock;
use super::{Comm, Engine};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{self, Buffers, CallKey, Plan, Task};
use crate::reduce;
use crate::schedule::{Lane, Loc, Program, Step};
use crate::topology::fit::{self, Point};
use crate::topology::{CostModel, LinkCost, Rates};
use crate::wire::{Algorithm, Collective, Header};

/// The channel of the measured links: the collectives' first, so that they are used again.
const CHANNEL: u32 = 0;
/// Round trips in one call, to tell a hop from a call.
const ROUNDS: usize = 16;
/// Samples of one figure, if time allows; more where a buffer has more pieces.
const SAMPLES: usize = 15;
/// Large buffers are walked in pieces of this many bytes, so that the clock is looked at in between.
const PIECE: usize = 256 << 10;
/// Fewer than these do not show whether the machine was quiet.
const ENOUGH: usize = 3;
/// Most calls between two looks at the clock.
const BATCH: usize = 8;
/// Longest buffer in bytes; a rank has two of them. Shared caches of up to 42 MiB are filled by two ranks.
const LARGEST: usize = 16 << 20;
/// Time for one figure of a link, and for one of the memory.
const LINK_SLICE: Duration = Duration::from_millis(3);
const MEMORY_SLICE: Duration = Duration::from_millis(1);

/// Two f32 of 1: sums of smaller numbers can be slow.
const ONES: u64 = 0x3f80_0000_3f80_0000;

/// What carries the messages to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Shm,
    Tcp,
}

/// The ranks that rank 0 measures with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peers {
    shm: Option<usize>,
    tcp: Option<usize>,
}

impl Peers {
    /// From labels that are equal for ranks that share memory: the first of each kind.
    pub(super) fn of(labels: &[usize]) -> Peers {
        let find = |shared: bool| (1..labels.len()).find(|&r| (labels[r] == labels[0]) == shared);
        Peers { shm: find(true), tcp: find(false) }
    }

    /// Whether `rank` is one of them.
    pub(super) fn include(&self, rank: usize) -> bool {
        self.all().any(|(_, peer)| peer == rank)
    }

    fn all(&self) -> impl Iterator<Item = (Kind, usize)> {
        [(Kind::Shm, self.shm), (Kind::Tcp, self.tcp)].into_iter().filter_map(|(kind, peer)| Some((kind, peer?)))
    }
}

/// What rank 0 found.
pub(super) struct Report {
    pub(super) model: CostModel,
    pub(super) messages: u64,
    /// Nothing disturbed the measurement as far as can be seen.
    pub(super) steady: bool,
}

/// Something to do together. Travels as four numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Calls with so many round trips of 8 bytes.
    Ping { rounds: usize, calls: usize },
    /// Calls that move a piece of buffers of so many bytes each way; one piece after the other.
    Exchange { bytes: usize, calls: usize },
    /// Buffers of so many bytes, touched.
    Prepare { bytes: usize },
    /// Each rank copies pieces of so many bytes of its own.
    Copy { bytes: usize, calls: usize },
    /// No more.
    Stop,
}

impl Order {
    fn encode(self) -> [u64; 3] {
        match self {
            Order::Stop => [0, 0, 0],
            Order::Ping { rounds, calls } => [1, rounds as u64, calls as u64],
            Order::Exchange { bytes, calls } => [2, bytes as u64, calls as u64],
            Order::Prepare { bytes } => [3, bytes as u64, 0],
            Order::Copy { bytes, calls } => [4, bytes as u64, calls as u64],
        }
    }

    fn decode([what, size, calls]: [u64; 3]) -> Option<Order> {
        let size = usize::try_from(size).ok()?;
        let calls = usize::try_from(calls).ok()?;
        Some(match what {
            0 => Order::Stop,
            1 if size <= ROUNDS => Order::Ping { rounds: size, calls },
            2 if size <= LARGEST => Order::Exchange { bytes: size, calls },
            3 if size <= LARGEST => Order::Prepare { bytes: size },
            4 if size <= LARGEST => Order::Copy { bytes: size, calls },
            _ => return None,
        })
    }
}

/// A link under measurement, from one end.
struct Probe<'a> {
    comm: &'a Comm,
    peer: usize,
    leads: bool,
    input: Vec<u64>,
    output: Vec<u64>,
    messages: u64,
    /// Position of a call among those with this peer.
    turn: u32,
    /// Where the next piece begins, in bytes.
    at: usize,
}

impl<'a> Probe<'a> {
    fn new(comm: &'a Comm, peer: usize, leads: bool) -> Result<Probe<'a>> {
        let mut engine = lock(&comm.inner.engine);
        comm.inner.open(&mut engine, vec![(CHANNEL, peer)])?;
        drop(engine);
        let mut probe = Probe { comm, peer, leads, input: Vec::new(), output: Vec::new(), messages: 0, turn: 0, at: 0 };
        probe.prepare(4 << 10);
        Ok(probe)
    }

    /// Buffers of at least `bytes` bytes whose pages are there.
    fn prepare(&mut self, bytes: usize) {
        let words = bytes.div_ceil(8);
        if self.input.len() < words {
            (self.input, self.output) = (vec![ONES; words], vec![ONES; words]);
        }
    }

    fn room(&self) -> usize {
        self.input.len() * 8
    }

    /// The next piece of buffers of `bytes` bytes: where it begins, and its length. All pieces have the same.
    fn piece(&mut self, bytes: usize) -> (usize, usize) {
        let piece = piece(bytes);
        let start = if self.at + piece > bytes { 0 } else { self.at };
        self.at = start + piece;
        (start, piece)
    }

    /// The program of our end.
    fn program(&self, lanes: &[&[bool]]) -> Program {
        let peer = self.peer as u32;
        let step = |send: bool| match send {
            true => Step::Send { to: peer, src: Loc::input(0, 0) },
            false => Step::Recv { from: peer, dst: Loc::output(0, 0) },
        };
        let lane = |steps: &&[bool]| Lane { channel: CHANNEL, steps: steps.iter().map(|&s| step(s)).collect() };
        Program { parts: 1, span: 1, scratch_segments: 0, lanes: lanes.iter().map(lane).collect() }
    }

    /// Makes `calls` calls of `program` over the next pieces of `bytes` bytes and gives the nanoseconds of each.
    fn run(&mut self, program: &Program, bytes: usize, calls: usize) -> Result<Vec<f64>> {
        let inner = &self.comm.inner;
        if bytes > self.room() {
            let detail = format!("{bytes} bytes, expected at most {}", self.room());
            return Err(Error::invalid("start-up measurement", detail));
        }
        let whole = bytes;
        let bytes = piece(whole);
        let key =
            CallKey { collective: Collective::SendRecv, dtype: DType::U8, op: None, root: 0, count: bytes, peer: 0 };
        let header = key.header(inner.state.id, Algorithm::Direct);
        let plan = {
            let engine = lock(&inner.engine);
            let message = inner.options.max_message;
            Plan::compile(&key, header, program, inner.size(), message, |c, p| engine.links.get(c, p))
                .ok_or_else(|| Error::invalid("start-up measurement", "a program names a link that is not open"))?
        };
        let mut times = Vec::with_capacity(calls);
        for _ in 0..calls {
            let start = Instant::now();
            inner.state.check(|| "start-up measurement".to_owned())?;
            self.turn = self.turn.wrapping_add(1);
            let (offset, _) = self.piece(whole);
            let (input, output) = (self.input.as_ptr().cast::<u8>(), self.output.as_mut_ptr().cast::<u8>());
            let buffers = Buffers { input: input.wrapping_add(offset), output: output.wrapping_add(offset) };
            let task = Task { plan: &plan, buffers, header: Header { seq: self.turn, ..header } };
            let mut engine = lock(&inner.engine);
            let Engine { links, workspace, .. } = &mut *engine;
            // SAFETY: the piece lies in the first `whole` bytes, which both buffers hold (checked above); they are ours, and are
            // not touched until this returns.
            unsafe { executor::run(&[task], links, workspace, &*inner.state, &inner.patience(false)) }?;
            times.push(start.elapsed().as_nanos() as f64);
        }
        let windows = bytes.div_ceil(inner.options.max_message).max(1);
        self.messages += (program.lanes.iter().map(|lane| lane.steps.len()).sum::<usize>() * windows * calls) as u64;
        Ok(times)
    }

    /// Gives the follower an order, or takes the leader's. It is acknowledged, so that both begin to perform it together.
    fn order(&mut self, order: Order) -> Result<Order> {
        let words = order.encode();
        if self.leads {
            self.input[..words.len()].copy_from_slice(&words);
        }
        let program = self.program(&[&[self.leads, !self.leads]]);
        self.run(&program, size_of_val(&words), 1)?;
        if self.leads {
            return Ok(order);
        }
        let words = [self.output[0], self.output[1], self.output[2]];
        Order::decode(words).ok_or_else(|| Error::invalid("start-up measurement", format!("rank 0 ordered {words:?}")))
    }

    /// Does our part; the nanoseconds of each call.
    fn perform(&mut self, order: Order) -> Result<Vec<f64>> {
        match order {
            Order::Ping { rounds, calls } => {
                let steps: Vec<bool> = (0..2 * rounds).map(|i| self.leads == (i % 2 == 0)).collect();
                self.run(&self.program(&[&steps]), 8, calls)
            }
            Order::Exchange { bytes, calls } => self.run(&self.program(&[&[true], &[false]]), bytes, calls),
            Order::Prepare { bytes } => {
                let start = Instant::now();
                self.prepare(bytes);
                Ok(vec![start.elapsed().as_nanos() as f64])
            }
            Order::Copy { bytes, calls } => Ok(self.copy(bytes, calls)),
            Order::Stop => Ok(Vec::new()),
        }
    }

    /// Times of copying pieces of `bytes` bytes of the input to the output.
    fn copy(&mut self, bytes: usize, calls: usize) -> Vec<f64> {
        self.local(bytes, calls, |input, output| {
            output.copy_from_slice(input);
        })
    }

    /// Times of adding pieces of `bytes` bytes of the input to the output, as f32.
    fn combine(&mut self, bytes: usize, calls: usize) -> Vec<f64> {
        let kernels = reduce::kernels(DType::F32, ReduceOp::Sum);
        self.local(bytes, calls, |input, output| {
            let n = 2 * input.len().min(output.len());
            let (a, out) = (input.as_ptr().cast::<u8>(), output.as_mut_ptr().cast::<u8>());
            // SAFETY: both slices hold `n` f32, aligned to 8 bytes; `out` is exactly `b`.
            unsafe { (kernels.reduce)(a, out, out, n) };
        })
    }

    /// Times of `f` on pieces of the input and the output, in words.
    fn local(&mut self, bytes: usize, calls: usize, f: impl Fn(&[u64], &mut [u64])) -> Vec<f64> {
        let mut times = Vec::with_capacity(calls);
        let bytes = bytes.min(self.room());
        for _ in 0..calls {
            let (start, len) = self.piece(bytes);
            let words = start / 8..(start + len) / 8;
            let begin = Instant::now();
            if let (Some(input), Some(output)) = (self.input.get(words.clone()), self.output.get_mut(words)) {
                f(input, output);
            }
            std::hint::black_box(&mut self.output);
            times.push(begin.elapsed().as_nanos() as f64);
        }
        times
    }
}

/// Length of the pieces of a buffer of `bytes` bytes.
fn piece(bytes: usize) -> usize {
    bytes.min(PIECE)
}

/// Samples for a buffer of `bytes` bytes: every piece twice.
fn samples(bytes: usize) -> usize {
    SAMPLES.max(2 * (bytes / piece(bytes).max(1)))
}

/// The leader's clock.
struct Clock {
    end: Instant,
    /// There was time for every figure, and each came out much the same every time.
    steady: bool,
}

impl Clock {
    fn has(&self, ns: f64) -> bool {
        ns <= self.end.saturating_duration_since(Instant::now()).as_nanos() as f64
    }

    /// Repeats `batch(calls)` until there are `most` samples, the slice is over, or another call might not be over in time.
    /// The first call is expected to take `guess` nanoseconds; `None` when there is no time for it.
    fn sample(
        &mut self,
        guess: f64,
        most: usize,
        slice: Duration,
        mut batch: impl FnMut(usize) -> Result<Vec<f64>>,
    ) -> Result<Option<f64>> {
        let start = Instant::now();
        let mut times: Vec<f64> = Vec::new();
        // A guess may be off by some factor.
        let mut expected = 2.0 * guess;
        while times.len() < most && self.has(expected) {
            let left = slice.saturating_sub(start.elapsed()).as_nanos() as f64;
            let calls = ((left / expected.max(1.0)) as usize).min(most - times.len());
            // One first: it finds cold caches, and tells how many more there is time for. Two or three after it in any case.
            let calls = match times.len() {
                0 => 1,
                n if n <= ENOUGH => calls.clamp(1, BATCH),
                _ if calls == 0 => break,
                _ => calls.min(BATCH),
            };
            let new = batch(calls)?;
            expected = new.iter().copied().fold(0.0, f64::max);
            times.extend(new);
        }
        if times.len() > 1 {
            times.remove(0);
        }
        self.steady &= times.len() >= ENOUGH && fit::is_steady(&times);
        Ok(fit::typical(&times))
    }
}

/// Rank 0's side: measures until there is nothing left to measure, or no time.
pub(super) fn lead(comm: &Comm, peers: &Peers, end: Instant) -> Result<Report> {
    let mut clock = Clock { end, steady: true };
    let mut model = lock(&comm.inner.engine).tuned.model.clone();
    let mut messages = 0;
    for (kind, peer) in peers.all() {
        let state = &comm.inner.state;
        let probe = Probe::new(comm, peer, true)?;
        let mut link = Link { probe, clock: &mut clock, model: &mut model, kind, first: messages == 0 };
        link.measure(state.control.shares_host(state.members[peer]))?;
        link.probe.order(Order::Stop)?;
        messages += link.probe.messages;
    }
    Ok(Report { model, messages, steady: clock.steady })
}

/// A follower's side. The number of messages that it took.
pub(super) fn follow(comm: &Comm) -> Result<u64> {
    let mut probe = Probe::new(comm, 0, false)?;
    loop {
        match probe.order(Order::Stop)? {
            Order::Stop => return Ok(probe.messages),
            order => probe.perform(order)?,
        };
    }
}

/// The leader at one link.
struct Link<'a> {
    probe: Probe<'a>,
    clock: &'a mut Clock,
    model: &'a mut CostModel,
    kind: Kind,
    /// The memory and the call have not been measured yet.
    first: bool,
}

impl Link<'_> {
    fn measure(&mut self, same_host: bool) -> Result<()> {
        let built_in = match self.kind {
            Kind::Shm => self.model.shm,
            Kind::Tcp => self.model.tcp,
        };
        let once = self.together(20.0 * built_in.alpha_ns, SAMPLES, |calls| Order::Ping { rounds: 1, calls })?;
        let guess = once.unwrap_or(f64::INFINITY) * ROUNDS as f64;
        let many = self.together(guess, SAMPLES, |calls| Order::Ping { rounds: ROUNDS, calls })?;
        let (Some(once), Some(many)) = (once, many) else { return Ok(()) };
        let (alpha_ns, call_ns) = fit::latency(once, many, ROUNDS);
        // Ranks of one host that wait longer than they spin were not running at the same time: other programs, or
        // this one's other threads, had the cores. That says nothing about the link.
        if same_host && alpha_ns > self.probe.comm.config().spin.as_nanos() as f64 / 2.0 {
            log::debug!("{:?}: {alpha_ns} ns for a message: the cores are busy, the built-in figures stay", self.kind);
            self.clock.steady = false;
            return Ok(());
        }
        let caches = self.model.caches;
        // Footprints per rank: half of L2, a quarter of this rank's part of L3, more than all of it.
        let ranks = if same_host { 2.0 } else { 1.0 };
        let sizes = [
            caches.l2 / 4,
            (caches.l3 / 8 / self.model.busy_cores.max(1.0) as usize).max(caches.l2),
            (caches.l3 as f64 * 0.75 / ranks) as usize,
        ];
        let mut beta = [None; 3];
        let mut ns_per_byte = built_in.beta.l2;
        let mut local = Local::default();
        for (level, bytes) in sizes.into_iter().enumerate() {
            let bytes = bytes.max(4 << 10) / 8 * 8;
            if bytes > LARGEST || !self.make_room(bytes)? {
                break;
            }
            let piece = piece(bytes);
            let message = self.probe.comm.inner.options.max_message.min(piece) as f64;
            let guess = 2.0 * ns_per_byte * piece as f64;
            let exchange = |calls| Order::Exchange { bytes, calls };
            let Some(ns) = self.together(guess, samples(bytes), exchange)? else { break };
            ns_per_byte = ns / piece as f64;
            let per_byte = (ns_per_byte - alpha_ns / message).max(ns_per_byte / 10.0);
            beta[level] = Some(Point { footprint: 2.0 * bytes as f64, ranks, ns_per_byte: per_byte });
            if self.first {
                self.memory(level, bytes, same_host, &mut local)?;
            }
        }
        if local.points[0].is_some() {
            self.model.copy = fit::rates(local.points.map(|p| p.map(|p| p.0)), &caches, 1.0, &self.model.copy);
            let combined = local.points.map(|p| p.map(|p| p.1));
            let total = fit::rates(combined, &caches, 1.0, &sum(&self.model.copy, &self.model.reduce));
            self.model.reduce = fit::beyond(total, self.model.copy);
            self.model.contention = local.contention.unwrap_or(self.model.contention);
        }
        let crowding = if same_host { self.model.contention } else { 1.0 };
        let link = LinkCost { alpha_ns, beta: fit::rates(beta, &caches, crowding, &built_in.beta) };
        match self.kind {
            Kind::Shm => (self.model.shm, self.model.sync_ns) = (link, alpha_ns),
            Kind::Tcp => self.model.tcp = link,
        }
        if self.first {
            self.model.call_ns = call_ns;
        }
        Ok(())
    }

    /// Buffers of `bytes` bytes on both ranks, if there is time for it.
    fn make_room(&mut self, bytes: usize) -> Result<bool> {
        let room = self.probe.room();
        if bytes <= room {
            return Ok(true);
        }
        // Page faults: about a microsecond per page and buffer.
        if !self.clock.has(bytes as f64 / 4096.0 * 2.0 * 1_000.0) {
            self.clock.steady = false;
            return Ok(false);
        }
        let order = Order::Prepare { bytes };
        self.probe.order(order)?;
        self.probe.perform(order)?;
        Ok(true)
    }

    /// The memory's figures on this rank, once per level: alone, and at the last one with the peer.
    fn memory(&mut self, level: usize, bytes: usize, same_host: bool, local: &mut Local) -> Result<()> {
        let (footprint, piece, most) = (2.0 * bytes as f64, piece(bytes) as f64, samples(bytes));
        let point = |ns: f64| Point { footprint, ranks: 1.0, ns_per_byte: ns / piece };
        let guess = self.model.copy.memory * piece;
        let Link { probe, clock, .. } = self;
        let copy = clock.sample(guess, most, MEMORY_SLICE, |calls| Ok(probe.copy(bytes, calls)))?;
        let combine = clock.sample(guess, most, MEMORY_SLICE, |calls| Ok(probe.combine(bytes, calls)))?;
        let (Some(copy), Some(combine)) = (copy, combine) else { return Ok(()) };
        local.points[level] = Some((point(copy), point(combine)));
        if level == 2 && same_host {
            let both = self.together(2.0 * copy, most, |calls| Order::Copy { bytes, calls })?;
            local.contention = both.map(|both| fit::contention(copy, both));
        }
        Ok(())
    }

    /// [`Clock::sample`] of something that both ranks do.
    fn together(&mut self, guess: f64, most: usize, order: impl Fn(usize) -> Order) -> Result<Option<f64>> {
        let Link { probe, clock, .. } = self;
        clock.sample(guess, most, LINK_SLICE, |calls| {
            let order = probe.order(order(calls))?;
            probe.perform(order)
        })
    }
}

/// Copying and combining at the three levels, and two ranks at once.
#[derive(Default)]
struct Local {
    points: [Option<(Point, Point)>; 3],
    contention: Option<f64>,
}

fn sum(a: &Rates, b: &Rates) -> Rates {
    Rates::new(a.l2 + b.l2, a.l3 + b.l3, a.memory + b.memory)
}

#[cfg(test)]
mod tests;
