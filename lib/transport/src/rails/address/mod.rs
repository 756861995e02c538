//! Addresses of listeners, and the routes between two hosts. Nothing here opens a socket.
//!
//! | file | idea |
//! |---|---|
//! | `handle` | 128 bytes that name a listener: its addresses, its secret |
//! | `ports` | this host's addresses, and which pairs of two hosts' reach each other |
//! | `unresponsive` | routes that have not answered lately |

pub(super) mod handle;
pub(super) mod ports;
pub(super) mod unresponsive;
