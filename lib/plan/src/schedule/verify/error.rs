//! Errors of a set of programs.

use std::fmt;

use crate::schedule::Step;

/// A step of a run: rank, position in the program, window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct At {
    /// Rank.
    pub rank: usize,
    /// Index of the lane in the rank's program.
    pub lane: usize,
    /// Index of the step in the lane.
    pub index: usize,
    /// Window.
    pub window: usize,
    /// The step.
    pub step: Step,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let At { rank, lane, index, window, step } = self;
        write!(f, "rank {rank}, lane {lane}, step {index} ({step}), window {window}")
    }
}

/// Why a lane cannot advance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// Its position.
    pub at: At,
    /// The event that it waits for.
    pub waits_for: Wait,
}

/// The event that a lane waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// A message from this rank.
    Message(usize),
    /// A receive by this rank: the link is full.
    Credit(usize),
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.waits_for {
            Wait::Message(peer) => write!(f, "{} waits for a message from rank {peer}", self.at),
            Wait::Credit(peer) => write!(f, "{} waits for rank {peer} to take a message", self.at),
        }
    }
}

/// An error of a set of programs: the first one found, where the run stops.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The programs do not belong together, or not to this shape.
    #[error("{0}")]
    Programs(String),

    /// A step that is invalid anywhere, or that gets the wrong data or message.
    #[error("{at}: {detail}")]
    Step {
        /// The step.
        at: Box<At>,
        /// The error.
        detail: String,
    },

    /// Two lanes use one direction of one link, so that its messages have no order.
    #[error("rank {rank}: lanes {} and {} both {verb} rank {peer} on channel {channel}", lanes.0, lanes.1)]
    LaneRule {
        /// Rank.
        rank: usize,
        /// Channel.
        channel: u32,
        /// The other end.
        peer: usize,
        /// `send to` or `receive from`.
        verb: &'static str,
        /// The lanes.
        lanes: (usize, usize),
    },

    /// Two lanes touch the same memory, one of them writing, and nothing orders them.
    #[error("{at}: races with lane {other} over {memory}")]
    Race {
        /// The later access in this run.
        at: Box<At>,
        /// The lane of the earlier one.
        other: usize,
        /// The memory.
        memory: String,
    },

    /// No lane can advance.
    #[error("deadlock: {}", lines(blocked))]
    Deadlock {
        /// Every lane that is not done.
        blocked: Vec<Blocked>,
    },

    /// An output part does not hold what it must.
    #[error("rank {rank}, out[{segment}.{part}], window {window}: expected {expected}, got {got}")]
    Output {
        /// Rank.
        rank: usize,
        /// Output segment.
        segment: usize,
        /// Window.
        window: usize,
        /// Part.
        part: usize,
        /// In words.
        expected: String,
        /// In words.
        got: String,
    },

    /// Two ranks add the same values in different order, so that floating-point results differ.
    #[error("part {part}, window {window}: rank {} computes {}, rank {} computes {}", first.0, first.1, second.0, second.1)]
    Order {
        /// Window.
        window: usize,
        /// Part.
        part: usize,
        /// A rank and its expression.
        first: (usize, String),
        /// Another rank and its expression.
        second: (usize, String),
    },

    /// Messages that no rank receives.
    #[error("{messages} message(s) from rank {from} to rank {to} on channel {channel} are left over")]
    Leftover {
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// Channel.
        channel: u32,
        /// Number of messages left over.
        messages: usize,
    },
}

impl From<VerifyError> for crate::Error {
    fn from(error: VerifyError) -> crate::Error {
        crate::Error::invalid("schedule", error.to_string())
    }
}

fn lines(blocked: &[Blocked]) -> String {
    let texts: Vec<String> = blocked.iter().map(Blocked::to_string).collect();
    texts.join("; ")
}
