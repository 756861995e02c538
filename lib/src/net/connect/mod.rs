//! Establishing of connections: dialing, accepting, and dialing again where a rail was lost.
//!
//! Both sides of the handshake use the messages and proofs of [`transport`](crate::transport). A connection is handed
//! over once all of its streams are authenticated.
//!
//! | file | idea |
//! |---|---|
//! | `dialer` | finds the routes to a handle, opens the streams and shakes hands, on a thread of its own |
//! | `acceptor` | one port for all listeners, and the thread that authenticates connections there |
//! | `redial` | new streams in the positions of lost ones |

pub(super) mod acceptor;
pub(super) mod dialer;
pub(super) mod redial;
