//! The state that wins: the newest revision, and within it the most frequent content.
//!
//! The newest revision comes first. Ranks that took one step more than the others have seen the contributions of all
//! ranks to it, so that step counts, even if a single rank has taken it; a majority of all ranks would undo it. Ranks
//! at one revision must have the same content. If one of them differs, its memory or its arithmetic is wrong, and the
//! majority tells which. With as many on either side no rank can tell: an error is better than damage on every rank.

use bytemuck::{Pod, Zeroable};

/// Facts about one rank's state.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Ballot {
    /// Digest of its buffers.
    pub(super) content: u128,
    pub(super) revision: u64,
    /// 1, or 0 for a newcomer, which has no vote.
    pub(super) votes: u64,
}

/// The state that wins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Elected {
    /// The lowest rank that has it.
    pub(super) rank: usize,
    pub(super) revision: u64,
    /// Ranks that have this revision with another content.
    pub(super) differing: Vec<usize>,
}

/// Elects a state, or says why there is none.
pub(super) fn elect(ballots: &[Ballot]) -> Result<Elected, String> {
    let Some(revision) = ballots.iter().filter(|one| one.votes == 1).map(|one| one.revision).max() else {
        return Err(format!(
            "none of the {} ranks has a whole state: load a checkpoint on one of them and give its revision",
            ballots.len()
        ));
    };
    // The ranks of each content, the lowest one first.
    let mut groups: Vec<(u128, Vec<usize>)> = Vec::new();
    for (rank, one) in ballots.iter().enumerate().filter(|(_, one)| one.votes == 1 && one.revision == revision) {
        match groups.iter_mut().find(|(content, _)| *content == one.content) {
            Some((_, group)) => group.push(rank),
            None => groups.push((one.content, vec![rank])),
        }
    }
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.len()));
    if let [(_, one), (_, other), ..] = &groups[..]
        && one.len() == other.len()
    {
        return Err(format!(
            "ranks {one:?} and ranks {other:?} have different contents of revision {revision}, and no majority tells \
             which is right: load a checkpoint, or give no revision on the ranks that are wrong"
        ));
    }
    let mut groups = groups.into_iter().map(|(_, group)| group);
    let rank = groups.next().and_then(|group| group.first().copied()).unwrap_or(0);
    let mut differing: Vec<usize> = groups.flatten().collect();
    differing.sort_unstable();
    Ok(Elected { rank, revision, differing })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outcome for ranks with these revisions and contents.
    fn outcome(ranks: &[(Option<u64>, u128)]) -> Result<(usize, u64, Vec<usize>), String> {
        let ballot = |&(revision, content): &(Option<u64>, u128)| Ballot {
            content,
            revision: revision.unwrap_or(0),
            votes: revision.is_some().into(),
        };
        let Elected { rank, revision, differing } = elect(&ranks.iter().map(ballot).collect::<Vec<_>>())?;
        Ok((rank, revision, differing))
    }

    #[test]
    fn newcomers_have_no_vote() {
        assert_eq!(outcome(&[(None, 1), (None, 1), (Some(0), 2)]), Ok((2, 0, vec![])));
        let error = outcome(&[(None, 1), (None, 1)]).unwrap_err();
        assert!(error.contains("none of the 2 ranks") && error.contains("checkpoint"), "{error}");
    }

    #[test]
    fn the_newest_revision_wins_against_a_majority() {
        assert_eq!(outcome(&[(Some(4), 1), (Some(4), 1), (Some(5), 2), (None, 3)]), Ok((2, 5, vec![])));
    }

    #[test]
    fn the_majority_of_a_revision_wins_and_the_others_are_named() {
        assert_eq!(outcome(&[(Some(4), 1), (Some(4), 2), (Some(4), 2), (Some(3), 3)]), Ok((1, 4, vec![0])));
        assert_eq!(outcome(&[(Some(4), 3), (Some(4), 1), (Some(4), 2), (Some(4), 1)]), Ok((1, 4, vec![0, 2])));
    }

    #[test]
    fn as_many_on_either_side_are_an_error_that_names_both() {
        let error = outcome(&[(Some(4), 1), (Some(4), 2), (Some(4), 2), (Some(4), 1), (Some(4), 3)]).unwrap_err();
        assert!(error.contains("ranks [0, 3] and ranks [1, 2]") && error.contains("revision 4"), "{error}");
        assert!(outcome(&[(Some(4), 1), (Some(4), 2), (Some(3), 2)]).is_err(), "older ones do not count");
    }
}
