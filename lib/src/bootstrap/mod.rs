//! The control plane: ranks find each other through it, and learn of each other's fate.
//!
//! One process (rank 0, or the launcher) runs the rendezvous [`Server`]; every rank holds one [`Session`] with it, a
//! TCP connection that lives as long as the job. Everything that must reach all goes through this star: registration,
//! the table of the ranks' endpoints, small exchanges of values, heartbeats with each rank's progress, and the events
//! that a rank is lost, has left, or aborts. Collectives never use it.
//!
//! ```text
//!   rank 1 ──┐  hello (fixed binary) · proof · register {host}         one thread, one poll loop,
//!   rank 2 ──┼────────────────────────────────────────────▶ Server     finite deadlines, bounded buffers
//!   rank 3 ──┘  ◀── table of all ranks · lost · left · abort · values
//! ```
//!
//! A connection that closes without a goodbye is how `kill -9` of a rank shows: the kernel closes it for the dead
//! process, and the store notifies all ranks at once. A connection whose path fails goes on over another (`resume.rs`).
//!
//! Only clients that know the job's secret are admitted (`admission.rs`). Messages after that travel in clear and
//! unsigned: an attacker on the path can read and change them. Run on a network that you trust, as with NCCL and Gloo.

mod admission;
mod calls;
mod comms;
mod connection;
mod detect;
mod event;
mod frame;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub mod host;
pub mod interface;
mod join;
mod local_meeting;
mod mailbox;
mod message;
mod monitor;
mod progress;
mod rendezvous;
mod resume;
pub mod server;
pub mod session;
mod store;
pub mod unique_id;

#[cfg(test)]
mod tests;

pub(crate) use admission::join_secret as job_secret;
pub(crate) use calls::{Digests, first_difference, is_later};
pub use calls::{Disagreement, Made};
pub(crate) use connection::unacknowledged;
pub(crate) use detect::OF_TORCHRUN;
pub use detect::is_rank;
pub use event::Event;
pub use host::Host;
pub use progress::{Health, Progress, RankState, Snapshot};
pub(crate) use rendezvous::from_lookup as rendezvous_from;
pub use rendezvous::{Rendezvous, rendezvous_from_env};
pub use server::{Observer, Server};
pub use session::Session;
pub(crate) use store::HOSTS_STORE;
pub use store::Standing;
pub use unique_id::UniqueId;
