//! Chooses the kernel of each call of a communicator.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::decide::{Asked, Reason};
use super::registry::Registry;
use super::schedules::Schedules;
use super::select;
use crate::window::Layout;
use tinynccl_comm::RawCall;
use tinynccl_plan::device::{Choice, Protocol};
use tinynccl_plan::schedule::Partition;
use tinynccl_plan::wire::Collective;
use tinynccl_sys::config::Config;

/// Parameters of a choice; the same on all ranks.
#[derive(Debug)]
pub(crate) struct Chooser {
    rank: usize,
    pub(crate) layout: Layout,
    pub(crate) schedules: Schedules,
    pub(crate) registry: Arc<Registry>,
    asked: Asked,
    /// The program's setting.
    set: Mutex<Option<Choice>>,
    /// Collectives for which a refused request was logged.
    warned: AtomicU32,
}

impl Chooser {
    pub(crate) fn new(rank: usize, layout: Layout, registry: Arc<Registry>, config: &Config) -> Chooser {
        let (schedules, asked) = (Schedules::new(rank, layout), Asked::of(config));
        Chooser { rank, layout, schedules, registry, asked, set: Mutex::new(None), warned: AtomicU32::new(0) }
    }

    /// Takes `choice` from now on wherever it fits.
    pub(crate) fn set(&self, choice: Option<Choice>) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = choice;
    }

    pub(crate) fn decide(&self, collective: Collective, bytes: usize) -> (Choice, Reason) {
        let set = *self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let takes = |choice: &Choice| {
            self.fits(collective, *choice, bytes) && self.asked.orders(choice.protocol, collective, self.layout.ranks)
        };
        if let Some(choice) = set.filter(takes) {
            return (choice, Reason::Set);
        }
        self.asked.decide(&self.layout, collective, bytes, self.registry.is_used(), |algorithm, framing, blocks| {
            self.schedules.fits(collective, algorithm, framing, blocks, bytes)
        })
    }

    /// Once per collective.
    #[cold]
    pub(crate) fn warn_refused(&self, collective: Collective, choice: Choice) {
        let bit = 1 << collective as u8;
        if self.warned.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            log::warn!("rank {}: {collective} on GPUs takes {}; {}", self.rank, choice.protocol, Reason::Refused);
        }
    }

    /// Returns true if `choice` can run a call of `bytes` bytes of any element type.
    pub(crate) fn fits(&self, collective: Collective, choice: Choice, bytes: usize) -> bool {
        match choice.protocol {
            Protocol::Schedule(algorithm, framing) => {
                self.schedules.fits(collective, algorithm, framing, choice.blocks, bytes)
            }
            protocol => {
                select::kernel(collective, protocol, self.layout.ranks).is_some()
                    && select::fits(&self.layout, collective, choice, bytes)
            }
        }
    }

    /// Returns the cut of the segments of `call` for a schedule; `None` if `choice` is no schedule, or does not fit.
    pub(crate) fn partition(&self, call: &RawCall, choice: Choice) -> Option<Partition> {
        let Protocol::Schedule(algorithm, framing) = choice.protocol else { return None };
        self.schedules.of(call, algorithm, framing, choice.blocks).ok().map(|(_, partition)| partition)
    }
}
