//! Collectives by schedule: compiles, caches and cuts programs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::program::Compiled;
use crate::window::{Layout, SCRATCH_BYTES};
use tinynccl_comm::RawCall;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::device::Framing;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::schedule::Partition;
use tinynccl_plan::wire::{Algorithm, Collective};

/// One rank's schedules.
#[derive(Debug)]
pub(crate) struct Schedules {
    rank: usize,
    layout: Layout,
    /// Programs compiled so far; `None` where there is no schedule.
    known: Mutex<Known>,
}

type Known = HashMap<(Algorithm, Shape), Option<Arc<Compiled>>>;

impl Schedules {
    pub(crate) fn new(rank: usize, layout: Layout) -> Schedules {
        Schedules { rank, layout, known: Mutex::default() }
    }

    fn compiled(
        &self,
        algorithm: Algorithm,
        collective: Collective,
        root: usize,
        blocks: u32,
    ) -> Option<Arc<Compiled>> {
        let channels = blocks as usize;
        if !(1..=self.layout.channels).contains(&channels) {
            return None;
        }
        let shape = Shape { collective, ranks: self.layout.ranks, root, channels };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || {
            // Two trees need two channels.
            let compiled = Compiled::new(algorithm, &shape, self.rank).filter(|c| c.channels <= self.layout.channels);
            compiled.map(Arc::new)
        };
        known.entry((algorithm, shape)).or_insert_with(make).clone()
    }

    fn cut(&self, compiled: &Compiled, framing: Framing, count: usize, elem: usize) -> Option<Partition> {
        match framing {
            Framing::Simple => compiled.for_slots(count, elem, &self.layout, SCRATCH_BYTES),
            Framing::Ll if compiled.channels > self.layout.line_channels => None,
            Framing::Ll => compiled.for_lines(count, elem, self.layout.lines, SCRATCH_BYTES),
            Framing::Ll128 => compiled.for_lines128(count, elem, &self.layout, SCRATCH_BYTES),
        }
    }

    /// Returns true if a schedule can run a call of `bytes` of any element type.
    pub(crate) fn fits(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        framing: Framing,
        blocks: u32,
        bytes: usize,
    ) -> bool {
        // The largest elements make the longest parts.
        self.compiled(algorithm, collective, 0, blocks)
            .is_some_and(|compiled| self.cut(&compiled, framing, bytes.div_ceil(8), 8).is_some())
    }

    /// The program of a call, and how its segments are cut.
    pub(crate) fn of(
        &self,
        call: &RawCall,
        algorithm: Algorithm,
        framing: Framing,
        blocks: u32,
    ) -> Result<(Arc<Compiled>, Partition)> {
        let invalid = |detail| Err(Error::invalid(call.collective.name(), detail));
        let Some(compiled) = self.compiled(algorithm, call.collective, call.root, blocks) else {
            let Layout { ranks, channels, .. } = self.layout;
            return invalid(format!(
                "{algorithm} has no schedule for {ranks} ranks and {blocks} blocks of at most {channels}"
            ));
        };
        match self.cut(&compiled, framing, call.count, call.dtype.size()) {
            Some(partition) => Ok((compiled, partition)),
            None => {
                invalid(format!("{} {} do not fit {algorithm}, {framing:?}, {blocks} blocks", call.count, call.dtype))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::select::choose;
    use super::*;
    use tinynccl_plan::device::Protocol;
    use tinynccl_sys::Config;

    #[test]
    fn schedules_that_are_chosen_fit() {
        let mut chosen = 0;
        for (ranks, slot, blocks) in
            [(3, 0, 128), (4, 4 << 10, 128), (4, 0, 2), (4, 0, 16), (8, 0, 2), (8, 1 << 20, 64)]
        {
            let layout = Layout::new(
                ranks,
                1,
                &Config::default().with(|c| {
                    c.cuda_slot = slot;
                    c.cuda_blocks = blocks;
                }),
            );
            let schedules = Schedules::new(1, layout);
            use Collective::{AllGather, AllReduce, Broadcast, Gather, Reduce, ReduceScatter, Scan};
            for collective in [AllGather, AllReduce, Broadcast, Gather, Reduce, ReduceScatter, Scan] {
                for bytes in [800 << 10, 4 << 20, (10 << 20) + 8, (100 << 20) + 8, 256 << 20, 1 << 30] {
                    let choice = choose(&layout, collective, bytes, false);
                    let Protocol::Schedule(algorithm, framing) = choice.protocol else { continue };
                    chosen += 1;
                    let fits = schedules.fits(collective, algorithm, framing, choice.blocks, bytes);
                    assert!(fits, "{ranks} ranks, {collective} of {bytes} bytes: {choice:?}");
                }
            }
        }
        assert!(chosen >= 4 * 8, "{chosen} schedules");
    }
}
