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
//! process, and the store notifies all ranks at once. A connection whose path fails goes on over
//! another (`client/resume.rs`).
//!
//! Only clients that know the job's secret are admitted (`wire/admission.rs`). Messages after that travel in clear and
//! unsigned: an attacker on the path can read and change them. Run on a network that you trust, as with NCCL and Gloo.
//!
//! | module | idea |
//! | --- | --- |
//! | `client` | a rank: joining, its session, news of the others |
//! | `server` | the store: admission, clients, values, and events |
//! | `environment` | this host, and this process's place in the job |
//! | `wire` | admission, frames and messages between the two |
//! | `ledger` | calls that ranks have made, compared |

mod client;
mod environment;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod ledger;
pub mod server;
mod wire;

#[cfg(test)]
mod tests;

pub use client::session;
pub use environment::{host, interface};
pub use wire::unique_id;

#[doc(hidden)]
pub use client::rendezvous::from_lookup as rendezvous_from;
pub use client::rendezvous::{Rendezvous, rendezvous_from_env};
pub use client::session::Session;
#[doc(hidden)]
pub use environment::detect::OF_TORCHRUN;
pub use environment::detect::is_rank;
pub use environment::host::Host;
#[doc(hidden)]
pub use ledger::calls::{Digests, first_difference, is_later};
pub use ledger::calls::{Disagreement, Made};
#[doc(hidden)]
pub use ledger::messages::Message;
#[doc(hidden)]
pub use ledger::progress::Change;
pub use ledger::progress::{Health, Progress, Quiet, RankState, Snapshot};
#[doc(hidden)]
pub use ledger::ring::{RECORDED, Recorded, Ring};
#[doc(hidden)]
pub use server::store::HOSTS_STORE;
pub use server::store::Standing;
pub use server::{Observer, Server};
pub(crate) use wire::admission::{given_secret, join_secret as job_secret};
pub(crate) use wire::connection::unacknowledged;
pub use wire::event::Event;
pub use wire::unique_id::UniqueId;
