//! The graph of the machines that a communicator's ranks are on.
//!
//! ```text
//! every rank    its host, memory, NUMA node, ports; ──┐
//!               of each machine one: GPUs, NVLinks ───┴── one exchange ── sites and networks, alike on all ranks
//! in turn       a pair that stands for its class ──────── measured, one exchange each ─────── the graph
//! ```
//! Pairs are measured one after the other: the ranks may share cores, and links that nothing here shows.

use std::time::Duration;

use super::probe;
use crate::Comm;
use crate::topology::assemble::{Found, Measured, assemble};
use crate::topology::machine::{Machine, ports};
use crate::topology::pairs::{Told, networks, pairs, sites};
use tinynccl_plan::error::Result;
use tinynccl_plan::simulate::machine::description::Description;
use tinynccl_sys::threads::lock;
use tinynccl_transport::bootstrap::Host;

/// Longest time that a pair measures. A call that has begun is awaited.
const LENGTH: Duration = Duration::from_millis(200);

impl Comm {
    /// The graph of the machines that the ranks are on: hosts with their NUMA nodes, GPUs (with NVLinks, where NVIDIA's
    /// management library is there), network ports and subnets, with rates and latencies. Speeds of network cards are
    /// those that the driver tells; of what tells none, and of memory, a few pairs of ranks measure them (about 20 ms
    /// each).
    ///
    /// Every rank must call it, at the same position among its collective calls, and every rank gets the same. It is
    /// found once for a communicator; later calls return at once.
    ///
    /// # Errors
    /// As a collective's: a lost rank, a time-out.
    pub fn discover(&self) -> Result<Description> {
        let state = &self.inner.state;
        state.check(|| "discover".to_owned())?;
        self.inner.drain();
        let attempt = {
            let mut engine = lock(&self.inner.engine);
            if let Some(known) = &engine.discovered.1 {
                return Ok(known.clone());
            }
            engine.discovered.0 += 1;
            engine.discovered.0
        };
        let told: Vec<Told> = self.exchange(&format!("discover {attempt}"), &self.tell())?;
        let sites = sites(&told);
        let far: Vec<[usize; 2]> = self.far();
        let networks = networks(&told, &sites, |a, b| far.contains(&[a.min(b), a.max(b)]));
        let mut measured: Vec<Measured> = Vec::new();
        for (turn, pair) in pairs(&told, &sites, &networks).into_iter().enumerate() {
            let ours = self.measure(pair)?;
            let all: Vec<Option<Measured>> = self.exchange(&format!("discover {attempt}, pair {turn}"), &ours)?;
            measured.extend(all.into_iter().flatten());
        }
        let model = self.cost_model();
        let rails = self.config().tcp_rails;
        let (told, sites, networks, measured) = (&told, &sites, &networks, &measured);
        let description = assemble(&Found { told, sites, networks, measured, model: &model, rails });
        log::debug!("rank {}: discovered {}, {} pairs measured", self.rank(), description.name, measured.len());
        lock(&self.inner.engine).discovered.1 = Some(description.clone());
        Ok(description)
    }

    fn tell(&self) -> Told {
        let state = &self.inner.state;
        let control = &state.control;
        let first = |shares: &dyn Fn(usize) -> bool| (0..self.size()).find(|&r| shares(state.members[r]));
        let host = first(&|member| control.shares_host(member)).unwrap_or(self.rank());
        let here = Host::current();
        let ports = ports(self.config()).unwrap_or_else(|error| {
            log::debug!("rank {}: no network ports: {error}", self.rank());
            Vec::new()
        });
        let hardware = Machine::of_kernel();
        let numa = hardware.numa_of(crate::topology::host::Cores::here().numbers());
        Told {
            host,
            hostname: here.hostname,
            namespace: here.net_namespace,
            memory: first(&|member| control.shares_memory(member)).unwrap_or(self.rank()),
            numa,
            ports,
            machine: (host == self.rank()).then(|| hardware.with_gpus()),
        }
    }

    /// The pairs of ranks that talk through others.
    fn far(&self) -> Vec<[usize; 2]> {
        let member = |rank: usize| self.inner.state.member(rank);
        let pair = |ends: [usize; 2]| Some([member(ends[0])?, member(ends[1])?]);
        let sorted = |[a, b]: [usize; 2]| [a.min(b), a.max(b)];
        self.relayed().iter().filter_map(|path| pair(path.ends)).map(sorted).collect()
    }

    fn measure(&self, [leader, follower]: [usize; 2]) -> Result<Option<Measured>> {
        if self.rank() == follower {
            probe::follow(self, leader)?;
        }
        if self.rank() != leader {
            return Ok(None);
        }
        let found = probe::pair(self, follower, LENGTH)?;
        Ok(found.map(|(alpha_ns, gb_s)| Measured { ranks: [leader, follower], alpha_ns, gb_s }))
    }
}
