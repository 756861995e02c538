//! Schedules for the machine that `TINYNCCL_TOPOLOGY` describes: trees that are packed for its links, or an algorithm
//! of the library in another order of the ranks, where they are predicted to be faster than the choice of the cost
//! model. With more ranks than are packed, the choice is taken in the order for rings, if that loads the links less.
//!
//! All ranks have rank 0's description and decide alike. The fingerprint of the schedule is a part of the call, as that
//! of a caller's program.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choice::REDUCED_MESSAGE;
use super::tuned::Tuned;
use crate::topology::{Choice, Limit};
use crate::{Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::{self, Hosts, Order, Shape};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::{Program, Schedule};
use tinynccl_plan::simulate::bound::Bound;
use tinynccl_plan::simulate::machine::description::Description;
use tinynccl_plan::simulate::machine::{Graph, Machine as _};
use tinynccl_plan::simulate::packing::{MOST_RANKS, of_long, pack_beside, place};
use tinynccl_plan::simulate::ring_order::ring_order;
use tinynccl_plan::simulate::{Cut, Limits, Scenario, simulate_on, simulate_together};
use tinynccl_plan::wire::{Algorithm, Collective};

/// Bytes of a segment from which trees are packed: below, latency decides, which a description has only roughly.
const LEAST: usize = 16 << 10;
/// Predicted gain that pays for another schedule: descriptions know nothing of processors and of other traffic.
const GAIN: f64 = 1.03;
/// Setting that names the file.
pub(crate) const SETTING: &str = "TINYNCCL_TOPOLOGY";

/// A described machine with the schedules that were made for it.
#[derive(Clone)]
pub(crate) struct Described {
    machine: Arc<Graph>,
    /// The ranks of this communicator and of those that were split from the same one beside it, by their numbers in the
    /// machine. They are expected to make their calls at the same time.
    groups: Arc<[Vec<usize>]>,
    /// Ours of the groups.
    mine: usize,
    /// By collective, root, and the logarithm of a segment's bytes; none: the cost model's choice is faster.
    known: Vec<((Collective, usize, u32), Option<Schedule>)>,
    /// The order for rings, once it was searched; none: no order is better than that of the numbers.
    order: Option<Option<Arc<Order>>>,
}

impl fmt::Debug for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Described({})", self.machine.name())
    }
}

impl Described {
    /// The machine of a file for `ranks` ranks. `path` names it in errors.
    pub(crate) fn new(description: &Description, path: &str, ranks: usize) -> Result<Described> {
        let wrong = |detail: String| Error::Config { name: SETTING.to_owned(), value: path.to_owned(), detail };
        let machine = Graph::new(description).map_err(|error| wrong(error.to_string()))?;
        if machine.ranks() != ranks {
            let detail = format!("it has {} ranks, the communicator has {ranks}", machine.ranks());
            return Err(wrong(detail));
        }
        let groups = Arc::from([(0..ranks).collect::<Vec<_>>()]);
        Ok(Described { machine: Arc::new(machine), groups, mine: 0, known: Vec::new(), order: None })
    }

    /// The description for the communicator `mine` of a split: the ranks of each of its communicators, by their numbers
    /// here.
    pub(crate) fn split(&self, groups: &[Vec<usize>], mine: usize) -> Described {
        let ours = &self.groups[self.mine];
        let placed = |ranks: &Vec<usize>| ranks.iter().filter_map(|&rank| ours.get(rank).copied()).collect();
        let groups = groups.iter().map(placed).collect();
        Described { groups, mine, known: Vec::new(), order: None, machine: self.machine.clone() }
    }

    /// True if another group of a split has links to share.
    fn is_beside_others(&self) -> bool {
        self.groups.iter().filter(|group| group.len() > 1).count() > 1
    }

    /// The machine with our ranks alone.
    fn ours(&self) -> Graph {
        self.machine.of(&self.groups[self.mine])
    }

    /// The fastest schedule that is made for these links: its name, its predicted seconds, and those of `today`.
    fn fastest(&self, today: &Scenario, hosts: &Hosts, cut: Cut) -> Result<(String, [f64; 2], Schedule)> {
        let shape = &today.shape;
        let (packed, time) = pack_beside(&*self.machine, &self.groups, self.mine, shape, cut)?;
        if self.is_beside_others() {
            return Ok(("trees packed beside other groups".to_owned(), [time, self.together(today, cut)?], packed));
        }
        let machine = self.ours();
        let seconds = |Cut { count, .. }| {
            simulate_on(&Scenario { count, ..*today }, hosts, &machine, &Limits::default()).map(|call| call.time)
        };
        let program = |rank| algorithm::program_on(today.algorithm, shape, hosts, rank);
        let today = of_long(cut, &(0..shape.ranks).filter_map(program).collect::<Vec<_>>(), seconds)?;
        match place(&machine, shape, cut)? {
            Some((algorithm, other, schedule)) if other < time => {
                Ok((format!("{algorithm} placed"), [other, today], schedule))
            }
            _ => Ok(("packed trees".to_owned(), [time, today], packed)),
        }
    }

    /// The least time of a collective with segments of this many bytes, for our ranks alone.
    pub(super) fn limit(&self, shape: &Shape, bytes: usize) -> Option<Limit> {
        let Bound { seconds_per_byte, links } = self.ours().bound(shape)?;
        Some(Limit { ns: seconds_per_byte * bytes as f64 * 1e9, links })
    }

    /// Seconds until all groups have made the call by the algorithm of `today`.
    fn together(&self, today: &Scenario, cut: Cut) -> Result<f64> {
        let busy = self.groups.iter().filter(|group| group.len() > 1);
        let programs = |group: &Vec<usize>| {
            let ranks = group.len();
            let shape = Shape { ranks, root: today.shape.root.min(ranks - 1), ..today.shape };
            (0..ranks).map(|rank| algorithm::program(today.algorithm, &shape, rank)).collect::<Option<Vec<_>>>()
        };
        let programs: Option<Vec<_>> = busy.clone().map(programs).collect();
        // Another one has no schedule on a group of another size.
        let Some(programs) = programs else { return Ok(f64::INFINITY) };
        let calls: Vec<(&[usize], &[Program])> = busy.zip(&programs).map(|(group, all)| (&**group, &**all)).collect();
        let seconds = |cut| simulate_together(&calls, cut, &*self.machine, &Limits::default()).map(|call| call.time);
        of_long(cut, programs.iter().flatten(), seconds)
    }
}

/// The setting's value, as rank 0 has read it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Given {
    /// The machines are to be discovered.
    Discover,
    /// A file's content, or the reason why it cannot be read.
    File(Result<Description, String>),
    /// The file is NCCL's: it describes a host, and the communicator may span others, or a part of it.
    OfHost(Description),
}

impl Given {
    /// Reads the setting's value.
    pub(crate) fn read(setting: &str) -> Given {
        if setting == "auto" {
            return Given::Discover;
        }
        match std::fs::read_to_string(setting) {
            Ok(text) => match Description::parse(&text) {
                Ok(description) if text.trim_start().starts_with('<') => Given::OfHost(description),
                read => Given::File(read.map_err(|error| error.to_string())),
            },
            Err(error) => Given::File(Err(error.to_string())),
        }
    }
}

impl Inner {
    /// True if a description may decide about `call`: a requested algorithm or order is kept.
    fn is_free(&self, engine: &Engine, call: &Call) -> bool {
        let in_order = self.state.config.fixed_order && call.collective.reduces() || self.sums_exactly(call);
        engine.forced.is_none() && !in_order && call.bytes() >= LEAST
    }

    /// The order in which the ranks take `choice`, if there are too many of them for [`Inner::packed_for`].
    pub(super) fn order_for(&self, engine: &mut Engine, call: &Call, choice: &Choice) -> Option<Arc<Order>> {
        let free = self.is_free(engine, call) && self.size() > MOST_RANKS;
        let all_pairs = matches!(choice.algorithm, Algorithm::Direct | Algorithm::AllPairs | Algorithm::Hierarchical);
        let described = engine.tuned.described.as_mut().filter(|_| free && !all_pairs)?;
        let machine = described.ours();
        let Described { order, .. } = described;
        order.get_or_insert_with(|| ring_order(&machine, self.size()).map(Arc::new)).clone()
    }

    /// The schedule for `call` that is predicted to be faster than `choice`, which the cost model has made: packed
    /// trees, or another order.
    pub(super) fn packed_for(&self, engine: &mut Engine, call: &Call, choice: &Choice) -> Option<Schedule> {
        if !self.is_free(engine, call) || self.size() > MOST_RANKS {
            return None;
        }
        let Tuned { described, model, .. } = &mut engine.tuned;
        let described = described.as_mut()?;
        let key = (call.collective, call.root, call.bytes().ilog2());
        if let Some((_, known)) = described.known.iter().find(|(known, _)| *known == key) {
            return known.clone();
        }
        let shape = self.shape(call.collective, call.root);
        // The same for all sizes of the key: ranks may make calls of different sizes first.
        let max_message = match described.is_beside_others() {
            // The same in groups of any size, which make one packing.
            true => self.options.max_message.min(REDUCED_MESSAGE),
            false => choice.message,
        };
        let cut = Cut { count: (1 << key.2) / 4, elem_size: 4, max_message };
        let Cut { count, elem_size, .. } = cut;
        let today = Scenario { algorithm: choice.algorithm, shape, count, elem_size, max_message };
        let rank = self.state.rank;
        let found = described.fastest(&today, &model.hosts, cut).map(|(name, [time, today], schedule)| {
            let [us, other] = [time, today].map(|time| time * 1e6);
            let (collective, bytes, algorithm) = (call.collective, 1usize << key.2, choice.algorithm);
            log::debug!("rank {rank}: {collective} of {bytes} bytes: {name} {us:.0} us, {algorithm} {other:.0} us");
            // A call may come in place.
            let in_place = (0..shape.ranks).all(|rank| shape.in_place(rank).is_none()) || schedule.in_place().is_ok();
            (time * GAIN < today && in_place).then_some(schedule)
        });
        let found = found.unwrap_or_else(|error| {
            log::debug!("rank {rank}: no schedule is made for {}: {error}", call.collective);
            None
        });
        described.known.push((key, found.clone()));
        found
    }
}
