//! Work requests, completions and events: the exchange between programs and the RDMA device.

pub(crate) mod completion;
pub(crate) mod cq;
pub(crate) mod event;
pub(crate) mod mailbox;
pub(crate) mod request;
pub(crate) mod srq;

pub use completion::{Status, Wc, WcOpcode};
pub use cq::{CompChannel, Cq};
pub use event::{Affected, AsyncEvent, EventKind};
pub use request::{Datagram, RecvRequest, Remote, SendFlags, SendOp, SendRequest, Sge};
pub use srq::Srq;
