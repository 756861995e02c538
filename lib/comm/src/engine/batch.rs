//! Several calls as one pass of the executor.

use super::message;
use super::pack::{self, Pack, Unit};
use super::raw_call::RawCall;
use super::run::Turn;
use crate::executor::{self, Buffers, Plan, Ranges, Task};
use crate::{Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_sys::threads::lock;

use std::sync::Arc;

impl Inner {
    /// Runs `calls` together over links: a rank that waits at the shared region cannot also wait for messages. Small
    /// all_reduces are packed ([`pack`]); every other call is a task.
    ///
    /// # Safety
    /// As [`executor::run`]: every call's buffers must be as large as the call says, and valid until this returns.
    pub unsafe fn batch(&self, op: &str, calls: &[RawCall], background: bool) -> Result<()> {
        self.state.check(|| op.to_owned())?;
        if calls.is_empty() {
            return Ok(());
        }
        let mut engine = lock(&self.engine);
        self.record_messages(&mut engine, calls);
        // SAFETY: forwarded from the caller.
        unsafe { self.recorded_batch(&mut engine, calls, background) }
    }

    /// # Safety
    /// As [`Inner::batch`].
    unsafe fn recorded_batch(&self, engine: &mut Engine, calls: &[RawCall], background: bool) -> Result<()> {
        if calls.iter().any(|call| call.collective != Collective::SendRecv) {
            self.open_board(engine)?;
        }
        self.open_messages(engine, calls)?;
        let units = pack::units(calls, self.size());
        let words: usize = units.iter().map(|unit| unit.words(calls)).sum();
        let mut memory = std::mem::take(&mut engine.packed);
        if memory.len() < words {
            memory.resize(words, 0);
        }
        // SAFETY: by the caller, and `memory` holds every pack.
        let outcome = unsafe { self.run_units(engine, &units, calls, memory.as_mut_ptr(), background) };
        engine.packed = memory;
        outcome
    }

    /// A send and a receive together. A send of one message that finds a free slot completes at once; the receive then
    /// runs alone.
    ///
    /// # Safety
    /// As [`Inner::batch`].
    pub(crate) unsafe fn send_recv(&self, calls: &[RawCall; 2]) -> Result<()> {
        let [send, recv] = calls;
        self.state.check(|| "send_recv".to_owned())?;
        let mut engine = lock(&self.engine);
        self.record_messages(&mut engine, calls);
        self.open_messages(&mut engine, calls)?;
        let place = self.route(&mut engine, &send.call);
        self.prepare(&mut engine, place)?;
        let seq = engine.next_seq(&send.call, self.state.rank);
        let Engine { links, routes, workspace, .. } = &mut *engine;
        let plan = routes[place].1.plan()?;
        let task = Task { plan, buffers: send.buffers, header: Header { seq, ..plan.header } };
        // SAFETY: forwarded from the caller.
        if workspace.recorder.is_none() && unsafe { executor::one_message(&task, links, 1) } {
            let seq = engine.next_seq(&recv.call, self.state.rank);
            let place = self.route(&mut engine, &recv.call);
            // SAFETY: forwarded from the caller.
            unsafe { self.over_links(&mut engine, place, Turn { seq, before: 0 }, recv.buffers, false) }?;
            self.state.progress.done(u64::from(engine.seq));
            return Ok(());
        }
        // Nothing was sent, so the number is free again.
        engine.return_seq(&send.call, self.state.rank);
        // SAFETY: forwarded from the caller.
        unsafe { self.recorded_batch(&mut engine, calls, false) }
    }

    /// Records the messages among `calls` under the numbers that they will have.
    fn record_messages(&self, engine: &mut Engine, calls: &[RawCall]) {
        let messages = || calls.iter().filter(|call| call.collective == Collective::SendRecv);
        let rank = self.state.rank;
        for call in messages() {
            let seq = engine.next_seq(&call.call, rank);
            self.state.progress.message(&message::recorded(&call.call, rank, seq));
        }
        messages().for_each(|call| engine.return_seq(&call.call, rank));
    }

    /// # Safety
    /// As [`Inner::batch`]; `memory` must hold the packs.
    unsafe fn run_units(
        &self,
        engine: &mut Engine,
        units: &[Unit],
        calls: &[RawCall],
        memory: *mut u64,
        background: bool,
    ) -> Result<()> {
        let mut plans: Vec<(Arc<Plan>, Header, Buffers)> = Vec::with_capacity(units.len());
        let mut accounts = Vec::new();
        let mut at = 0;
        for unit in units {
            // SAFETY: `at` counts the words of the packs so far.
            let packed: *mut u8 = unsafe { memory.add(at) }.cast();
            at += unit.words(calls);
            plans.push(match unit {
                Unit::Call(index) => {
                    let call = &calls[*index];
                    let planned = self.planned(engine, call, None)?;
                    if call.ranges.is_none() && engine.links.verifies(&planned.1) {
                        // SAFETY: by the caller.
                        accounts.push((plans.len(), unsafe { self.account(engine, call, &planned.1, call.buffers) }));
                    }
                    planned
                }
                Unit::Pack(pack) => {
                    let first = &calls[pack.calls[0]];
                    let buffers = Buffers { input: packed, output: packed };
                    let call = RawCall::over(first.with_count(first.dtype, pack.count), buffers);
                    let planned = self.planned(engine, &call, Some((pack, calls)))?;
                    // SAFETY: by the caller.
                    unsafe {
                        pack.gather(calls, packed);
                        if engine.links.verifies(&planned.1) {
                            self.compare_pack(&planned.1, pack, calls, packed, false)?;
                            accounts.push((plans.len(), self.account(engine, &call, &planned.1, buffers)));
                        }
                    }
                    planned
                }
            });
        }
        let tasks: Vec<Task<'_>> =
            plans.iter().map(|(plan, header, buffers)| Task { plan, buffers: *buffers, header: *header }).collect();
        let Engine { links, workspace, .. } = &mut *engine;
        // SAFETY: by the caller; packs are as long as their calls together.
        unsafe { executor::run(&tasks, links, workspace, &*self.state, &self.wait_policy(background)) }?;
        let mut at = 0;
        for (unit, task) in units.iter().zip(&tasks) {
            if let Unit::Pack(pack) = unit {
                // SAFETY: by the caller.
                unsafe {
                    let packed = memory.add(at).cast();
                    pack.scatter(calls, packed);
                    if engine.links.verifies(&task.header) {
                        self.compare_pack(&task.header, pack, calls, packed, true)?;
                    }
                }
            }
            at += unit.words(calls);
        }
        for (task, account) in accounts {
            let (_, header, buffers) = &plans[task];
            // SAFETY: by the caller; packs are as long as their calls together.
            unsafe { self.compare(engine, header, account, buffers.output, background) }?;
        }
        self.state.progress.done(u64::from(engine.seq));
        Ok(())
    }

    /// Opens all links of point-to-point messages first, in an order that cannot deadlock, independent of the order of
    /// calls.
    fn open_messages(&self, engine: &mut Engine, calls: &[RawCall]) -> Result<()> {
        let messages = calls.iter().filter(|call| call.collective == Collective::SendRecv);
        if messages.clone().all(|call| engine.links.get(message::CHANNEL, call.partner(self.state.rank)).is_some()) {
            return Ok(());
        }
        self.open(engine, messages.map(|call| (message::CHANNEL, call.partner(self.state.rank))))
    }

    /// The next call's plan, header and buffers; `packed` has the calls that it carries, if it is a pack.
    fn planned(
        &self,
        engine: &mut Engine,
        call: &RawCall,
        packed: Option<(&Pack, &[RawCall])>,
    ) -> Result<(Arc<Plan>, Header, Buffers)> {
        let progress = &self.state.progress;
        let carrying = |header| packed.map_or(header, |(pack, calls)| pack.header(calls, progress, header));
        let seq = engine.next_seq(&call.call, self.state.rank);
        let mut turn = Turn { seq, before: 0 };
        if call.collective != Collective::SendRecv {
            let header = turn.of(&call.header(self.state.id, Algorithm::Direct));
            let op = if call.ranges.is_some() { Header::UNEVEN } else { header.op };
            let digests = progress.start(&carrying(Header { op, ..header }));
            engine.board.made(&digests);
            turn.before = digests.before;
        }
        let plan = match &call.ranges {
            Some(ranges) => Arc::new(self.compile_ranges(engine, &call.call, ranges)?),
            None => {
                let place = self.route(engine, &call.call);
                self.prepare(engine, place)?;
                engine.routes[place].1.plan()?.clone()
            }
        };
        let header = carrying(turn.of(&plan.header));
        engine.board.announce(&header);
        Ok((plan, header, call.buffers))
    }

    /// Not cached: lengths are expected to differ from call to call.
    fn compile_ranges(&self, engine: &mut Engine, call: &Call, ranges: &Ranges) -> Result<Plan> {
        let header = Header { op: Header::UNEVEN, ..call.header(self.state.id, Algorithm::Direct) };
        engine.board.announce(&Header { seq: engine.seq, ..header });
        let (rank, size) = (self.state.rank, self.size());
        let peers = ranges.sends(call, rank, size).chain(ranges.recvs(call, rank, size));
        self.open(engine, peers.map(|(peer, _)| (0, peer)))?;
        let longest = self.options.max_message;
        let zero_copy = engine.links.zero_copy(false);
        Plan::of_ranges(call, header, ranges, (rank, size), longest, zero_copy, |peer| engine.links.get(0, peer))
            .ok_or_else(|| Error::invalid(format!("{}_v", call.collective), "a rank without a link"))
    }
}

impl Unit {
    /// Words of working memory.
    fn words(&self, calls: &[RawCall]) -> usize {
        match self {
            Unit::Call(_) => 0,
            Unit::Pack(pack) => pack.words(calls),
        }
    }
}
