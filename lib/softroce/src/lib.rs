//! A RoCEv2 network card in user space: RDMA over UDP, without a kernel module, root or hardware.
//!
//! Each module uses those above it:
//!
//! | module | idea |
//! | --- | --- |
//! | [`error`](mod@error) | the one error type |
//! | [`psn`] | packet sequence numbers |
//! | [`wire`] | the headers of a packet, one file each |
//! | [`memory`] | registered memory |
//! | [`path`] | addresses of ports |
//! | [`queue`] | work requests, completions, events |
//! | [`qp`] | queue pairs: requester, completer, responder, free of I/O |

pub mod error;
pub mod memory;
pub mod path;
pub mod psn;
pub mod qp;
pub mod queue;
mod sync;
pub mod wire;

pub use error::{Error, Result};
pub use queue::EventKind;
