//! The store's knowledge of communicators: the progress of each rank, and the calls that the ranks reported.
//!
//! A rank that closes a communicator queries whether the others have made its calls. They may have closed it long
//! before, and thousands of others since: a communicator is remembered until all of its ranks are done with it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::calls::{Comparison, Disagreement, Made};
use super::progress::Snapshot;

/// Limit of the kept communicators that no rank uses any more, and some rank has never reported: it was lost before, or
/// it may be about to report.
const UNSENT: usize = 1024;

/// All communicators by number.
#[derive(Debug, Default)]
pub(in crate::bootstrap) struct Comms {
    known: HashMap<u32, Known>,
    /// The communicators in the last heartbeat of each rank.
    used: BTreeMap<usize, BTreeSet<u32>>,
    unsent: VecDeque<u32>,
}

#[derive(Debug, Default)]
struct Known {
    /// Number of its ranks; 0 until one has reported it.
    ranks: usize,
    /// Progress by rank; `None` for a rank that is done with it, and never reported that it makes no more calls.
    progress: BTreeMap<usize, Option<Snapshot>>,
    /// Number of ranks that use it.
    used: usize,
    calls: Comparison,
}

impl Comms {
    /// A heartbeat of `rank`. A communicator that it has closed stays as it was last.
    pub(in crate::bootstrap) fn advance(&mut self, rank: usize, progress: Vec<(u32, Snapshot)>) {
        let mut now = BTreeSet::new();
        let before = self.used.remove(&rank).unwrap_or_default();
        for (comm, snapshot) in progress {
            let known = self.known.entry(comm).or_default();
            known.ranks = known.ranks.max(snapshot.ranks as usize);
            known.progress.insert(rank, Some(snapshot));
            known.used += usize::from(now.insert(comm) && !before.contains(&comm));
        }
        before.difference(&now).for_each(|&comm| self.done(comm, rank, true));
        self.used.insert(rank, now);
    }

    /// Ends the reports of `rank`, which has left or is lost.
    pub(in crate::bootstrap) fn gone(&mut self, rank: usize) {
        for comm in self.used.remove(&rank).unwrap_or_default() {
            self.done(comm, rank, false);
        }
    }

    /// `rank` does not use `comm` any more; one that just `dropped` it, without closing it, does not have it any more.
    fn done(&mut self, comm: u32, rank: usize, dropped: bool) {
        let Some(known) = self.known.get_mut(&comm) else { return };
        known.used -= 1;
        if let Some(progress) = known.progress.get_mut(&rank).filter(|_| dropped) {
            *progress = progress.filter(|p| p.closed);
        }
        if known.used > 0 {
            return;
        }
        if known.progress.len() >= known.ranks {
            self.known.remove(&comm);
            return;
        }
        self.unsent.push_back(comm);
        if self.unsent.len() > UNSENT
            && let Some(oldest) = self.unsent.pop_front()
            && self.known.get(&oldest).is_some_and(|known| known.used == 0)
        {
            self.known.remove(&oldest);
        }
    }

    /// Compares the calls that `rank` reports with those that others reported.
    pub(in crate::bootstrap) fn compare(&mut self, rank: usize, calls: &[(u32, Vec<Made>)]) -> Vec<Disagreement> {
        let compared = calls.iter().filter_map(|(comm, calls)| {
            let (ranks, calls) = self.known.get_mut(comm)?.calls.take(rank, calls)?;
            Some(Disagreement { comm: *comm, ranks, calls })
        });
        compared.collect()
    }

    /// Returns the progress of `rank` in `comm`; `None` if it does not have it.
    pub(in crate::bootstrap) fn progress(&self, comm: u32, rank: usize) -> Option<Snapshot> {
        self.known.get(&comm)?.progress.get(&rank).copied().flatten()
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open(calls: u64) -> Snapshot {
        Snapshot { seq_started: calls, ranks: 2, ..Snapshot::default() }
    }

    fn closed(calls: u64) -> Snapshot {
        Snapshot { closed: true, ..open(calls) }
    }

    #[test]
    fn closed_ones_are_remembered_until_the_other_rank_has_closed_them_too() {
        const MANY: u32 = 3000;
        let mut comms = Comms::default();
        let all = || (1..=MANY).map(|comm| (comm, open(1))).collect::<Vec<_>>();
        comms.advance(1, all());
        for comm in 1..=MANY {
            comms.advance(0, vec![(0, open(0)), (comm, closed(1))]);
        }
        comms.advance(0, vec![(0, open(0))]);
        comms.advance(1, all());
        for comm in 1..=MANY {
            assert_eq!(comms.progress(comm, 0), Some(closed(1)), "{comm}");
        }
        // The newest first.
        for left in (0..MANY).rev() {
            let progress = all().into_iter().take(left as usize).collect();
            comms.advance(1, progress);
            assert_eq!(comms.len(), 1 + left as usize);
        }
    }

    #[test]
    fn one_that_only_one_rank_has_told_of_waits_for_the_other() {
        let mut comms = Comms::default();
        comms.advance(0, vec![(7, closed(3))]);
        comms.advance(0, vec![]);
        assert_eq!(comms.progress(7, 0), Some(closed(3)));
        comms.advance(1, vec![(7, open(3))]);
        assert_eq!(comms.progress(7, 0), Some(closed(3)));
        comms.advance(1, vec![]);
        assert_eq!((comms.len(), comms.progress(7, 0)), (0, None));
        // A rank that is lost before it reports.
        for comm in 0..5000 {
            comms.advance(0, vec![(comm, closed(1))]);
        }
        comms.gone(0);
        assert_eq!((comms.len(), comms.progress(4999, 0)), (UNSENT, Some(closed(1))));
    }

    #[test]
    fn a_rank_that_is_gone_is_not_waited_for_and_stays_known_to_the_others() {
        let mut comms = Comms::default();
        comms.advance(0, vec![(7, open(3))]);
        comms.advance(1, vec![(7, open(2))]);
        comms.gone(1);
        assert_eq!(comms.progress(7, 1), Some(open(2)));
        comms.advance(0, vec![]);
        assert_eq!(comms.len(), 0);
        // One that is dropped without a close is not had any more.
        comms.advance(0, vec![(8, open(3))]);
        comms.advance(1, vec![(8, open(2))]);
        comms.advance(1, vec![]);
        assert_eq!((comms.progress(8, 0), comms.progress(8, 1)), (Some(open(3)), None));
    }

    proptest! {
        #[test]
        fn any_heartbeats_leave_nothing_behind(
            beats in prop::collection::vec((0usize..3, prop::collection::btree_map(0u32..6, any::<bool>(), 0..6)), 0..60),
        ) {
            let mut comms = Comms::default();
            for (rank, progress) in beats {
                let beat: Vec<_> =
                    progress.iter().map(|(comm, done)| (*comm, if *done { closed(1) } else { open(1) })).collect();
                comms.advance(rank, beat.clone());
                for (comm, snapshot) in beat {
                    prop_assert_eq!(comms.progress(comm, rank), Some(snapshot));
                }
            }
            (0..3).for_each(|rank| comms.gone(rank));
            prop_assert!(comms.known.values().all(|known| known.used == 0 && known.progress.len() < 2));
        }
    }
}
