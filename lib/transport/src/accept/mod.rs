//! Connections of a dialer and an acceptor that prove to each other that they belong to the job.
//!
//! | file | idea |
//! | --- | --- |
//! | `acceptor` | the thread that authenticates all connections of its listeners, each within a bounded time |
//! | `link` | the hello of a link between ranks |
//! | `stream` | dialing a socket, and the streams of a link |
//! | `conn` | a connection as the accepting end sees it |
//! | `handshake` | the messages and the proofs |

pub(crate) mod acceptor;
pub(crate) mod conn;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub(crate) mod handshake;
pub(crate) mod link;
pub(crate) mod stream;
