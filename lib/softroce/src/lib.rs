//! A RoCEv2 RDMA device in user space: RDMA over UDP, without a kernel module, root or hardware.
//!
//! Each module uses those above it:
//!
//! | module | idea |
//! | --- | --- |
//! | [`error`](mod@error) | the one error type |
//! | [`counters`](counters()) | how many packets, repetitions and refusals |
//! | `fork` | descriptors that a forked child inherits |
//! | [`psn`] | packet sequence numbers |
//! | [`wire`] | the headers of a packet, one file each |
//! | [`memory`] | registered memory |
//! | [`path`], `gids` | addresses of ports |
//! | `interface`, `netlink` | the state of an interface, and its changes |
//! | [`queue`] | work requests, completions, events |
//! | [`qp`] | queue pairs: requester, completer, responder, free of I/O |
//! | `engine` | sockets, timers, a thread |
//! | [`context`], [`qpair`] | an open RDMA device and its objects, in the shape of verbs |
//! | [`device`] | the RDMA devices of this host |
//!
//! Variables: [`DEVICES_VARIABLE`], [`LOSS_VARIABLE`], [`DELAY_VARIABLE`], [`TRACE_VARIABLE`].

pub mod context;
mod counters;
pub mod device;
mod engine;
pub mod error;
mod fork;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gids;
mod interface;
pub mod memory;
mod netlink;
pub mod path;
pub mod psn;
pub mod qp;
pub mod qpair;
pub mod queue;
mod sync;
pub mod wire;

pub use context::{Context, LIMITS, Mr, Mw, Pd};
pub use counters::{Counters, counters};
pub use device::{DEVICES_VARIABLE, Device, PortInfo, PortState};
pub use engine::faults::{DELAY_VARIABLE, FLIP_VARIABLE, LOSS_VARIABLE, TRACE_VARIABLE};
pub use error::{Error, Result};
pub use memory::{Access, Bind, WindowKind};
pub use path::{Gid, Path};
pub use qp::{AttrMask, Capacity, QpAttr, State};
pub use qpair::{Qp, QpInit};
pub use queue::{
    Affected, AsyncEvent, CompChannel, Cq, Datagram, EventKind, RecvRequest, Remote, SendFlags, SendOp, SendRequest,
    Sge, Srq, Status, Wc, WcOpcode,
};
pub use wire::Service;
