//! Activity of every rank over time, as a file for [Perfetto](https://ui.perfetto.dev) or `chrome://tracing`.
//!
//! `TINYNCCL_TRACE=run.json` ([`Config::trace`](tinynccl_sys::Config::trace)) records every call, step and wait of
//! every rank that has it set, on one clock. Ranks are world ranks everywhere in the file.
//!
//! # What the file shows
//! One process per rank, named `rank 3 (host, pid 4711)`. Its threads are, per communicator:
//! - **calls**: `all_reduce #12 4 MiB f32 sum` with algorithm, bytes, largest message and windows as arguments. Below a
//!   call: compiling its plan, connecting, and what the thread did while no lane could go on (`spin for rank 2`, `yield
//!   …`, `sleep …`). Calls of a group are one slice here, and one slice per lane on the lanes.
//! - **lane N**: the steps, with NCCL's names, peers, part, window and bytes. Below a step: `wait for rank 2` (its
//!   message is not here, or not whole) and `wait for room at rank 2` (it has not taken the earlier ones).
//! - **thread N**: what the application's threads did: waiting for queued calls, `Ddp`'s buckets.
//!   Also calls that another carries: of `DeviceComm` and of NCCL (`by`: protocol and
//!   blocks, or NCCL) the slice is the time in which the host put the call into a stream, not that in which the GPU ran
//!   it, and a replay of a captured graph has none; of MPI it is the whole call. Ranks of `DeviceComm::local` have no
//!   communicator of the host, and so no trace of calls over the peers' memory.
//! - **queue**: how long asynchronous calls waited for the progress thread.
//!
//! An arrow goes from each step that sends to the step that receives the message. Its id is a hash of (communicator,
//! channel, sender, receiver, number of the message on that link), which both ends know without an exchange.
//!
//! # Cost
//! Off: the executor is compiled twice, with hooks that are empty and with hooks that record. One test per call, of a
//! field of the workspace that the call uses anyway, chooses. On: events are plain values in memory that is allocated
//! at the start ([`Config::trace_events`](tinynccl_sys::Config::trace_events) per communicator, 64 bytes each, touched
//! only as it fills; then the oldest go first, and the file says how many). Text is made when a communicator fails and
//! when it is dropped. A process that ends by `exit` writes nothing.
//!
//! # One clock
//! Ranks of one host share `CLOCK_MONOTONIC`. For each other host, the lowest rank requests the first traced rank's
//! time, several times over a link, when the communicator starts; the shortest round trip counts (F. Cristian,
//! "Probabilistic clock synchronization", 1989). Half of that round trip bounds the error; it is in the file. Clocks
//! that drift afterwards are not corrected.
//!
//! # One file
//! A JSON array, one event per line. Each rank appends its lines when it is done, under an advisory lock, in place of
//! the closing bracket: so the file is complete JSON whenever no rank writes, also when a rank dies without writing,
//! and what is left of a rank that dies while it writes can be read (the format allows a missing bracket; the next
//! writer cuts the broken line). No rank waits for another one at the end. The first traced rank starts the file with
//! the run's id. A rank that does not find that id under the same path has another file system: the lowest rank of its
//! host starts a file there; `jq -s add` joins the files of several hosts. A rank that shares with no other writes to
//! `run.json.rank3` and logs so. `%r` in the path stands for the rank: a file for each. A path that cannot be written
//! is an error when the communicator starts.

mod chrome;
mod clock;
mod event;
mod file;
mod recorder;
mod ring;
mod sink;
mod source;
mod tracer;

#[cfg(test)]
mod tests;

pub use clock::{ClockOffset, measure, now};
pub use event::{By, Call, Span};
pub(crate) use recorder::{Off, Probe, Recorder, StepDone};
pub(crate) use sink::{Run, Sink};
pub use tracer::{Tracer, recorded};
