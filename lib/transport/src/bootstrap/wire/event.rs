//! Events that the store pushes to a rank.

use crate::bootstrap::ledger::calls::Disagreement;

/// Something that happened to the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A rank's connection closed without a goodbye: its process was killed, crashed, or its host is gone.
    RankLost {
        /// The lost rank.
        rank: usize,
        /// Text of the failure, as the store saw it.
        detail: String,
    },
    /// A rank closed its session in good order.
    RankLeft {
        /// The rank that left.
        rank: usize,
    },
    /// A rank aborted a communicator.
    Abort {
        /// The rank that called abort.
        from: usize,
        /// The communicator.
        comm: u32,
        /// The reason that it gave.
        reason: String,
    },
    /// Two ranks made different calls on a communicator.
    Disagree(Disagreement),
    /// The connection to the store broke while the job was running: its process (rank 0 or the launcher) is gone.
    StoreLost {
        /// Error of the operating system.
        detail: String,
    },
}
