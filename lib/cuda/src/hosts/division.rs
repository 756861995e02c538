//! Ranks divided by their hosts.

/// The place of a rank among hosts that have as many ranks each, in blocks of consecutive ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    /// Number of hosts.
    pub(crate) hosts: usize,
    /// Ranks of each host.
    pub(crate) each: usize,
    /// Our host.
    pub(crate) host: usize,
    /// Our number among its ranks.
    pub(crate) local: usize,
}

impl Division {
    /// The division of ranks of which `hosts` names the hosts, seen by `rank`. The error, equal on all ranks, says why
    /// there is none.
    pub(crate) fn of(hosts: &[usize], rank: usize) -> Result<Division, String> {
        let ranks = hosts.len();
        let on = |rank: usize| hosts.iter().filter(|&&host| host == hosts[rank]).count();
        let Some(each) = (ranks > 0).then(|| on(0)) else { return Err("there are no ranks".to_owned()) };
        if each == ranks {
            return Err("the ranks are on one host".to_owned());
        }
        if let Some(other) = (0..ranks).find(|&rank| on(rank) != each) {
            return Err(format!(
                "the host of rank 0 has {each} ranks, that of rank {other} has {}: start as many on each",
                on(other)
            ));
        }
        if each == 1 {
            return Err("every host has one rank, and nothing to do inside".to_owned());
        }
        let apart = |&rank: &usize| hosts[rank] != hosts[rank / each * each];
        if let Some(apart) = (0..ranks).find(apart) {
            return Err(format!(
                "rank {apart} is not on the host of rank {}: number the ranks host by host",
                apart / each * each
            ));
        }
        Ok(Division { hosts: ranks / each, each, host: rank / each, local: rank % each })
    }

    /// The ranks of our host.
    pub(crate) fn inside(&self) -> impl Iterator<Item = usize> + use<> {
        let first = self.host * self.each;
        first..first + self.each
    }

    /// The ranks with our number on all hosts.
    pub(crate) fn lane(&self) -> impl Iterator<Item = usize> + use<> {
        let Division { hosts, each, local, .. } = *self;
        (0..hosts).map(move |host| host * each + local)
    }

    /// Host and number there of a rank.
    pub(crate) fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.each, rank % self.each)
    }

    /// Number on our host of one of its ranks.
    pub(crate) fn number_inside(&self, rank: usize) -> Option<usize> {
        let (host, local) = self.place(rank);
        (host == self.host).then_some(local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_as_many_consecutive_ranks_each_are_divided() {
        let seen = Division::of(&[0, 0, 0, 3, 3, 3], 4).unwrap();
        assert_eq!(seen, Division { hosts: 2, each: 3, host: 1, local: 1 });
        assert_eq!(seen.inside().collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!(seen.lane().collect::<Vec<_>>(), [1, 4]);
        assert_eq!((seen.place(2), seen.number_inside(2), seen.number_inside(5)), ((0, 2), None, Some(2)));
    }

    #[test]
    fn others_are_not_and_the_reason_names_a_rank() {
        let why = |hosts: &[usize]| Division::of(hosts, 0).unwrap_err();
        assert!(why(&[0, 0]).contains("on one host"));
        assert!(why(&[0, 1, 2]).contains("one rank"));
        assert!(why(&[0, 0, 0, 3]).contains("rank 0 has 3 ranks, that of rank 3 has 1"));
        assert!(why(&[0, 1, 0, 1]).contains("rank 1 is not on the host of rank 0"));
        assert!(why(&[]).contains("no ranks"));
    }

    #[test]
    fn every_rank_is_in_one_host_and_one_lane() {
        for (hosts, each) in [(2, 2), (3, 4), (5, 8)] {
            let of: Vec<usize> = (0..hosts * each).map(|rank| rank / each * each).collect();
            for rank in 0..of.len() {
                let seen = Division::of(&of, rank).unwrap();
                assert_eq!(
                    seen.inside().filter(|one| seen.lane().any(|other| other == *one)).collect::<Vec<_>>(),
                    [rank]
                );
                assert_eq!((seen.inside().count(), seen.lane().count()), (each, hosts));
            }
        }
    }
}
