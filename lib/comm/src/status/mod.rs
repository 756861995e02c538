//! A running job, seen from outside: each process answers at a Unix socket, and a reader puts the answers together.
//!
//! A process that has a communicator, or waits for one, listens in its user's folder (`TINYNCCL_STATUS`). The calls
//! leave there what they leave for the heartbeats anyway; a report reads it. Of ranks that give no report, the
//! rendezvous store tells what their heartbeats said last. A record has the last calls of a rank, and is written when
//! somebody asks for it, and where `TINYNCCL_DUMP` names a folder also at a failure and at SIGUSR1.
//!
//! | module | idea |
//! | --- | --- |
//! | `text` | the communicators and the findings, for people |
//! | `findings` | which rank the others wait for |
//! | `view` | the reports of all processes, as communicators with their ranks |
//! | `ask` | asks the processes of this host |
//! | `registry` | the report of this process, and its records |
//! | `serve` | the thread that answers |
//! | `record` | the last calls of a rank, in a file |
//! | `member` | what a process tells of one communicator |
//! | `place` | the folder and its sockets |
//! | `report` | the format |

pub mod ask;
mod findings;
mod member;
pub mod place;
pub mod record;
mod registry;
pub mod report;
mod serve;
pub mod text;
pub mod view;

pub use findings::{Finding, findings};
pub(crate) use registry::{Listed, Starting};

/// Returns the report of this process, without a question to any other.
pub fn here() -> report::Report {
    registry::report(false)
}
