//! Errors of a communicator that is a part of another, in the ranks of that one.

use std::sync::{Arc, Weak};

use tinynccl_comm::Attached;
use tinynccl_plan::error::{Error, Suspect};

/// The numbers that the ranks of a part have in the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Names(Arc<[usize]>);

impl Names {
    pub(crate) fn new(ranks: impl IntoIterator<Item = usize>) -> Names {
        Names(ranks.into_iter().collect())
    }

    /// The number in the whole of rank `rank` of the part.
    pub(crate) fn of(&self, rank: usize) -> usize {
        self.0.get(rank).copied().unwrap_or(rank)
    }

    /// An error of the part, whose ranks are those of the whole then. Numbers inside of texts stay.
    pub(crate) fn error(&self, error: Error) -> Error {
        match error {
            Error::Mismatch { rank, peer, ours, theirs } => {
                Error::Mismatch { rank: self.of(rank), peer: self.of(peer), ours, theirs }
            }
            Error::PeerLost { op, rank, peer, address, detail } => {
                Error::PeerLost { op, rank: self.of(rank), peer: self.of(peer), address, detail }
            }
            Error::Timeout { op, rank, waited, missing, detail } => {
                let missing = missing.into_iter().map(|rank| self.of(rank)).collect();
                Error::Timeout { op, rank: self.of(rank), waited, missing, detail }
            }
            Error::Aborted { op, rank, reason } => Error::Aborted { op, rank: self.of(rank), reason },
            Error::Protocol { op, rank, peer, address, detail } => {
                Error::Protocol { op, rank: self.of(rank), peer: self.of(peer), address, detail }
            }
            Error::Corrupt { op, rank, suspect, buffer, offset, bytes, expected, got } => {
                let (rank, suspect) = (self.of(rank), Box::new(self.suspect(*suspect)));
                Error::Corrupt { op, rank, suspect, buffer, offset, bytes, expected, got }
            }
            other => other,
        }
    }

    fn suspect(&self, suspect: Suspect) -> Suspect {
        match suspect {
            Suspect::Link { from, to, path } => Suspect::Link { from: self.of(from), to: self.of(to), path },
            Suspect::Memory { rank } => Suspect::Memory { rank: self.of(rank) },
            Suspect::Ranks(ranks) => Suspect::Ranks(ranks.into_iter().map(|rank| self.of(rank)).collect()),
        }
    }
}

/// Passes the failure of a part on, in the ranks of the whole.
pub(crate) struct Renamed {
    pub(crate) to: Weak<dyn Attached>,
    pub(crate) names: Names,
}

impl Attached for Renamed {
    fn failed(&self, error: &Error) {
        if let Some(to) = self.to.upgrade() {
            to.failed(&self.names.error(error.clone()));
        }
    }
}

impl std::fmt::Debug for Renamed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Renamed ({:?})", self.names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn errors_of_a_part_name_the_ranks_of_the_whole() {
        let names = Names::new([4, 5, 6]);
        let (op, waited) = ("a call".to_owned(), Duration::from_secs(1));
        let late = |rank, missing: &[usize]| Error::Timeout {
            op: op.clone(),
            rank,
            waited,
            missing: missing.to_vec(),
            detail: String::new(),
        };
        assert_eq!(names.error(late(0, &[1, 2])).to_string(), late(4, &[5, 6]).to_string());
        let lost = |rank, peer| Error::PeerLost {
            op: op.clone(),
            rank,
            peer,
            address: "here".to_owned(),
            detail: String::new(),
        };
        assert_eq!(names.error(lost(2, 0)).to_string(), lost(6, 4).to_string());
        let other = Error::invalid("a call", "rank 1 of something else");
        assert_eq!(names.error(other.clone()).to_string(), other.to_string());
        // A number that the part does not have.
        assert_eq!(names.of(9), 9);
    }
}
