//! Schedules for the machine that `TINYNCCL_TOPOLOGY` describes: trees that are packed for its links, where they are
//! predicted to be faster than the choice of the cost model.
//!
//! All ranks have rank 0's description and decide alike. The fingerprint of the schedule is a part of the call, as that
//! of a caller's program.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::topology::Choice;
use crate::{Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::Schedule;
use tinynccl_plan::simulate::machine::description::Description;
use tinynccl_plan::simulate::machine::{Graph, Machine as _};
use tinynccl_plan::simulate::packing::{MOST_RANKS, pack};
use tinynccl_plan::simulate::{Cut, Limits, Scenario, simulate, simulate_schedule};
use tinynccl_plan::wire::Collective;

/// Bytes of a segment from which trees are packed: below, latency decides, which a description has only roughly.
const LEAST: usize = 16 << 10;
/// Setting that names the file.
pub(crate) const SETTING: &str = "TINYNCCL_TOPOLOGY";

/// A described machine with the schedules that were made for it.
#[derive(Clone)]
pub(crate) struct Described {
    machine: Arc<Graph>,
    /// By collective, root, and the logarithm of a segment's bytes; none: the cost model's choice is faster.
    known: Vec<((Collective, usize, u32), Option<Schedule>)>,
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
        Ok(Described { machine: Arc::new(machine), known: Vec::new() })
    }
}

/// What the setting of rank 0 says.
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
    /// The packed schedule for `call` if it is predicted to be faster than `choice`, which the cost model has made.
    pub(super) fn packed_for(&self, engine: &mut Engine, call: &Call, choice: &Choice) -> Option<Schedule> {
        let Engine { tuned, forced, .. } = engine;
        let described = tuned.described.as_mut()?;
        let bytes = call.bytes();
        let config = &self.state.config;
        // A requested algorithm or order is kept.
        let in_order = config.fixed_order && call.collective.reduces() || self.sums_exactly(call);
        let free = forced.is_none() && !in_order;
        if !free || bytes < LEAST || self.size() > MOST_RANKS {
            return None;
        }
        let key = (call.collective, call.root, bytes.ilog2());
        if let Some((_, known)) = described.known.iter().find(|(known, _)| *known == key) {
            return known.clone();
        }
        let shape = self.shape(call.collective, call.root);
        // The same for all sizes of the key: ranks may make calls of different sizes first.
        let cut = Cut { count: (1 << key.2) / 4, elem_size: 4, max_message: choice.message };
        let machine = &*described.machine;
        let found = pack(machine, &shape, cut).and_then(|schedule| {
            let packed = simulate_schedule(&schedule, cut, machine, &Limits::default())?.time;
            let Cut { count, elem_size, max_message } = cut;
            let today = Scenario { algorithm: choice.algorithm, shape, count, elem_size, max_message };
            let today = simulate(&today, machine, &Limits::default())?.time;
            let (rank, collective, algorithm) = (self.state.rank, call.collective, choice.algorithm);
            let [us, other] = [packed, today].map(|time| time * 1e6);
            log::debug!(
                "rank {rank}: {collective} of {bytes} bytes: packed trees {us:.0} us, {algorithm} {other:.0} us"
            );
            // A call may come in place.
            let in_place = (0..shape.ranks).all(|rank| shape.in_place(rank).is_none()) || schedule.in_place().is_ok();
            Ok((packed < today && in_place).then_some(schedule))
        });
        let found = found.unwrap_or_else(|error| {
            log::debug!("rank {}: no trees are packed for {}: {error}", self.state.rank, call.collective);
            None
        });
        described.known.push((key, found.clone()));
        found
    }
}
