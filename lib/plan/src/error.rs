//! One error type. It names the operation, the ranks and addresses, the expected and the received value, and the next
//! step.

use std::fmt;
use std::time::Duration;

use crate::dtype::{DType, ReduceOp};
use crate::wire::{Collective, Header};

/// Result of every fallible call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure. `Clone`, because one failure is delivered to every waiter.
///
/// `Debug` shows the same sentence as `Display`: a `main` that returns a `Result`, and `unwrap`, print it. The fields are
/// for `match`.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two ranks made different calls.
    #[error(
        "rank {rank} and rank {peer} disagree: {}; every rank must make the same calls in the same order with the same dtype, op, \
         count and root",
        calls(*rank, *peer, ours, theirs)
    )]
    Mismatch {
        /// One of the two ranks: the one that detected it, if that is one of them.
        rank: usize,
        /// The other one.
        peer: usize,
        /// The call of `rank`.
        ours: Box<Header>,
        /// The call of `peer`, or the header that it sent.
        theirs: Box<Header>,
    },

    /// A peer's process or connection is gone; every later call of the communicator gives this too.
    #[error("{op}: rank {rank} lost rank {peer} ({address}): {detail}; look at that rank's output for the first error")]
    PeerLost {
        /// Operation that detected it.
        op: String,
        /// Our rank.
        rank: usize,
        /// The lost rank.
        peer: usize,
        /// Address at which that rank was reached.
        address: String,
        /// The report of the operating system or the rendezvous.
        detail: String,
    },

    /// No progress within the deadline.
    #[error("{op}: rank {rank} made no progress for {waited:.1?}; not arrived: {}; {detail}", ranks(missing))]
    Timeout {
        /// Operation that waited.
        op: String,
        /// Our rank.
        rank: usize,
        /// Time without progress.
        waited: Duration,
        /// The ranks that are known not to have arrived.
        missing: Vec<usize>,
        /// Their known state, and the next step.
        detail: String,
    },

    /// The communicator was aborted, here or by another rank, or failed in an earlier call. Every later call also gives
    /// this.
    #[error("{op}: rank {rank}: the communicator was aborted: {reason}")]
    Aborted {
        /// Operation that was running or requested.
        op: String,
        /// Our rank.
        rank: usize,
        /// The first cause, in words.
        reason: String,
    },

    /// Invalid arguments.
    #[error("{op}: {detail}")]
    InvalidArgument {
        /// Requested operation.
        op: String,
        /// Expected and got.
        detail: String,
    },

    /// An environment variable or option that does not parse, or is missing.
    #[error("{name}={value:?}: {detail}")]
    Config {
        /// Variable or option.
        name: String,
        /// Its value (empty when it is missing).
        value: String,
        /// The expected value.
        detail: String,
    },

    /// The ranks could not find each other.
    #[error("rendezvous at {address}: {detail}")]
    Bootstrap {
        /// Address of the rendezvous store, or a name for it.
        address: String,
        /// Expected, got, next step.
        detail: String,
    },

    /// Bytes from a peer that break the protocol (wrong length, wrong checksum, not our magic).
    #[error("{op}: rank {rank}: protocol error from rank {peer} ({address}): {detail}")]
    Protocol {
        /// Operation that detected it.
        op: String,
        /// Our rank.
        rank: usize,
        /// The sender.
        peer: usize,
        /// Address at which that rank was reached.
        address: String,
        /// Expected and got.
        detail: String,
    },

    /// Bits that changed in memory or on the way, found by a call that `TINYNCCL_VERIFY` chose.
    #[error(
        "{op}: rank {rank}: wrong bits, from {suspect}: {bytes} bytes from byte {offset} of the {buffer} on: expected \
         XXH3 {expected:016x}, got {got:016x}; {}",
        suspect.next_step()
    )]
    Corrupt {
        /// The call: its name, number and communicator.
        op: String,
        /// Our rank.
        rank: usize,
        /// The link or memory to blame.
        suspect: Box<Suspect>,
        /// The buffer that holds the wrong bits, or that they were combined with.
        buffer: String,
        /// Position of the block with the wrong bits in that buffer, in bytes.
        offset: u64,
        /// Length of that block.
        bytes: u64,
        /// Sum of the block where it came from, or when it was written.
        expected: u64,
        /// Sum of the block here and now.
        got: u64,
    },

    /// A connection between processes that have no ranks (`tinynccl::transport::rails`) failed.
    #[error("{op}: {connection}: {detail}")]
    Connection {
        /// Operation that detected it.
        op: String,
        /// Both ends, with their addresses.
        connection: String,
        /// Expected, got, next step.
        detail: String,
    },

    /// The operating system refused something.
    #[error("{op}: {detail}: {}", os_error(*errno))]
    Os {
        /// Operation that was running.
        op: String,
        /// The attempted action, with addresses and sizes.
        detail: String,
        /// The error number.
        errno: i32,
    },

    /// The CUDA driver refused something.
    #[error("{op}: {detail}: {status}")]
    Cuda {
        /// Operation that was running.
        op: String,
        /// The attempted action, with devices and sizes.
        detail: String,
        /// The driver's status in words.
        status: String,
    },

    /// This build or this machine does not support it.
    #[error("{what} is not available here: {detail}")]
    Unsupported {
        /// The requested feature.
        what: String,
        /// Why not, and what to do instead.
        detail: String,
    },
}

/// The place where bits changed, as far as the sums tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspect {
    /// A link, or memory that two ranks share, between where its sender read the data and where its receiver did.
    Link {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Transport, and the sender's address.
        path: String,
    },
    /// Memory of a rank, or its processor: the sums of what reached it are right.
    Memory {
        /// The rank.
        rank: usize,
    },
    /// One of these ranks, which have different results and no majority.
    Ranks(Vec<usize>),
}

impl Suspect {
    fn next_step(&self) -> &'static str {
        match self {
            Suspect::Link { .. } => {
                "TINYNCCL_VERIFY=all checks every call: if it names this link again, replace its cable or card"
            }
            _ => {
                "has another thread written to the buffer during the call? If not, look at the memory errors that the \
                 kernel counts on that host (EDAC), and test its memory and processor"
            }
        }
    }
}

impl fmt::Display for Suspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Suspect::Link { from, to, path } => write!(f, "the link from rank {from} to rank {to} ({path})"),
            Suspect::Memory { rank } => write!(f, "the memory or processor of rank {rank}"),
            Suspect::Ranks(list) => write!(f, "one of {}", ranks(list)),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn invalid(op: impl Into<String>, detail: impl Into<String>) -> Self {
        Error::InvalidArgument { op: op.into(), detail: detail.into() }
    }

    /// An [`Error::Config`].
    pub fn config(name: impl Into<String>, value: impl ToString, detail: impl Into<String>) -> Self {
        Error::Config { name: name.into(), value: value.to_string(), detail: detail.into() }
    }

    /// An [`Error::Bootstrap`].
    pub fn bootstrap(address: impl ToString, detail: impl Into<String>) -> Self {
        Error::Bootstrap { address: address.to_string(), detail: detail.into() }
    }

    /// An [`Error::Os`] from an `std::io::Error`.
    pub fn io(op: impl Into<String>, detail: impl Into<String>, source: &std::io::Error) -> Self {
        match source.raw_os_error() {
            Some(errno) => Error::Os { op: op.into(), detail: detail.into(), errno },
            None => Error::InvalidArgument { op: op.into(), detail: format!("{}: {source}", detail.into()) },
        }
    }

    /// An [`Error::Os`] from an error number, such as rustix's.
    pub fn errno(op: impl Into<String>, detail: impl Into<String>, errno: impl Into<std::io::Error>) -> Self {
        Error::io(op, detail, &errno.into())
    }

    /// The error of `op` after this earlier failure. A lost rank stays [`Error::PeerLost`], whether or not the call
    /// began before the loss was known. Any other failure belongs to another call, and `op` gets [`Error::Aborted`].
    #[doc(hidden)]
    pub fn for_later_call(&self, op: String, rank: usize) -> Error {
        match self {
            Error::PeerLost { peer, address, detail, .. } => {
                Error::PeerLost { op, rank, peer: *peer, address: address.clone(), detail: detail.clone() }
            }
            Error::Aborted { reason, .. } => Error::Aborted { op, rank, reason: reason.clone() },
            first => Error::Aborted { op, rank, reason: format!("it failed earlier: {first}") },
        }
    }
}

impl ReduceOp {
    /// An error if the operator cannot combine values of this type, or not in this collective.
    #[doc(hidden)]
    #[inline]
    pub fn check(self, collective: Collective, rank: usize, dtype: DType) -> Result<()> {
        let expected = if !self.applies_to(dtype) {
            "integers, whose bits can be combined"
        } else if collective == Collective::Scan && self == ReduceOp::Avg {
            "another operator: no rank has the inputs of all ranks"
        } else {
            return Ok(());
        };
        Err(Error::invalid(collective.name(), format!("rank {rank}: {self} of {dtype}: expected {expected}")))
    }
}

fn calls(rank: usize, peer: usize, ours: &Header, theirs: &Header) -> String {
    if ours.is_same_call(theirs) {
        return format!("they made different calls before {ours}, in which both are");
    }
    let (is, has) = if theirs.algorithm == Header::NO_ALGORITHM { ("makes", "makes") } else { ("is in", "sent") };
    format!("rank {rank} {is} {ours}, rank {peer} {has} {theirs}")
}

fn os_error(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

fn ranks(list: &[usize]) -> String {
    match list {
        [] => "unknown".to_owned(),
        [one] => format!("rank {one}"),
        many => {
            let names: Vec<String> = many.iter().map(usize::to_string).collect();
            format!("ranks {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_names_the_missing_ranks() {
        let e = Error::Timeout {
            op: "all_reduce #4".into(),
            rank: 0,
            waited: Duration::from_secs(2),
            missing: vec![2, 3],
            detail: "no heartbeat from rank 2".into(),
        };
        assert_eq!(
            e.to_string(),
            "all_reduce #4: rank 0 made no progress for 2.0s; not arrived: ranks 2, 3; no heartbeat from rank 2"
        );
    }

    #[test]
    fn a_main_that_returns_an_error_and_an_unwrap_show_the_sentence() {
        let e = Error::config("RANK", "", "missing");
        let sentence = "RANK=\"\": missing";
        assert_eq!(format!("{e:?}"), sentence);
        assert_eq!(format!("{e:#?}"), sentence);
        // The way in which a `main` prints it.
        let returned: Box<dyn std::error::Error> = e.clone().into();
        assert_eq!(format!("{returned:?}"), sentence);
        assert!(matches!(e, Error::Config { name, .. } if name == "RANK"), "tests look at the fields");
    }

    #[test]
    fn os_errors_come_in_words() {
        let e = Error::errno("open", "/nowhere", std::io::Error::from_raw_os_error(2));
        assert!(e.to_string().contains("No such file or directory"), "{e}");
    }

    #[test]
    fn a_lost_rank_is_lost_to_later_calls_and_other_failures_are_theirs_who_saw_them() {
        let lost = Error::PeerLost {
            op: "all_reduce #4".into(),
            rank: 0,
            peer: 2,
            address: "10.0.0.2:5000".into(),
            detail: "connection closed".into(),
        };
        assert_eq!(
            lost.for_later_call("barrier".into(), 0).to_string(),
            "barrier: rank 0 lost rank 2 (10.0.0.2:5000): connection closed; look at that rank's output for the first error"
        );
        let later = Error::invalid("all_reduce #4", "odd").for_later_call("barrier".into(), 0);
        assert_eq!(
            later.to_string(),
            "barrier: rank 0: the communicator was aborted: it failed earlier: all_reduce #4: odd"
        );
        assert_eq!(
            later.for_later_call("send".into(), 0).to_string(),
            "send: rank 0: the communicator was aborted: it failed earlier: all_reduce #4: odd"
        );
    }
}
