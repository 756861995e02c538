//! Max-min fair sharing of links among transfers, kept up to date as transfers come and go.
//!
//! Transfers over the same links have the same rate. They form a *bundle*, which counts the bytes that each of them has
//! transferred so far (`served`). A transfer that starts at `served` = s with n bytes ends at s + n, whatever the rate
//! in between.
//!
//! Progressive filling: all rates grow together until a link is full; its bundles then keep their rate, and the others
//! go on growing. Only links that bundles with transfers connect to a change are filled anew.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::system::System;

/// An order for times, which are never NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Time(pub(super) f64);

impl Eq for Time {}

impl Ord for Time {
    fn cmp(&self, other: &Time) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Time) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Links, and how often a transfer counts on each; the bits of its fastest rate.
type Route<'a> = (&'a [(u32, u32)], u64);

struct Bundle {
    /// Links, and how often a transfer counts on each.
    links: Vec<(u32, u32)>,
    fastest: f64,
    rate: f64,
    served: f64,
    since: f64,
    /// Ends in units of `served`, and their transfers.
    ends: BinaryHeap<std::cmp::Reverse<(Time, u32)>>,
    version: u32,
    /// Rate and first end for which an event is due; none if it was taken.
    due: Option<(f64, f64)>,
    /// The link that limits the rate; none if `fastest` does.
    limit: Option<u32>,
    mark: u32,
}

struct Shared {
    bandwidth: f64,
    bundles: Vec<u32>,
    left: f64,
    weight: f64,
    version: u32,
    mark: u32,
}

pub(super) struct Sharing {
    bundles: Vec<Bundle>,
    links: Vec<Shared>,
    /// The bundle of each FIFO.
    of: Vec<u32>,
    /// Links at which something has changed.
    dirty: Vec<u32>,
    mark: u32,
    /// Visits of bundles and links so far: the cost of sharing.
    pub(super) visits: u64,
}

impl Sharing {
    pub(super) fn new(system: &System) -> Sharing {
        let mut links: Vec<Shared> = system
            .links
            .iter()
            .map(|l| Shared { bandwidth: l.bandwidth, bundles: vec![], left: 0.0, weight: 0.0, version: 0, mark: 0 })
            .collect();
        let mut bundles: Vec<Bundle> = vec![];
        let mut known: HashMap<Route<'_>, u32> = HashMap::new();
        let mut of = Vec::with_capacity(system.fifos.len());
        for fifo in &system.fifos {
            let at = *known.entry((&fifo.links, fifo.fastest.to_bits())).or_insert_with(|| {
                let at = bundles.len() as u32;
                for &(link, _) in &fifo.links {
                    links[link as usize].bundles.push(at);
                }
                bundles.push(Bundle {
                    links: fifo.links.clone(),
                    fastest: fifo.fastest,
                    rate: 0.0,
                    served: 0.0,
                    since: 0.0,
                    ends: BinaryHeap::new(),
                    version: 0,
                    due: None,
                    limit: None,
                    mark: 0,
                });
                at
            });
            of.push(at);
        }
        Sharing { bundles, links, of, dirty: vec![], mark: 0, visits: 0 }
    }

    /// FIFO `fifo` starts a transfer of `bytes` (more than 0). Rates are right after [`Sharing::share`].
    pub(super) fn start(&mut self, fifo: u32, bytes: f64, now: f64) {
        let at = self.of[fifo as usize];
        let bundle = &mut self.bundles[at as usize];
        bundle.serve(now);
        if bundle.ends.is_empty() {
            bundle.served = 0.0;
        }
        bundle.ends.push(std::cmp::Reverse((Time(bundle.served + bytes), fifo)));
        self.changed(at);
    }

    fn changed(&mut self, bundle: u32) {
        self.dirty.extend(self.bundles[bundle as usize].links.iter().map(|&(link, _)| link));
    }

    /// The next transfers of `bundle` are at their end: into `ended`, if this is the event that was last requested.
    pub(super) fn end(&mut self, bundle: u32, version: u32, now: f64, ended: &mut Vec<u32>) {
        let this = &mut self.bundles[bundle as usize];
        if this.version != version {
            return;
        }
        let Some(&std::cmp::Reverse((Time(end), _))) = this.ends.peek() else { return };
        (this.served, this.since, this.due) = (end, now, None);
        // Those that are to end at the same time, to rounding.
        let same = end * (1.0 + 1e-12);
        while let Some(&std::cmp::Reverse((Time(end), fifo))) = this.ends.peek() {
            if end > same {
                break;
            }
            this.ends.pop();
            ended.push(fifo);
        }
        self.changed(bundle);
    }

    /// The kind of link that limits a FIFO's transfer now.
    pub(super) fn limit(&self, fifo: u32) -> Option<u32> {
        let bundle = &self.bundles[self.of[fifo as usize] as usize];
        bundle.limit.or(bundle.links.first().map(|&(link, _)| link))
    }

    /// Shares the links anew; calls `next` with (bundle, version, time of its next end) for each bundle whose rate or
    /// next end has changed.
    pub(super) fn share(&mut self, now: f64, mut next: impl FnMut(u32, u32, f64)) {
        if self.dirty.is_empty() {
            return;
        }
        let (links, bundles) = self.connected();
        self.visits += (links.len() + bundles.len()) as u64;
        for &at in &bundles {
            self.bundles[at as usize].serve(now);
        }
        self.fill(&links, &bundles);
        for at in bundles {
            let bundle = &mut self.bundles[at as usize];
            if let Some(&std::cmp::Reverse((Time(end), _))) = bundle.ends.peek() {
                // Most changes leave most rates as they are, and the events of those transfers with them.
                if bundle.due == Some((bundle.rate, end)) {
                    continue;
                }
                bundle.due = Some((bundle.rate, end));
                bundle.version = bundle.version.wrapping_add(1);
                next(at, bundle.version, now + (end - bundle.served).max(0.0) / bundle.rate);
            }
        }
    }

    /// Links and bundles with transfers that a change at the dirty links can reach.
    fn connected(&mut self) -> (Vec<u32>, Vec<u32>) {
        self.mark += 1;
        let mark = self.mark;
        let (mut links, mut bundles) = (vec![], vec![]);
        let mut queue = std::mem::take(&mut self.dirty);
        while let Some(link) = queue.pop() {
            let this = &mut self.links[link as usize];
            if this.mark == mark {
                continue;
            }
            this.mark = mark;
            links.push(link);
            for &at in &this.bundles {
                let bundle = &mut self.bundles[at as usize];
                if bundle.mark != mark {
                    bundle.mark = mark;
                    if !bundle.ends.is_empty() {
                        bundles.push(at);
                        queue.extend(bundle.links.iter().map(|&(link, _)| link));
                    } else {
                        bundle.rate = 0.0;
                    }
                }
            }
        }
        self.dirty = queue;
        (links, bundles)
    }

    fn fill(&mut self, links: &[u32], bundles: &[u32]) {
        for &link in links {
            let this = &mut self.links[link as usize];
            (this.left, this.weight) = (this.bandwidth, 0.0);
        }
        // The rates at which bundles or links would be full, smallest first. Links come before bundles, and are pushed
        // again when their remaining capacity falls.
        let mut candidates: BinaryHeap<std::cmp::Reverse<(Time, bool, u32, u32)>> = BinaryHeap::new();
        for &at in bundles {
            let bundle = &mut self.bundles[at as usize];
            bundle.rate = f64::INFINITY;
            for &(link, times) in &bundle.links {
                self.links[link as usize].weight += bundle.ends.len() as f64 * f64::from(times);
            }
            if bundle.fastest.is_finite() {
                candidates.push(std::cmp::Reverse((Time(bundle.fastest), true, at, 0)));
            }
        }
        for &link in links {
            let this = &mut self.links[link as usize];
            this.version = 0;
            if this.weight > 0.0 {
                candidates.push(std::cmp::Reverse((Time(this.left / this.weight), false, link, 0)));
            }
        }
        let mut full = vec![];
        while let Some(std::cmp::Reverse((Time(rate), is_bundle, at, version))) = candidates.pop() {
            full.clear();
            if is_bundle {
                full.push(at);
            } else {
                if self.links[at as usize].version != version {
                    continue;
                }
                full.extend_from_slice(&self.links[at as usize].bundles);
            }
            for &which in &full {
                let bundle = &mut self.bundles[which as usize];
                if bundle.ends.is_empty() || bundle.rate.is_finite() {
                    continue;
                }
                bundle.rate = rate;
                bundle.limit = (!is_bundle).then_some(at);
                for &(link, times) in &bundle.links {
                    let this = &mut self.links[link as usize];
                    let weight = bundle.ends.len() as f64 * f64::from(times);
                    this.weight -= weight;
                    this.left = (this.left - weight * rate).max(0.0);
                    this.version += 1;
                    if this.weight > 0.5 && (is_bundle || link != at) {
                        let share = Time((this.left / this.weight).max(rate));
                        candidates.push(std::cmp::Reverse((share, false, link, this.version)));
                    }
                }
            }
        }
    }
}

impl Bundle {
    fn serve(&mut self, now: f64) {
        if self.rate.is_finite() {
            self.served += (now - self.since) * self.rate;
        }
        self.since = now;
    }
}

#[cfg(test)]
mod tests;
