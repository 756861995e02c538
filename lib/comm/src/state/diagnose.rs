//! Finds the ranks that a stuck call waits for, and the reason, from heartbeats and progress.

use std::time::Duration;

use super::control::PeerHealth;
use super::{LEFT, State};
use crate::executor::Supervisor;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Collective, Header};

impl State {
    /// If the store does not answer: the rank that runs it, unless it has left.
    fn without_store(&self, peers: &[usize], error: &Error) -> (Vec<usize>, String) {
        let host = self.control.store_host();
        if let Some(host) = host.filter(|&host| self.control.has_left(host)) {
            let detail = format!(
                "nothing came from it; its state is unknown, because the rendezvous store ended when rank {host} of the world left"
            );
            return (peers.to_vec(), detail);
        }
        let host = host.and_then(|h| self.member(h));
        let missing = host.map_or_else(|| peers.to_vec(), |h| vec![h]);
        (missing, format!("the rendezvous store does not answer ({error}): is that rank stopped?"))
    }

    /// The ranks that are gone or silent, and their known state. A rank that has left in order counts only if it is one
    /// of `peers`, which we wait for.
    fn absent(&self, health: &[PeerHealth], peers: &[usize]) -> Option<(Vec<usize>, String)> {
        let of = |rank: usize| health.get(self.members[rank]);
        let others = || (0..self.members.len()).filter(|&r| r != self.rank);
        let lost = |&r: &usize| of(r).is_some_and(|h| h.gone.is_some()) && (peers.contains(&r) || !self.has_left(r));
        let gone: Vec<usize> = others().filter(lost).collect();
        if !gone.is_empty() {
            let why = of(gone[0]).and_then(|h| h.gone.clone()).unwrap_or_default();
            return Some((gone, format!("gone: {why}")));
        }
        let limit = self.control.silence_limit();
        let silent: Vec<usize> =
            others().filter(|&r| of(r).is_some_and(|h| h.gone.is_none() && h.silent_for > limit)).collect();
        if !silent.is_empty() {
            let age = of(silent[0]).map(|h| h.silent_for).unwrap_or_default();
            return Some((silent, format!("no heartbeat for {age:.1?}: is the process stopped, or its host down?")));
        }
        None
    }

    /// The state of every rank of the world, once no silence is so short that a busy machine may be its cause.
    fn settled_health(&self) -> Result<Vec<PeerHealth>> {
        settled(self.control.silence_limit(), || self.control.health(self.id))
    }

    /// The absent ranks, according to the store or to its silence. Takes four seconds at most.
    pub(crate) fn find_absent(&self, peers: &[usize]) -> Option<(Vec<usize>, String)> {
        match self.settled_health() {
            Ok(health) => self.absent(&health, peers),
            Err(error) => Some(self.without_store(peers, &error)),
        }
    }

    /// The call of another communicator that one of `ranks` is in.
    fn elsewhere(&self, ranks: &[usize]) -> Option<String> {
        self.control.numbers().known().into_iter().filter(|&comm| comm != self.id).find_map(|comm| {
            let health = self.control.health(comm).ok()?;
            ranks.iter().find_map(|&rank| {
                let progress = health.get(self.members[rank])?.progress.filter(|p| p.seq_started > p.seq_done)?;
                let call = self.op(&progress.call?.header(comm));
                Some(format!(
                    "rank {rank} is in {call} of communicator {comm}, we are in one of communicator {}: ranks that share several \
                     communicators must use them in the same order",
                    self.id
                ))
            })
        })
    }

    /// The error for a call that waits in the exchange before its first byte.
    pub(crate) fn not_all_came(&self, error: Error) -> Error {
        let error = self.failure().unwrap_or_else(|| self.of_members(error));
        let Error::Timeout { rank, waited, missing, detail, .. } = error else { return self.fail_everywhere(error) };
        let call = self.progress.snapshot().call.map(|call| self.op(&call.header(self.id)));
        let op = format!("{} of communicator {}", call.unwrap_or_else(|| "a call".to_owned()), self.id);
        let (missing, detail) = match self.find_absent(&missing) {
            Some(absent) => absent,
            None => {
                let elsewhere = self.elsewhere(&missing);
                (missing, elsewhere.unwrap_or(detail))
            }
        };
        self.fail_everywhere(Error::Timeout { op, rank, waited, missing, detail })
    }

    /// The error for a link that was not made. The peer may have waited for another rank, which is stopped.
    pub(crate) fn cannot_connect(&self, error: Error) -> Error {
        match self.of_members(error) {
            Error::Timeout { op, rank, waited, missing, detail } => {
                let (missing, detail) = self.find_absent(&missing).unwrap_or((missing, detail));
                self.fail_everywhere(Error::Timeout { op, rank, waited, missing, detail })
            }
            error => self.first_cause(error),
        }
    }

    /// The ranks that we wait for, and their known state.
    pub(super) fn diagnose(&self, header: &Header, peers: &[usize]) -> (Vec<usize>, String) {
        let health = match self.settled_health() {
            Ok(health) => health,
            Err(error) => return self.without_store(peers, &error),
        };
        if let Some(absent) = self.absent(&health, peers) {
            return absent;
        }
        let of = |rank: usize| health.get(self.members[rank]);
        let others = || (0..self.members.len()).filter(|&r| r != self.rank);
        let limit = self.control.silence_limit();
        if header.collective != Collective::SendRecv as u8 {
            // The store may no longer know the calls of a rank that has left.
            let is_late = |r: usize, h: &PeerHealth| match h.progress {
                Some(_) => self.is_behind(h),
                None => !self.has_left(r),
            };
            let late: Vec<usize> = others().filter(|&r| of(r).is_some_and(|h| is_late(r, h))).collect();
            if let Some(&first) = late.first() {
                let detail = match late.iter().find(|&&r| self.has_left(r)) {
                    Some(rank) => format!("rank {rank}: {LEFT} without having made this call"),
                    None => self.elsewhere(&late).unwrap_or_else(|| {
                        let last = of(first).and_then(|h| h.progress?.call).map_or_else(
                            || "it has made none".to_owned(),
                            |call| format!("the last one of rank {first} is {}", call.header(self.id)),
                        );
                        format!(
                            "alive, but has not made this call ({last}): is it still computing, or on another path?"
                        )
                    }),
                };
                return (late, detail);
            }
        }
        // Only ranks that wait for a message: a rank in a collective may wait for a call that we have yet to make.
        let waits_for = |rank: usize| {
            let progress = of(rank)?.progress.filter(|p| p.seq_started == p.seq_done)?;
            self.member(progress.waiting_on?)
        };
        if header.collective == Collective::SendRecv as u8
            && let Some(circle) = circle(self.rank, peers, self.members.len(), waits_for)
        {
            let names: Vec<String> =
                circle.iter().skip(1).map(|rank| format!("rank {rank}, which waits for ")).collect();
            let detail = format!(
                "rank {ours} waits for {}rank {ours}: messages that cross belong into one group, or into send_recv",
                names.concat(),
                ours = self.rank
            );
            return (peers.to_vec(), detail);
        }
        // A relay that is no member of this communicator.
        for path in self.control.paths() {
            let ours = |&&peer: &&usize| {
                path.ends.contains(&self.members[self.rank]) && path.ends.contains(&self.members[peer])
            };
            let Some(&peer) = peers.iter().find(ours) else { continue };
            let state = |relay: &usize| {
                let health = health.get(*relay)?;
                let gone = health.gone.clone().map(|why| format!("rank {relay} of the world is gone: {why}"));
                let silent =
                    || (health.silent_for > limit).then(|| format!("no heartbeat from rank {relay} of the world"));
                gone.or_else(silent)
            };
            if let Some(why) = path.through.iter().find_map(state) {
                return (vec![peer], format!("{path}; {why}"));
            }
        }
        let theirs = peers.iter().find_map(|&rank| Some((rank, of(rank)?.progress?.call?.header(self.id))));
        let theirs =
            theirs.map_or_else(String::new, |(rank, call)| format!("; the last collective of rank {rank} is {call}"));
        let ours = Header { algorithm: header.compared_algorithm(), ..*header };
        (
            peers.to_vec(),
            format!("alive, but nothing came from it: compare the calls of both ranks; we are in {ours}{theirs}"),
        )
    }
}

/// Longest time beyond the limit that a rank which is not stopped may be silent, because others run on its processor.
const BUSY: Duration = Duration::from_secs(1);
/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(20);

/// Repeats `ask` while a rank has been silent for longer than `limit`, but not by so much that it must be stopped:
/// either its heartbeat comes, or its silence grows, so this ends within `BUSY`.
fn settled(limit: Duration, mut ask: impl FnMut() -> Result<Vec<PeerHealth>>) -> Result<Vec<PeerHealth>> {
    let stopped = limit.saturating_add(BUSY.min(limit));
    loop {
        let health = ask()?;
        let may_be_busy = |h: &PeerHealth| h.gone.is_none() && h.silent_for > limit && h.silent_for < stopped;
        if !health.iter().any(may_be_busy) {
            return Ok(health);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Ranks that wait for each other, from `rank` over one of `peers` back to `rank`.
fn circle(rank: usize, peers: &[usize], size: usize, waits_for: impl Fn(usize) -> Option<usize>) -> Option<Vec<usize>> {
    peers.iter().find_map(|&peer| {
        let mut circle = vec![rank, peer];
        while circle.len() <= size {
            match waits_for(*circle.last()?)? {
                next if next == rank => return Some(circle),
                next => circle.push(next),
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_slow_to_beat_is_not_named_beside_one_that_is_stopped() {
        let answers = |ages: &'static [[u64; 2]]| {
            let mut asked = 0;
            let health = settled(Duration::from_millis(1000), || {
                let now = ages[asked].map(Duration::from_millis);
                asked += 1;
                Ok(Vec::from(now.map(|silent_for| PeerHealth { silent_for, progress: None, gone: None })))
            });
            (health.unwrap().into_iter().map(|h| h.silent_for.as_millis() as u64).collect::<Vec<_>>(), asked)
        };
        assert_eq!(answers(&[[900, 3000]]), (vec![900, 3000], 1));
        assert_eq!(answers(&[[1600, 3000], [1700, 3100], [10, 3200]]), (vec![10, 3200], 3));
        // Two that are stopped.
        assert_eq!(answers(&[[1600, 3000], [2000, 3400]]), (vec![2000, 3400], 2));
    }

    #[test]
    fn a_circle_leads_back_to_us_and_nothing_else_is_one() {
        let of = |waits: &'static [Option<usize>]| move |rank: usize| waits[rank];
        assert_eq!(circle(1, &[0], 2, of(&[Some(1), Some(0)])), Some(vec![1, 0]));
        assert_eq!(circle(0, &[2, 1], 3, of(&[Some(1), Some(2), Some(0)])), Some(vec![0, 2]));
        assert_eq!(circle(0, &[1], 3, of(&[Some(1), Some(2), Some(0)])), Some(vec![0, 1, 2]));
        assert_eq!(circle(0, &[1], 3, of(&[Some(1), None, Some(0)])), None, "rank 1 is at work");
        // A cycle of other ranks, for which we wait.
        assert_eq!(circle(0, &[1], 3, of(&[Some(1), Some(2), Some(1)])), None);
    }
}
