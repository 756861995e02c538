//! The cost model of a communicator: its figures, their source, and where the ranks run.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::described::Described;
use crate::State;
use crate::topology::host::{Cores, Host};
use crate::topology::{CostModel, Relays};
use tinynccl_plan::algorithm::Hosts;

/// Source of a cost model's figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Figures in the library, for the number of ranks and cores of rank 0's host.
    BuiltIn,
    /// A file that an earlier run wrote.
    Cached,
    /// Measured at the start.
    Measured,
}

/// Origin of the cost model: its source, and the price of measuring.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// The source of the figures.
    pub source: Source,
    /// Messages that this rank sent and received to measure.
    pub messages: u64,
    /// Time that measuring took on this rank.
    pub took: Duration,
    /// Rank 0's file, if the model was read from or written to one.
    pub file: Option<PathBuf>,
}

/// Location of a rank: the memory and the machine that it shares with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seat {
    /// Equal for ranks that share memory.
    pub(crate) memory: usize,
    /// Equal for ranks of one machine.
    pub(crate) host: usize,
    /// Cores of that machine that its ranks may use.
    pub(crate) cores: usize,
}

/// A model, where it comes from, and where the ranks run.
#[derive(Debug, Clone)]
pub(crate) struct Tuned {
    pub(crate) model: CostModel,
    pub(crate) tuning: Tuning,
    pub(crate) seats: Vec<Seat>,
    /// The machine, if there is a description of it.
    pub(crate) described: Option<Described>,
}

impl Tuned {
    /// Built-in figures, as this rank sees the world; the start replaces them.
    pub(crate) fn built_in(state: &State) -> Tuned {
        let Cores { most, .. } = Cores::here();
        let control = &state.control;
        let seat = |(rank, &member): (usize, &usize)| Seat {
            memory: if control.shares_memory(member) { 0 } else { rank + 1 },
            host: if control.shares_host(member) { 0 } else { rank + 1 },
            cores: most,
        };
        let seats = state.members.iter().enumerate().map(seat).collect();
        let model = CostModel { caches: Host::here().caches, ..CostModel::shm() };
        Tuned::new(model, Tuning { source: Source::BuiltIn, messages: 0, took: Duration::ZERO, file: None }, seats)
    }

    /// `model` for ranks in this placement.
    pub(crate) fn new(model: CostModel, tuning: Tuning, seats: Vec<Seat>) -> Tuned {
        let tuned = Tuned { model, tuning, seats, described: None }.placed();
        let (ranks, cores) = tuned.crowd(0);
        Tuned { model: tuned.model.on_cores(ranks, cores), ..tuned }
    }

    /// Returns this model for the listed ranks only, without a description. The ranks of a host still share its cores
    /// with all the others.
    pub(crate) fn among(&self, ranks: impl Iterator<Item = usize>) -> Tuned {
        let seats = ranks.filter_map(|r| self.seats.get(r).copied()).collect();
        Tuned { seats, described: None, ..self.clone() }.placed()
    }

    /// Returns this model for one of the communicators into which this one is split: the ranks of each, and the number
    /// of that one among them. They know of each other's calls on a described machine.
    pub(crate) fn split(&self, groups: &[Vec<usize>], mine: usize) -> Tuned {
        let ranks = groups.get(mine).into_iter().flatten().copied();
        let described = self.described.as_ref().map(|described| described.split(groups, mine));
        Tuned { described, ..self.among(ranks) }
    }

    /// Returns this model with the relays of this communicator.
    pub(crate) fn relayed(mut self, state: &State) -> Tuned {
        self.model.relays = Relays::new(&state.control.paths(), &state.members);
        self
    }

    /// Takes these labels for the memory that ranks share.
    pub(crate) fn assume(&mut self, labels: &[usize]) {
        self.seats.iter_mut().zip(labels).for_each(|(seat, &memory)| seat.memory = memory);
        *self = self.clone().placed();
    }

    /// True if the machine of `rank` has more ranks than cores.
    pub(crate) fn is_oversubscribed(&self, rank: usize) -> bool {
        let (ranks, cores) = self.crowd(rank);
        ranks > cores
    }

    /// Ranks and cores of the machine of `rank`.
    fn crowd(&self, rank: usize) -> (usize, usize) {
        let Some(seat) = self.seats.get(rank) else { return (1, 1) };
        (self.seats.iter().filter(|s| s.host == seat.host).count(), seat.cores)
    }

    fn placed(self) -> Tuned {
        let labels: Vec<usize> = self.seats.iter().map(|s| s.memory).collect();
        Tuned { model: self.model.on_hosts(Hosts::of(&labels)), ..self }
    }
}
