//! The result of a simulation.

use super::engine::{Outcome, Path};
use super::machine::{LinkId, Machine};
pub use super::system::STEPS;
use super::system::System;

/// Simplifications of a simulation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Method {
    /// Ranks of the call.
    pub ranks: usize,
    /// Number of ranks that represent all, because programs and machine repeat.
    pub folded: Option<usize>,
    /// Number of classes of equal ranks.
    pub refined: Option<usize>,
    /// The extrapolated part.
    pub extrapolated: Option<Extrapolated>,
}

/// Repetitions that were added up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extrapolated {
    /// The repeated unit.
    pub what: Repeats,
    /// Number of repetitions that were simulated.
    pub simulated: usize,
    /// Number of repetitions in the call.
    pub all: usize,
    /// Error of the time, in seconds, if the speed of the third before the last were right.
    pub uncertainty: f64,
}

/// The repeated unit of a long call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeats {
    /// The programs, once per window.
    Windows,
    /// Equal steps of the lanes.
    Steps,
}

impl Method {
    /// Every message of every rank.
    pub(super) fn all(ranks: usize) -> Method {
        Method { ranks, folded: None, refined: None, extrapolated: None }
    }
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.folded, self.refined) {
            (None, None) => write!(f, "all {} ranks", self.ranks)?,
            (Some(folded), None) => write!(f, "folded to {folded} of {} ranks", self.ranks)?,
            (None, Some(refined)) => write!(f, "refined to {refined} classes of {} ranks", self.ranks)?,
            (Some(_), Some(refined)) => write!(f, "folded and refined to {refined} classes of {} ranks", self.ranks)?,
        }
        if let Some(Extrapolated { what, simulated, all, .. }) = self.extrapolated {
            let what = if what == Repeats::Windows { "windows" } else { "equal steps" };
            write!(f, ", {simulated} of {all} {what} simulated")?;
        }
        Ok(())
    }
}

/// The load of one link.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkLoad {
    /// The link, as the machine numbers it.
    pub id: LinkId,
    /// Index into [`Report::kinds`].
    pub kind: usize,
    /// Its name. If ranks represent others, so does the link.
    pub name: String,
    /// Bytes per second.
    pub bandwidth: f64,
    /// Bytes in the whole call.
    pub bytes: f64,
}

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Seconds, from the call on all ranks to the end on the last.
    pub time: f64,
    /// Components of the time along the critical path: name and seconds; they add up to the time. A transfer is named
    /// by the kind of link that was full when it ended.
    pub critical: Vec<(String, f64)>,
    /// The critical path's time by the kind of step that it ended in.
    pub steps: Vec<(&'static str, f64)>,
    /// Messages on the critical path.
    pub hops: f64,
    /// Kinds of links.
    pub kinds: Vec<String>,
    /// The links, the fullest first. If ranks represent others, so do the links.
    pub links: Vec<LinkLoad>,
    /// Messages simulated.
    pub messages: u64,
    /// Simplifications of the simulation.
    pub method: Method,
}

impl Report {
    pub(super) fn new(system: &System, machine: &dyn Machine, run: Outcome, method: Method) -> Report {
        let load = |&(id, bytes): &(LinkId, f64)| {
            let (name, bandwidth) = (machine.link_name(id), machine.bandwidth(id));
            LinkLoad { id, kind: usize::from(id.kind), name, bandwidth, bytes }
        };
        let mut links: Vec<LinkLoad> = system.loads.iter().map(load).collect();
        let Path { at, call, latency, overhead, reduce, copy, transfer, step, hops, .. } = run.path;
        let kinds = machine.kinds();
        let mut critical: Vec<(String, f64)> =
            [("call", call), ("latency", latency), ("overhead", overhead), ("reduce", reduce), ("copy", copy)]
                .into_iter()
                .map(|(name, time)| (name.to_owned(), time))
                .chain(kinds.iter().zip(transfer).map(|(name, time)| (format!("transfer, {name}"), time)))
                .filter(|(_, time)| *time > 0.0)
                .collect();
        critical.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut steps: Vec<(&str, f64)> = STEPS.into_iter().zip(step).filter(|(_, time)| *time > 0.0).collect();
        steps.sort_by(|a, b| b.1.total_cmp(&a.1));
        links.sort_by(|a, b| (b.bytes / b.bandwidth).total_cmp(&(a.bytes / a.bandwidth)).then(a.id.cmp(&b.id)));
        Report { time: at, critical, steps, hops: hops as f64, kinds, links, messages: run.messages, method }
    }

    /// Error of the time, in seconds, if the speed had gone on changing ([`Extrapolated::uncertainty`]).
    pub fn uncertainty(&self) -> f64 {
        self.method.extrapolated.map_or(0.0, |e| e.uncertainty)
    }

    /// No schedule that puts these bytes on these links is faster: the fullest link's bytes over its bandwidth, in
    /// seconds.
    pub fn bandwidth_bound(&self) -> f64 {
        self.links.first().map_or(0.0, |l| l.bytes / l.bandwidth)
    }

    /// Share of the time for which a link is busy.
    pub fn utilisation(&self, link: &LinkLoad) -> f64 {
        if self.time > 0.0 { link.bytes / link.bandwidth / self.time } else { 0.0 }
    }
}
