//! A posted request of a send queue.

use std::sync::Arc;

use super::Parts;
use super::attr::QpAttr;
use crate::error::{Error, Result};
use crate::path::Path;
use crate::psn::Psn;
use crate::queue::request::{SendFlags, SendOp, SendRequest, SgeList};
use crate::queue::{Status, WcOpcode};
use crate::wire::Service;

/// The longest message (9.7.7: 2^31 bytes).
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// Location of a request's bytes.
#[derive(Debug)]
pub(super) enum Data {
    Memory(SgeList),
    Inline(Box<[u8]>),
}

/// A posted request.
#[derive(Debug)]
pub(super) struct SendWqe {
    pub(super) id: u64,
    pub(super) op: SendOp,
    pub(super) data: Data,
    /// Bytes of the message.
    pub(super) len: u32,
    pub(super) flags: SendFlags,
    /// Path, queue pair and key of a datagram's receiver; `None` for a connection.
    pub(super) to: Option<(Arc<Path>, u32, u32)>,
    /// Sequence numbers it takes: none where nothing is sent.
    pub(super) packets: u32,
    /// The first of them; none before the first packet is sent.
    pub(super) psn: Option<Psn>,
    /// Status of a request that cannot be sent, reported when it is the oldest; `None` for others.
    pub(super) failed: Option<Status>,
}

impl SendWqe {
    pub(super) fn new(parts: &Parts, attr: &QpAttr, request: &SendRequest<'_>) -> Result<SendWqe> {
        let SendRequest { id, op, sges, flags, to } = request;
        if sges.len() > parts.capacity.send_sges as usize {
            return Err(Error::invalid("more scatter-gather elements than the send queue was made for"));
        }
        let allowed = match parts.service {
            Service::Rc => true,
            Service::Uc => !matches!(
                op,
                SendOp::SendInv(_) | SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }
            ),
            Service::Ud => matches!(op, SendOp::Send | SendOp::SendImm(_)),
        };
        if !allowed {
            return Err(Error::invalid(format!("{:?} has no {op:?}", parts.service)));
        }
        if (parts.service == Service::Ud) != to.is_some() {
            return Err(Error::invalid("a datagram, and only a datagram, names its receiver"));
        }
        let local = matches!(op, SendOp::Bind(_) | SendOp::LocalInv(_));
        if local && !sges.is_empty() {
            return Err(Error::invalid("binding and invalidating move no bytes"));
        }
        let list = SgeList::new(sges);
        let total = list.len();
        if total > u64::from(MAX_MESSAGE) {
            return Err(Error::invalid("a message has 2^31 bytes at most"));
        }
        let atomic = matches!(op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        if atomic && total != 8 {
            return Err(Error::invalid("the result of an atomic operation takes 8 bytes"));
        }
        let inline = flags.inline && !atomic && !matches!(op, SendOp::Read(_));
        let data = if inline {
            if total > u64::from(parts.capacity.inline) {
                return Err(Error::full("more inline bytes than the send queue was made for"));
            }
            let mut bytes = Vec::with_capacity(total as usize);
            for sge in *sges {
                // SAFETY: the caller that posts an inline request promises that its elements are readable until the
                // call returns.
                bytes.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(
                        if sge.len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { sge.addr as *const u8 },
                        sge.len as usize,
                    )
                });
            }
            Data::Inline(bytes.into())
        } else {
            Data::Memory(list)
        };
        let len = total as u32;
        let packets = match parts.service {
            _ if local => 0,
            Service::Ud => 1,
            Service::Rc | Service::Uc => len.div_ceil(attr.path_mtu).max(1),
        };
        // A key with its top bit set stands for the sender's own (10.2.5).
        let key = |qkey: u32| if qkey >> 31 == 1 { attr.qkey } else { qkey };
        let to = to.as_ref().map(|to| (to.path.clone(), to.qpn, key(to.qkey)));
        Ok(SendWqe { id: *id, op: *op, data, len, flags: *flags, to, packets, psn: None, failed: None })
    }

    /// Returns true for a READ or an atomic operation, which has its own answer.
    pub(super) fn answered(&self) -> bool {
        matches!(self.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    pub(super) fn opcode(&self) -> WcOpcode {
        match self.op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => WcOpcode::Send,
            SendOp::Write(_) | SendOp::WriteImm(..) => WcOpcode::Write,
            SendOp::Read(_) => WcOpcode::Read,
            SendOp::CompareSwap { .. } => WcOpcode::CompareSwap,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
            SendOp::Bind(_) => WcOpcode::BindWindow,
            SendOp::LocalInv(_) => WcOpcode::LocalInv,
        }
    }
}
