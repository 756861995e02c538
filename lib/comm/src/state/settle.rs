//! Checks outside the messages that all ranks make the same calls, in `close` at the latest.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::State;
use super::control::PeerHealth;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_transport::bootstrap::{Disagreement, is_later};

/// Heartbeats that `close` waits for, but no longer than [`GRACE`]: the store learns every rank's calls with the rank's
/// next heartbeat.
const BEATS: u32 = 3;
const GRACE: Duration = Duration::from_secs(2);

/// Interval between checks of the others' progress: it begins with the shortest and grows.
const LOOKS: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(50)];

impl State {
    /// The error for two ranks that made different calls on this communicator; `None` if it is another one.
    pub(super) fn mismatch_of(&self, found: &Disagreement) -> Option<Error> {
        if found.comm != self.id {
            return None;
        }
        let [one, other] =
            [0, 1].map(|i: usize| Some((self.member(found.ranks[i])?, Box::new(found.calls[i].header(self.id)))));
        let (one, other) = (one?, other?);
        let ((rank, ours), (peer, theirs)) = if other.0 == self.rank { (other, one) } else { (one, other) };
        Some(Error::Mismatch { rank, peer, ours, theirs })
    }

    /// Fails if our calls and another rank's differ, as far as this rank knows without a query.
    pub(super) fn compare_calls(&self) -> Result<()> {
        let found = self.control.disagreement(self.id, &self.members);
        match found.and_then(|found| self.mismatch_of(&found)) {
            Some(error) => Err(self.fail_everywhere(error)),
            None => Ok(()),
        }
    }

    /// The failure that names the first call in which ranks differ, when it is known that some call differs.
    pub(super) fn find_mismatch(&self) -> Option<Error> {
        if let Err(error) = self.compare_calls() {
            return Some(error);
        }
        self.control.tell_progress();
        self.wait_for_failure(self.config.heartbeat.saturating_mul(BEATS).min(GRACE))
    }

    /// True if the rank of `health` is known to have made fewer calls than we have.
    pub(super) fn is_behind(&self, health: &PeerHealth) -> bool {
        let ours = self.progress.seq_started.load(Ordering::Relaxed) as u32;
        let theirs = health.progress.as_ref().map_or(0, |progress| progress.seq_started as u32);
        is_later(ours, theirs)
    }

    /// A leaving rank publishes its calls for the ranks that still make some.
    pub(crate) fn say_last_call(&self) {
        self.progress.closed.store(true, Ordering::Relaxed);
        self.control.tell_progress();
    }

    /// Waits until every rank has made our calls, so that they were compared, or is gone.
    ///
    /// # Errors
    /// The communicator's failure; a rank that has closed it after fewer calls; the deadline.
    pub(crate) fn settle(&self) -> Result<()> {
        self.say_last_call();
        let begin = Instant::now();
        let mut pause = LOOKS[0];
        while !self.has_settled(begin.elapsed())? {
            if let Some(error) = self.wait_for_failure(pause) {
                return Err(error);
            }
            pause = (pause * 2).min(LOOKS[1]);
        }
        self.failure_or_ok()
    }

    fn failure_or_ok(&self) -> Result<()> {
        self.wait_for_failure(Duration::ZERO).map_or(Ok(()), Err)
    }

    fn has_settled(&self, waited: Duration) -> Result<bool> {
        self.failure_or_ok()?;
        let Some(ours) = self.progress.snapshot().call else { return Ok(true) };
        // Without a store there is no notice: every difference was found before.
        let Ok(health) = self.control.health(self.id) else { return Ok(true) };
        // After the wait, a rank with as many calls as ours has made all its calls.
        self.compare_calls()?;
        let of = |rank: usize| health.get(self.members[rank]);
        let behind: Vec<usize> = (0..self.members.len())
            .filter(|&rank| rank != self.rank)
            .filter(|&rank| of(rank).is_some_and(|h| self.is_behind(h)))
            .collect();
        let closed = |&&rank: &&usize| of(rank).is_some_and(|h| h.progress.as_ref().is_some_and(|p| p.closed));
        if let Some(&peer) = behind.iter().find(closed) {
            let last = of(peer).and_then(|h| h.progress?.call);
            let last = last.map_or_else(|| "any call".to_owned(), |call| call.header(self.id).to_string());
            return Err(self.fail_everywhere(Error::PeerLost {
                op: "close".to_owned(),
                rank: self.rank,
                peer,
                address: "reported by itself".to_owned(),
                detail: format!("it closed its communicator after {last}, our last call is {}", ours.header(self.id)),
            }));
        }
        // Others report ranks that are gone.
        let awaited: Vec<usize> =
            behind.into_iter().filter(|&rank| of(rank).is_some_and(|h| h.gone.is_none())).collect();
        if awaited.is_empty() {
            return Ok(true);
        }
        if asked_to_stop() || waited >= self.config.timeout {
            let (missing, detail) = self.find_absent(&awaited).unwrap_or_else(|| {
                let detail = format!("alive, but has not made our last call, {}", ours.header(self.id));
                (awaited.clone(), detail)
            });
            let op = "close".to_owned();
            return Err(self.fail_everywhere(Error::Timeout { op, rank: self.rank, waited, missing, detail }));
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Comm;
    use tinynccl_plan::Call;
    use tinynccl_plan::dtype::DType;
    use tinynccl_plan::wire::Collective;
    use tinynccl_sys::config::Config;

    #[test]
    fn calls_that_others_carry_out_are_compared_when_the_communicator_closes() {
        for wrong in [false, true] {
            let comms = Comm::threads(2, Config::default()).unwrap();
            for comm in &comms {
                let root = if wrong { comm.rank() } else { 0 };
                let (collective, dtype) = (Collective::Broadcast, DType::Bf16);
                comm.note(&Call::new(collective, dtype, tinynccl_plan::ReduceOp::Sum, root, 9));
            }
            let outcomes: Vec<Result<()>> = comms.into_iter().map(Comm::close).collect();
            assert!(outcomes.iter().all(|o| o.is_err() == wrong), "{outcomes:?}");
            for text in outcomes.into_iter().filter_map(Result::err).map(|e| e.to_string()) {
                for call in ["root 0", "root 1"] {
                    assert!(text.contains(&format!("broadcast #1 of comm 0 (bf16, count 9, {call})")), "{text}");
                }
            }
        }
    }
}
