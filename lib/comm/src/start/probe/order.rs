//! Operations that two ranks perform together on rank 0's order, and the time of each call.

use std::time::Instant;

use super::buffer::{Buffer, LARGEST};
use crate::executor::{self, Buffers, Plan, Task};
use crate::reduce;
use crate::{Comm, Engine};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::{Lane, Loc, Program, Step};
use tinynccl_plan::wire::{Algorithm, Header};
use tinynccl_sys::threads::lock;

/// The channel of the measured links: the collectives' first, so that they are used again.
const CHANNEL: u32 = 0;
/// Round trips in one call, to tell a hop from a call.
pub(super) const ROUNDS: usize = 16;
/// Large buffers are walked in pieces of this many bytes, so that the clock can be checked in between.
const PIECE: usize = 256 << 10;
/// Bytes of the buffers on ordinary pages.
pub(super) const ORDINARY: usize = 128 << 10;

/// An order. Sent as three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// `calls` calls with `rounds` round trips of 8 bytes.
    Ping { rounds: usize, calls: usize },
    /// Calls that move a piece of buffers of `bytes` bytes each way; one piece after the other.
    Exchange { bytes: usize, calls: usize },
    /// Buffers of `bytes` bytes, touched.
    Prepare { bytes: usize },
    /// Copies of pieces of `bytes` bytes within each rank.
    Copy { bytes: usize, calls: usize },
    /// Buffers on ordinary pages until others are prepared; messages of `from` bytes and more use zero copy.
    ZeroCopy { from: usize },
    /// No more.
    Stop,
}

impl Order {
    pub(super) fn encode(self) -> [u64; 3] {
        match self {
            Order::Stop => [0, 0, 0],
            Order::Ping { rounds, calls } => [1, rounds as u64, calls as u64],
            Order::Exchange { bytes, calls } => [2, bytes as u64, calls as u64],
            Order::Prepare { bytes } => [3, bytes as u64, 0],
            Order::Copy { bytes, calls } => [4, bytes as u64, calls as u64],
            Order::ZeroCopy { from } => [5, from as u64, 0],
        }
    }

    pub(super) fn decode([what, size, calls]: [u64; 3]) -> Option<Order> {
        let size = usize::try_from(size).ok()?;
        let calls = usize::try_from(calls).ok()?;
        Some(match what {
            0 => Order::Stop,
            1 if size <= ROUNDS => Order::Ping { rounds: size, calls },
            2 if size <= LARGEST => Order::Exchange { bytes: size, calls },
            3 if size <= LARGEST => Order::Prepare { bytes: size },
            4 if size <= LARGEST => Order::Copy { bytes: size, calls },
            5 => Order::ZeroCopy { from: size },
            _ => return None,
        })
    }
}

/// A link under measurement, from one end.
pub(super) struct Probe<'a> {
    pub(super) comm: &'a Comm,
    peer: usize,
    leads: bool,
    input: Buffer,
    output: Buffer,
    pub(super) messages: u64,
    /// Position of a call among those with this peer.
    turn: u32,
    /// Offset of the next piece in bytes.
    at: usize,
}

impl<'a> Probe<'a> {
    pub(super) fn new(comm: &'a Comm, peer: usize, leads: bool) -> Result<Probe<'a>> {
        let mut engine = lock(&comm.inner.engine);
        comm.inner.open(&mut engine, [(CHANNEL, peer)])?;
        drop(engine);
        let (input, output) = (Buffer::new()?, Buffer::new()?);
        let mut probe = Probe { comm, peer, leads, input, output, messages: 0, turn: 0, at: 0 };
        probe.prepare(4 << 10)?;
        Ok(probe)
    }

    /// Buffers of at least `bytes` bytes whose pages are there.
    pub(super) fn prepare(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.input.most() {
            (self.input, self.output) = (Buffer::new()?, Buffer::new()?);
        }
        self.input.grow(bytes);
        self.output.grow(bytes);
        Ok(())
    }

    pub(super) fn room(&self) -> usize {
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
        // The figures of the links are those of two copies.
        let zero_copy = self.input.most() == ORDINARY;
        let call = Call::message(DType::U8, 0, 0, bytes);
        let header = call.header(inner.state.id, Algorithm::Direct);
        let plan = {
            let engine = lock(&inner.engine);
            let message = inner.options.max_message;
            Plan::compile(&call, header, program, inner.size(), &[], message, zero_copy, false, |c, p| {
                engine.links.get(c, p)
            })
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
            // SAFETY: the piece lies in the first `whole` bytes, which both buffers hold (checked above); they are
            // ours, and are not touched until this returns.
            unsafe { executor::run(&[task], links, workspace, &*inner.state, &inner.wait_policy(false)) }?;
            times.push(start.elapsed().as_nanos() as f64);
        }
        let windows = bytes.div_ceil(inner.options.max_message).max(1);
        self.messages += (program.lanes.iter().map(|lane| lane.steps.len()).sum::<usize>() * windows * calls) as u64;
        Ok(times)
    }

    /// Gives the follower an order, or takes the leader's. It is acknowledged, so that both begin to perform it
    /// together.
    pub(super) fn order(&mut self, order: Order) -> Result<Order> {
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

    /// Performs our part; returns the nanoseconds of each call.
    pub(super) fn perform(&mut self, order: Order) -> Result<Vec<f64>> {
        match order {
            Order::Ping { rounds, calls } => {
                let steps: Vec<bool> = (0..2 * rounds).map(|i| self.leads == (i % 2 == 0)).collect();
                self.run(&self.program(&[&steps]), 8, calls)
            }
            Order::Exchange { bytes, calls } => self.run(&self.program(&[&[true], &[false]]), bytes, calls),
            Order::Prepare { bytes } => {
                self.prepare(bytes)?;
                Ok(Vec::new())
            }
            Order::Copy { bytes, calls } => Ok(self.copy(bytes, calls)),
            Order::ZeroCopy { from } => {
                if self.input.most() != ORDINARY {
                    (self.input, self.output) = (Buffer::ordinary(ORDINARY)?, Buffer::ordinary(ORDINARY)?);
                }
                self.comm.inner.state.control.zero_copy_from(from);
                Ok(Vec::new())
            }
            Order::Stop => Ok(Vec::new()),
        }
    }

    /// Times of copying pieces of `bytes` bytes of the input to the output.
    pub(super) fn copy(&mut self, bytes: usize, calls: usize) -> Vec<f64> {
        self.local(bytes, calls, |input, output| {
            output.copy_from_slice(input);
        })
    }

    /// Times of adding pieces of `bytes` bytes of the input to the output, as f32.
    pub(super) fn combine(&mut self, bytes: usize, calls: usize) -> Vec<f64> {
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
pub(super) fn piece(bytes: usize) -> usize {
    bytes.min(PIECE)
}
