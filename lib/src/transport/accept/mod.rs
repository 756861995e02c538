//! Connections of a dialer and an acceptor that prove to each other that they belong to the job.
//!
//! | file | idea |
//! | --- | --- |
//! | `handshake` | the messages and the proofs |
//! | `stream` | dialing a socket, and the streams of a link |
//! | `conn` | a connection that has proven itself, with what its hello said |

pub(crate) mod conn;
pub(crate) mod handshake;
pub(crate) mod stream;
