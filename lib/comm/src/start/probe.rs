//! Measures the links and the memory when a communicator starts: rank 0's orders, their sequence, and the prices that
//! it derives from the times.
//!
//! Rank 0 leads, and one peer per kind of link follows its orders, so only rank 0 needs the clock. The timed operations
//! are small programs in the executor, so a hop, a window and a call cost the same here as in a collective:
//! ```text
//! ping k        leader    send recv send recv ...        follower    recv send recv send ...     2k hops in one call
//! exchange      leader    send | recv                    follower    send | recv                 both ways at once
//! ```
//! Rank 0 checks the clock before each batch, and starts a batch only if the time of the last one says that it will end
//! in time.

mod buffer;
mod clock;
mod order;

use std::time::{Duration, Instant};

use self::buffer::LARGEST;
use self::clock::{Clock, SAMPLES, samples};
use self::order::{ORDINARY, Order, Probe, ROUNDS, piece};
use crate::Comm;
use crate::topology::fit::{self, Point};
use crate::topology::{CostModel, LinkCost, Rates, Relays};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::SingleCopy;
use tinynccl_sys::threads::lock;

/// Time for one figure of a link, and for one of the memory.
const LINK_SLICE: Duration = Duration::from_millis(3);
const MEMORY_SLICE: Duration = Duration::from_millis(1);

/// Bytes of the buffers, and time for the bandwidth, of [`pair`].
const PAIR_BYTES: usize = 1 << 20;
const PAIR_SLICE: Duration = Duration::from_millis(15);

/// Samples of an exchange to decide about zero copy.
const ZERO_COPY: usize = 15;
/// Zero copy must take less than this share of the time of two copies.
const WORTH: f64 = 0.85;

/// The transport to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Shm,
    Tcp,
}

/// The ranks that rank 0 measures with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peers {
    shm: Option<usize>,
    tcp: Option<usize>,
}

impl Peers {
    /// Chosen from labels that are equal for ranks that share memory: the first of each kind. Over the network it must
    /// not be relayed, because one hop is measured.
    pub(super) fn of(labels: &[usize], relays: &Relays) -> Peers {
        let find = |shared: bool| (1..labels.len()).filter(move |&r| (labels[r] == labels[0]) == shared);
        Peers { shm: find(true).next(), tcp: find(false).min_by_key(|&r| relays.hops(0, r)) }
    }

    /// True if rank 0 measures with `rank`.
    pub(super) fn include(&self, rank: usize) -> bool {
        self.all().any(|(_, peer)| peer == rank)
    }

    fn all(&self) -> impl Iterator<Item = (Kind, usize)> {
        [(Kind::Shm, self.shm), (Kind::Tcp, self.tcp)].into_iter().filter_map(|(kind, peer)| Some((kind, peer?)))
    }
}

/// Rank 0's results.
pub(super) struct Report {
    pub(crate) model: CostModel,
    pub(super) messages: u64,
    /// No disturbance of the measurement was detected.
    pub(super) steady: bool,
}

/// Rank 0's side: measures until all figures are there or the time is over.
pub(super) fn lead(comm: &Comm, peers: &Peers, end: Instant) -> Result<Report> {
    let started = Instant::now();
    let mut clock = Clock::new(&Instant::now, end);
    let mut model = lock(&comm.inner.engine).tuned.model.clone();
    let mut messages = 0;
    for (kind, peer) in peers.all() {
        let state = &comm.inner.state;
        let probe = Probe::new(comm, peer, true)?;
        log::debug!("{kind:?}: link to rank {peer} open after {:?}", started.elapsed());
        let mut link = Link { probe, clock: &mut clock, model: &mut model, kind, first: messages == 0 };
        link.measure(state.control.shares_host(state.members[peer]))?;
        log::debug!("{kind:?}: {} bytes touched, {:?} passed", 2 * link.probe.room(), started.elapsed());
        link.probe.order(Order::Stop)?;
        messages += link.probe.messages;
    }
    Ok(Report { model, messages, steady: clock.steady })
}

/// Latency of the link to `peer` in nanoseconds, and its bandwidth each way in GB/s while both send; `None` if no time was
/// a valid one. The peer [follows](follow). Each figure takes at least one call, however long that is, and at most
/// about `length`.
pub(super) fn pair(comm: &Comm, peer: usize, length: Duration) -> Result<Option<(f64, f64)>> {
    let probe = Probe::new(comm, peer, true)?;
    let mut model = lock(&comm.inner.engine).tuned.model.clone();
    let fresh = || Clock::new(&Instant::now, Instant::now() + length);
    let mut clock = fresh();
    let mut link = Link { probe, clock: &mut clock, model: &mut model, kind: Kind::Tcp, first: false };
    // A guess of nothing: the first call is made in any case.
    let once = link.together(1.0, SAMPLES, |calls| Order::Ping { rounds: 1, calls })?;
    let guess = once.unwrap_or(f64::INFINITY) * ROUNDS as f64;
    let many = link.together(guess, SAMPLES, |calls| Order::Ping { rounds: ROUNDS, calls })?;
    link.probe.order(Order::Prepare { bytes: PAIR_BYTES })?;
    link.probe.prepare(PAIR_BYTES)?;
    *link.clock = fresh();
    let Link { probe, clock, .. } = &mut link;
    let ns = clock.sample(1.0, samples(PAIR_BYTES), PAIR_SLICE, |calls| {
        // From before the peer may begin until all has arrived at both ends, even if a rank had no core: the time is
        // never less than the link took.
        let start = Instant::now();
        let order = probe.order(Order::Exchange { bytes: PAIR_BYTES, calls })?;
        probe.perform(order)?;
        probe.order(Order::Prepare { bytes: PAIR_BYTES })?;
        Ok(vec![start.elapsed().as_nanos() as f64 / calls as f64; calls])
    })?;
    link.probe.order(Order::Stop)?;
    let (Some(once), Some(ns)) = (once, ns) else { return Ok(None) };
    let alpha_ns = many.map_or(once / 2.0, |many| fit::latency(once, many, ROUNDS).0);
    Ok(Some((alpha_ns, piece(PAIR_BYTES) as f64 / ns)))
}

/// A follower's side, for the leader `peer`. Returns the number of messages.
pub(super) fn follow(comm: &Comm, peer: usize) -> Result<u64> {
    let mut probe = Probe::new(comm, peer, false)?;
    loop {
        match probe.order(Order::Stop)? {
            Order::Stop => return Ok(probe.messages),
            order => probe.perform(order)?,
        };
    }
}

/// The leader at one link.
struct Link<'a> {
    probe: Probe<'a>,
    clock: &'a mut Clock<'static>,
    model: &'a mut CostModel,
    kind: Kind,
    /// The memory and the call have not been measured yet.
    first: bool,
}

impl Link<'_> {
    fn measure(&mut self, same_host: bool) -> Result<()> {
        let built_in = match self.kind {
            Kind::Shm => self.model.shm,
            Kind::Tcp => self.model.tcp,
        };
        let once = self.together(20.0 * built_in.alpha_ns, SAMPLES, |calls| Order::Ping { rounds: 1, calls })?;
        let guess = once.unwrap_or(f64::INFINITY) * ROUNDS as f64;
        let many = self.together(guess, SAMPLES, |calls| Order::Ping { rounds: ROUNDS, calls })?;
        let (Some(once), Some(many)) = (once, many) else { return Ok(()) };
        let (alpha_ns, call_ns) = fit::latency(once, many, ROUNDS);
        // Ranks of one host that wait longer than they spin did not run at the same time: other programs, or other
        // threads of this one, had the cores. Such a sample does not measure the link.
        if same_host && alpha_ns > self.probe.comm.config().spin.as_nanos() as f64 / 2.0 {
            log::debug!("{:?}: {alpha_ns} ns for a message: the cores are busy, the built-in figures stay", self.kind);
            self.clock.steady = false;
            return Ok(());
        }
        if self.kind == Kind::Shm && self.probe.comm.config().single_copy == SingleCopy::Auto {
            self.model.zero_copy_from = self.zero_copy_from(alpha_ns)?;
        }
        let caches = self.model.caches;
        // Footprints per rank: half of L2, a quarter of this rank's part of L3, more than all of it.
        let ranks = if same_host { 2.0 } else { 1.0 };
        let sizes = [
            caches.l2 / 4,
            (caches.l3 / 8 / self.model.busy_cores.max(1.0) as usize).max(caches.l2),
            (caches.l3 as f64 * 0.75 / ranks) as usize,
        ];
        let mut beta = [None; 3];
        let mut ns_per_byte = built_in.beta.l2;
        let mut local = Local::default();
        for (level, bytes) in sizes.into_iter().enumerate() {
            let bytes = bytes.max(4 << 10) / 8 * 8;
            // At four fifths of the last footprint, a sixth of the bytes are still in memory.
            let least = if level == 2 { bytes / 5 * 4 } else { bytes };
            if bytes > LARGEST {
                break;
            }
            let Some(bytes) = self.make_room(bytes, least)? else { break };
            let bytes = bytes / 8 * 8;
            let piece = piece(bytes);
            let message = self.probe.comm.inner.options.max_message.min(piece) as f64;
            let guess = 2.0 * ns_per_byte * piece as f64;
            let exchange = |calls| Order::Exchange { bytes, calls };
            let Some(ns) = self.together(guess, samples(bytes), exchange)? else { break };
            ns_per_byte = ns / piece as f64;
            let per_byte = (ns_per_byte - alpha_ns / message).max(ns_per_byte / 10.0);
            beta[level] = Some(Point { footprint: 2.0 * bytes as f64, ranks, ns_per_byte: per_byte });
            if self.first {
                self.memory(level, bytes, same_host, &mut local)?;
            }
        }
        if local.points[0].is_some() {
            self.model.copy = fit::rates(local.points.map(|p| p.map(|p| p.0)), &caches, 1.0, &self.model.copy);
            let combined = local.points.map(|p| p.map(|p| p.1));
            let total = fit::rates(combined, &caches, 1.0, &sum(&self.model.copy, &self.model.reduce));
            self.model.reduce = fit::beyond(total, self.model.copy);
            self.model.contention = local.contention.unwrap_or(self.model.contention);
        }
        let crowding = if same_host { self.model.contention } else { 1.0 };
        let link = LinkCost { alpha_ns, beta: fit::rates(beta, &caches, crowding, &built_in.beta) };
        match self.kind {
            Kind::Shm => (self.model.shm, self.model.sync_ns) = (link, alpha_ns),
            Kind::Tcp => self.model.tcp = link,
        }
        if self.first {
            self.model.call_ns = call_ns;
        }
        Ok(())
    }

    /// The least length from which zero copy is faster for messages on ordinary pages, if any: times the same exchange
    /// both ways.
    fn zero_copy_from(&mut self, alpha_ns: f64) -> Result<Option<usize>> {
        for bytes in [ORDINARY / 2, ORDINARY] {
            let mut times = [None; 2];
            for (time, from) in times.iter_mut().zip([usize::MAX, bytes]) {
                let guess = 2.0 * (alpha_ns + self.model.shm.beta.l2 * bytes as f64);
                let order = self.probe.order(Order::ZeroCopy { from })?;
                self.probe.perform(order)?;
                *time = self.together(guess, ZERO_COPY, |calls| Order::Exchange { bytes, calls })?;
            }
            log::debug!(
                "{bytes} bytes each way on ordinary pages: {:?} ns through the ring, {:?} ns by zero copy",
                times[0],
                times[1]
            );
            if let [Some(through), Some(pulled)] = times
                && pulled < WORTH * through
            {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    /// Prepares buffers of `bytes` bytes on both ranks, or of at least `least` if time is short. Returns their size;
    /// `None` if there is no time even for `least`.
    fn make_room(&mut self, bytes: usize, least: usize) -> Result<Option<usize>> {
        let Link { probe, clock, .. } = self;
        let have = clock.grow(probe.room(), bytes, least, |bytes| {
            let order = Order::Prepare { bytes };
            probe.order(order)?;
            probe.perform(order)?;
            // Repeating the order does nothing, but the follower accepts it only when the first is done.
            probe.order(order).map(drop)
        })?;
        Ok((have >= least).then_some(have.min(bytes)))
    }

    /// The memory's figures on this rank, once per level: alone, and at the last one with the peer.
    fn memory(&mut self, level: usize, bytes: usize, same_host: bool, local: &mut Local) -> Result<()> {
        let (footprint, piece, most) = (2.0 * bytes as f64, piece(bytes) as f64, samples(bytes));
        let point = |ns: f64| Point { footprint, ranks: 1.0, ns_per_byte: ns / piece };
        let guess = self.model.copy.memory * piece;
        let Link { probe, clock, .. } = self;
        let copy = clock.sample(guess, most, MEMORY_SLICE, |calls| Ok(probe.copy(bytes, calls)))?;
        let combine = clock.sample(guess, most, MEMORY_SLICE, |calls| Ok(probe.combine(bytes, calls)))?;
        let (Some(copy), Some(combine)) = (copy, combine) else { return Ok(()) };
        local.points[level] = Some((point(copy), point(combine)));
        if level == 2 && same_host {
            let both = self.together(2.0 * copy, most, |calls| Order::Copy { bytes, calls })?;
            local.contention = both.map(|both| fit::contention(copy, both));
        }
        Ok(())
    }

    /// [`Clock::sample`] of an operation of both ranks.
    fn together(&mut self, guess: f64, most: usize, order: impl Fn(usize) -> Order) -> Result<Option<f64>> {
        let Link { probe, clock, .. } = self;
        clock.sample(guess, most, LINK_SLICE, |calls| {
            let order = probe.order(order(calls))?;
            probe.perform(order)
        })
    }
}

/// Copying and combining at the three levels, and two ranks at once.
#[derive(Default)]
struct Local {
    points: [Option<(Point, Point)>; 3],
    contention: Option<f64>,
}

fn sum(a: &Rates, b: &Rates) -> Rates {
    Rates::new(a.l2 + b.l2, a.l3 + b.l3, a.memory + b.memory)
}

#[cfg(test)]
mod tests;
