//! Links between processes of one host: [`ring`](super::ring)s in a memfd.
//!
//! The dialer makes the memfd and passes it with its doorbell over the acceptor's Unix socket (abstract namespace: no file
//! anywhere, nothing to clean up after a kill). The acceptor answers with its own doorbell. The socket then stays open and
//! says nothing: when it hangs up, the other process is gone.
//!
//! Memory per link pair, shared by both processes: 2 pages at once, and `2 * (depth + 1) * max_message` as their payload room comes
//! into use (1.25 MiB with the defaults); two descriptors in each process.
//! Huge pages (`MADV_HUGEPAGE`) are not asked for: a link of default size is smaller than one.

mod connect;
mod listen;
mod socket;

pub(crate) use connect::{Dialed, connect};
pub(crate) use listen::{Pending, Port, accept, finish};
