//! Rendezvous: how the ranks of a new communicator find each other.
//!
//! The ranks of a communicator connect to one store. A process has one listener, which replies with the addresses of
//! a store to ranks that know its name.
//!
//! | file | idea |
//! | --- | --- |
//! | `join` | joining the ranks, by id or at a new store |
//! | `unique_id` | `ncclGetUniqueId`: new ids |
//! | `client` | requests to a listener |
//! | `listener` | the listener of a process |
//! | `directory` | the stores of this process |
//! | `protocol` | messages between client and listener |
//! | `id` | unique ids in 128 bytes |
//! | `address` | addresses in few bytes |
//! | `digest` | names and secrets |

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod digest;
pub(crate) mod directory;
pub(crate) mod id;
pub(crate) mod join;
pub(crate) mod listener;
pub(crate) mod protocol;
pub(crate) mod unique_id;
