//! Recorded events: plain values of one cache line each.

use std::fmt;

use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::schedule;
use tinynccl_sys::backoff::Phase;

/// Something that took from `begin` to `end` (nanoseconds of our clock) on one of the communicator's tracks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) track: Track,
    pub(super) content: Content,
}

const _: () = assert!(size_of::<Event>() <= 64);

/// A line of the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Track {
    /// Calls, one after the other.
    Calls,
    /// Lane of a run, by its number among the lanes of all its calls.
    Lane(u32),
    /// A thread of the application, by the order of their first events.
    Thread(u32),
}

/// No link, no message.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
pub(super) enum Content {
    Call(Call),
    Group {
        calls: u32,
    },
    Step(Step),
    /// A lane waits: for a message, or (`room`) for the peer to take earlier ones.
    Wait {
        link: u32,
        room: bool,
    },
    /// The thread has nothing to do; `link` is the first one it waits for.
    Idle {
        phase: Phase,
        link: u32,
    },
    /// A call in memory that all ranks map waits for a rank: to come to the call, or to be done with its part.
    Await {
        rank: u32,
        arrival: bool,
    },
    Compile {
        collective: u8,
    },
    Connect {
        link: u32,
        kind: &'static str,
    },
    Span(Span),
}

/// Event that is recorded outside the executor, on the application's threads.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "numbers of the event, as `Header` has them")]
pub enum Span {
    /// Making the communicator, from the point where it has a tracer.
    Start,
    /// `Comm::split`.
    Split,
    /// A blocking call waits for the asynchronous ones before it.
    Drain,
    /// From the making of an asynchronous call to its start on the progress thread. Several may overlap.
    Queued { collective: u8, bytes: u64 },
    /// `Ddp`: the last gradient of a bucket came, its all_reduce is queued.
    BucketReady { bucket: u32, bytes: u64 },
    /// `Ddp::finish`.
    Finish,
    /// A sleep that only the end of its slice ended, though `peer` had something for us: a wake-up was lost.
    LateWake { peer: u32 },
    /// `Ddp::finish` waits for one bucket.
    BucketWait { bucket: u32 },
    /// Calls that our executor does not run, `collective` the first of them: the time that they kept this thread.
    Carried { collective: u8, calls: u32, bytes: u64, by: By },
}

/// Backend of a call that our executor does not run.
#[derive(Debug, Clone, Copy)]
pub enum By {
    /// Kernels over the peers' memory; the thread puts them into a stream.
    Kernels(Choice),
    /// A device communicator's path that has no choices.
    Path(Path),
    /// Kernels of a message between two ranks.
    Message(Path),
    /// NVIDIA's NCCL; the thread puts calls into a stream.
    Nccl,
    /// An MPI library, which returns when the call is over.
    Mpi,
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            By::Kernels(Choice { protocol, blocks }) => write!(f, "kernels, {protocol}, {blocks} blocks"),
            By::Path(path) => path.fmt(f),
            By::Message(path) => write!(f, "a message, {path}"),
            By::Nccl => f.write_str("NCCL"),
            By::Mpi => f.write_str("MPI"),
        }
    }
}

/// A call, as its header and plan describe it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// As in the header, which says what they hold.
    pub(crate) count: u64,
    pub(crate) seq: u32,
    pub(crate) root: u32,
    pub(crate) windows: u32,
    /// Longest message in bytes.
    pub(crate) message: u32,
    pub(crate) collective: u8,
    pub(crate) dtype: u8,
    pub(crate) op: u8,
    pub(crate) algorithm: u8,
}

/// A step of a lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) kind: schedule::Step<(), ()>,
    /// False where the call failed before the step was done.
    pub(super) done: bool,
    /// First part; 65535 stands for all above.
    pub(super) part: u16,
    pub(super) seq: u32,
    pub(super) window: u32,
    pub(super) bytes: u32,
    /// Time in nanoseconds from the last try of the step to its end: no message leaves earlier.
    pub(super) work_ns: u32,
    /// Links, or [`NONE`].
    pub(super) recv: u32,
    pub(super) send: u32,
    /// Number of the message on its link and direction.
    pub(super) received: u32,
    pub(super) sent: u32,
}
