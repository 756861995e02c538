//! Before a call first runs over links: its algorithm is chosen, its links are opened, its plan is compiled.

use super::message;
use crate::executor::Plan;
use crate::executor::Supervisor as _;
use crate::reduce::Average;
use crate::{Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::{self, hierarchical};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::Program;
use tinynccl_plan::wire::{Algorithm, Collective, Header};

impl Inner {
    #[cold]
    pub(super) fn new_plan(&self, engine: &mut Engine, call: &Call) -> Result<Plan> {
        let begin = engine.workspace.recorder.as_mut().map(|r| r.prepare());
        let compiled = self.compile(engine, call);
        if let (Some(recorder), Some(begin)) = (&mut engine.workspace.recorder, begin) {
            match &compiled {
                Ok(_) => recorder.compiled(begin, call.collective as u8),
                Err(_) => recorder.prepare_failed(),
            }
        }
        compiled
    }

    fn compile(&self, engine: &mut Engine, call: &Call) -> Result<Plan> {
        let op = || call.collective.to_string();
        let options = self.options;
        let bytes = call.count.saturating_mul(call.dtype.size());
        let rank = self.state.rank;
        // Which messages carry inputs follows from the programs of those who send them; it matters where inputs are
        // scaled.
        let exact = self.sums_exactly(call);
        let scales = !exact && Average::new(call.dtype, call.op, self.size()).scale.is_some();
        // Two ranks make one addition, which is rounded once on either of them.
        let at_once = exact && self.size() > 2;
        let bind = |programs: &dyn Fn(usize) -> Option<Program>| {
            let program = programs(rank)?;
            let inputs = if scales { program.received_inputs(rank, programs)? } else { vec![] };
            Some((program, inputs))
        };
        let (algorithm, message, bound) = match call.collective {
            Collective::SendRecv => {
                let message = message::length(bytes, options.max_message, self.shares_memory());
                (Algorithm::Direct, message, Some((message::program(rank, call.root, call.peer), vec![])))
            }
            collective if call.program != 0 => {
                let schedule = engine.schedules.iter().find(|schedule| schedule.fingerprint() == call.program);
                let schedule = schedule.ok_or_else(|| {
                    Error::invalid(op(), format!("program {:014x} is not known: run it by run_program", call.program))
                })?;
                let message = schedule.message(self.longest(&self.shape(collective, call.root)));
                (Algorithm::Direct, message, bind(&|rank| schedule.programs().get(rank).cloned()))
            }
            collective => {
                let choice = self.choice(engine, call, bytes)?;
                if let Some(schedule) = self.packed_for(engine, call, &choice) {
                    let program = schedule.fingerprint();
                    engine.remember(schedule);
                    return self.compile(engine, &Call { program, ..*call });
                }
                let shape = self.shape(collective, call.root);
                self.warn_refused(&shape, &engine.tuned.model.hosts, &choice);
                log::debug!("rank {rank}: {call:?}: {}", choice.algorithm);
                let order = self.order_for(engine, call, &choice);
                let (algorithm, hosts) = (choice.algorithm, &engine.tuned.model.hosts);
                let shape = match algorithm {
                    Algorithm::Hierarchical => hierarchical::widened(&shape, hosts, bytes, choice.message),
                    _ => shape,
                };
                let bound = bind(&|rank| match &order {
                    _ if at_once => algorithm::program_at_once(algorithm, &shape, rank),
                    Some(order) => algorithm::program_in_order(algorithm, &shape, order, rank),
                    None => algorithm::program_on(algorithm, &shape, hosts, rank),
                });
                (algorithm, choice.message, bound)
            }
        };
        let missing = || Error::invalid(op(), format!("no {algorithm} program for {} ranks", self.size()));
        let (program, inputs) = bound.ok_or_else(missing)?;
        if at_once && let Some(step) = program.pairwise() {
            let detail = format!(
                "TINYNCCL_SUM=exact rounds once, but this program has `{}`, which adds two values by itself: receive \
                 all operands first, and add them by reduce steps in a row into one place",
                step.name()
            );
            return Err(Error::invalid(op(), detail));
        }
        let header = call.header(self.state.id, algorithm);
        // Before links are opened, which waits for the peers.
        engine.board.announce(&Header { seq: engine.seq, ..header });
        self.open(engine, program.links())?;
        let Engine { links, .. } = engine;
        // Both ends of a link must cut alike. With more ranks, the cut would depend on links between other ranks.
        let two = call.collective == Collective::SendRecv || (self.size() == 2 && !call.collective.reduces());
        let message = match two && links.any_length(program.links().into_iter()) {
            true => message::long_length(&options, call.collective),
            false => message,
        };
        let zero_copy = links.zero_copy(call.collective.reduces());
        Plan::compile(call, header, &program, self.size(), &inputs, message, zero_copy, exact, |c, p| links.get(c, p))
            .ok_or_else(|| Error::invalid(op(), "the schedule names a rank without a link"))
    }

    /// Opens those of the links, as (channel, peer) in any order, that are not open yet. It waits for the peer at each,
    /// so every rank opens its links in the order of (channel, peer): then the pair that is first in the order of
    /// (channel, lower rank, higher rank) can always go on.
    pub(crate) fn open(&self, engine: &mut Engine, links: impl IntoIterator<Item = (u32, usize)>) -> Result<()> {
        let closed = |&(channel, peer): &(u32, usize)| engine.links.get(channel, peer).is_none();
        let mut links: Vec<_> = links.into_iter().filter(closed).collect();
        links.sort_unstable();
        links.dedup();
        let state = &self.state;
        for (channel, peer) in links {
            let begin = engine.workspace.recorder.as_mut().map(|r| r.prepare());
            // The peer may not have come to the call.
            state.waiting_on(Some(peer));
            let pair = state
                .control
                .connect(state.id, state.members[peer], channel, self.options, &state.doorbell, &|| state.stopped())
                .map_err(|e| state.cannot_connect(e))?;
            if let (Some(recorder), Some(begin)) = (&mut engine.workspace.recorder, begin) {
                recorder.connected(begin, peer, channel, pair.kind);
            }
            engine.links.insert(channel, peer, pair);
            state.waiting_on(None);
        }
        Ok(())
    }
}
