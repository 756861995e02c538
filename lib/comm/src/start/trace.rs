//! Assigns trace files and clocks to ranks while the communicator starts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Comm;
use crate::executor::Supervisor;
use crate::state::control::{Control, exchange};
use crate::trace::{ClockOffset, Run, Sink, Span, measure, now};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;

/// Queries for another host's time; the shortest round trip counts.
const ROUNDS: usize = 32;
/// Key in a rank's description at the rendezvous, next to its endpoint.
const FLAG: &str = "trace";

/// Announces that this rank traces. Ranks may differ in this.
pub(super) fn announce(info: &mut Value, config: &Config) {
    if let (Some(fields), Some(_)) = (info.as_object_mut(), &config.trace) {
        fields.insert(FLAG.to_owned(), Value::Bool(true));
    }
}

/// The ranks that trace.
pub(super) fn announced(infos: &[Value]) -> Vec<usize> {
    infos.iter().enumerate().filter(|(_, info)| info.get(FLAG).is_some()).map(|(rank, _)| rank).collect()
}

/// The sinks of ranks that are threads of this process.
pub(super) fn open_in_process(ranks: usize, config: &Config) -> Result<Vec<Option<Arc<Sink>>>> {
    if config.trace.is_none() {
        return Ok(vec![None; ranks]);
    }
    let run = Run::new()?;
    let sinks = (0..ranks).map(|rank| {
        let Some(sink) = Sink::new(rank, run.clone(), config) else { return Ok(None) };
        if !sink.join() {
            sink.create()?;
        }
        Ok(Some(Arc::new(sink)))
    });
    sinks.collect()
}

/// A rank's sink before its clock and its file are settled.
pub(super) struct Start {
    sink: Arc<Sink>,
    /// The ranks that trace; the first one's clock is the file's.
    tracers: Vec<usize>,
    begin: u64,
    outcome: Result<()>,
}

/// A rank's message in the second exchange.
#[derive(Serialize, Deserialize)]
struct Settled {
    error: Option<String>,
    offset_ns: i64,
    uncertainty_ns: u64,
}

/// First half: the first of `tracers` creates the file. So does the first tracer of each other host, unless it sees
/// that file.
pub(crate) fn open(control: &dyn Control, tracers: Vec<usize>, config: &Config) -> Result<Option<Start>> {
    let Some(reference) = tracers.first().copied() else { return Ok(None) };
    if config.trace.is_none() {
        return Ok(None);
    }
    let begin = now();
    let mine = match control.rank() == reference {
        true => Run::new().and_then(|run| {
            let sink = Sink::new(reference, run.clone(), config);
            sink.map_or(Ok(()), |sink| sink.create())?;
            Ok(Some(run))
        }),
        false => Ok(None),
    };
    let said: std::result::Result<Option<Run>, String> = mine.as_ref().cloned().map_err(Error::to_string);
    let heard = exchange(control, "trace-open", &tracers, &said, &|| false)?;
    mine?;
    let run = match heard.into_iter().next() {
        Some(Ok(Some(run))) => run,
        Some(Err(error)) => return Err(Error::invalid("trace", format!("rank {reference} cannot write: {error}"))),
        _ => return Err(Error::invalid("trace", format!("rank {reference} did not name its file"))),
    };
    let Some(sink) = Sink::new(control.rank(), run, config) else { return Ok(None) };
    let outcome = if !sink.join() && (sink.is_alone() || leads(control, &tracers)) { sink.create() } else { Ok(()) };
    Ok(Some(Start { sink: Arc::new(sink), tracers, begin, outcome }))
}

/// True for the first tracing rank of a host.
fn leads(control: &dyn Control, tracers: &[usize]) -> bool {
    tracers.iter().copied().find(|&r| control.shares_host(r)) == Some(control.rank())
}

impl Start {
    pub(super) fn sink(&self) -> Arc<Sink> {
        self.sink.clone()
    }

    /// Second half, when the communicator can send: measures other hosts' clocks, then every rank finds its file.
    pub(super) fn finish(self, comm: &Comm) -> Result<()> {
        let Start { sink, tracers, begin, outcome } = self;
        let state = &comm.inner.state;
        let control = &*state.control;
        let clock = clock(comm, &tracers)?;
        let settled = Settled {
            error: outcome.as_ref().err().map(Error::to_string),
            offset_ns: clock.ns,
            uncertainty_ns: clock.uncertainty_ns,
        };
        let heard = exchange(control, "trace-settled", &tracers, &settled, &|| state.has_failed());
        let heard = heard.map_err(|error| state.exchange_failed("trace", error))?;
        outcome?;
        if let Some((rank, error)) = tracers.iter().zip(&heard).find_map(|(r, s)| Some((r, s.error.as_ref()?))) {
            return Err(Error::invalid("trace", format!("rank {rank} cannot write: {error}")));
        }
        // The first rank of our host has measured for all of us.
        let leader = tracers.iter().position(|&r| control.shares_host(r));
        if let Some(leader) = leader.and_then(|index| heard.get(index)) {
            sink.set_clock(ClockOffset { ns: leader.offset_ns, uncertainty_ns: leader.uncertainty_ns });
        }
        if !sink.join() {
            sink.create_own()?;
        }
        if let Some(trace) = comm.trace() {
            trace.span(begin, Span::Start);
        }
        Ok(())
    }
}

/// Offset of our clock from that of the first tracer, which answers the other hosts one after the other. Zero on its
/// own host, and for ranks whose offset another rank measures.
fn clock(comm: &Comm, tracers: &[usize]) -> Result<ClockOffset> {
    let control = &*comm.inner.state.control;
    let Some((&reference, others)) = tracers.split_first() else { return Ok(ClockOffset::default()) };
    if control.rank() != reference {
        if control.shares_host(reference) || !leads(control, tracers) {
            return Ok(ClockOffset::default());
        }
        return measure(ROUNDS, now, || {
            let mut time = [0u64];
            comm.send(&time, reference)?;
            comm.recv(&mut time, reference)?;
            Ok(time[0])
        });
    }
    for rank in first_of_other_hosts(others, |a, b| control.same_host(a, b), |r| control.shares_host(r)) {
        for _ in 0..ROUNDS {
            comm.recv(&mut [0u64], rank)?;
            comm.send(&[now()], rank)?;
        }
    }
    Ok(ClockOffset::default())
}

/// The first rank of each host but ours.
fn first_of_other_hosts(
    ranks: &[usize],
    same_host: impl Fn(usize, usize) -> bool,
    ours: impl Fn(usize) -> bool,
) -> Vec<usize> {
    let mut firsts: Vec<usize> = Vec::new();
    for &rank in ranks {
        if !ours(rank) && !firsts.iter().any(|&first| same_host(first, rank)) {
            firsts.push(rank);
        }
    }
    firsts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_per_other_host_asks() {
        let host = [0, 1, 0, 2, 1, 3, 2];
        let firsts = first_of_other_hosts(&[1, 2, 3, 4, 5, 6], |a, b| host[a] == host[b], |r| host[r] == 0);
        assert_eq!(firsts, [1, 3, 5]);
    }

    #[test]
    fn ranks_without_the_setting_are_left_out() {
        let mut info = serde_json::json!({"address": "x"});
        announce(&mut info, &Config::default());
        assert!(announced(&[info.clone()]).is_empty());
        let config = Config::default().with(|c| c.trace = Some("t.json".to_owned()));
        let plain = info.clone();
        announce(&mut info, &config);
        assert_eq!(announced(&[plain, info]), [1]);
    }
}
