//! Posting requests to a queue pair.

use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex};

use softroce::{Datagram, LIMITS, RecvRequest, Remote, SendFlags, SendOp, SendRequest, Service, Sge};

use crate::ah::Ah;
use crate::constants::*;
use crate::tables::ibv_qp_ex;
use crate::types::*;
use crate::{code, window};

/// A queue pair.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) base: ibv_qp_ex,
    pub(crate) inner: Arc<softroce::Qp>,
    pub(crate) batch: Mutex<Batch>,
}

/// A request in the making.
pub(crate) struct Pending {
    pub(crate) id: u64,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) sges: Vec<Sge>,
    /// Inline bytes; the element of it is made when the request is posted.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) to: Option<Datagram>,
    /// Reason why the request is not taken; none of the batch is posted then. `None` for a valid request.
    pub(crate) refused: Option<softroce::Error>,
}

/// The requests since `ibv_wr_start`.
#[derive(Default)]
pub(crate) struct Batch(pub(crate) Vec<Pending>);

/// The elements of a request.
///
/// # Safety
/// The program's list has `count` elements for as long as the result is used.
pub(crate) unsafe fn elements<'a>(list: *const ibv_sge, count: c_int) -> softroce::Result<&'a [Sge]> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // Of more than the device takes at most, none is read.
        Ok(count) if count <= LIMITS.sges as usize && !list.is_null() => {
            // SAFETY: by the caller; `Sge` is laid out as `ibv_sge`.
            Ok(unsafe { std::slice::from_raw_parts(list.cast(), count) })
        }
        _ => Err(invalid(format!("{count} scatter-gather elements at {list:p}"))),
    }
}

fn invalid(text: String) -> softroce::Error {
    softroce::Error::new(libc::EINVAL, text)
}

/// Bits of `ibv_send_flags`.
pub(crate) fn flags(bits: c_uint) -> SendFlags {
    let has = |flag: ibv_send_flags| bits & flag.0 != 0;
    SendFlags {
        fence: has(ibv_send_flags::IBV_SEND_FENCE),
        signaled: has(ibv_send_flags::IBV_SEND_SIGNALED),
        solicited: has(ibv_send_flags::IBV_SEND_SOLICITED),
        inline: has(ibv_send_flags::IBV_SEND_INLINE),
    }
}

/// A request of C as one of ours.
unsafe fn request<'a>(wr: &ibv_send_wr, service: Service) -> softroce::Result<SendRequest<'a>> {
    // SAFETY: the opcode names the part of the union that the program set.
    let (rdma, atomic, word) = unsafe { (wr.wr.rdma, wr.wr.atomic, wr.__bindgen_anon_1.imm_data) };
    let imm = word.to_ne_bytes();
    let remote = Remote { addr: rdma.remote_addr, rkey: rdma.rkey };
    let target = Remote { addr: atomic.remote_addr, rkey: atomic.rkey };
    let op = match wr.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_WRITE => SendOp::Write(remote),
        ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::WriteImm(remote, imm),
        ibv_wr_opcode::IBV_WR_SEND => SendOp::Send,
        ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => SendOp::SendImm(imm),
        ibv_wr_opcode::IBV_WR_RDMA_READ => SendOp::Read(remote),
        ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP => {
            SendOp::CompareSwap { remote: target, compare: atomic.compare_add, swap: atomic.swap }
        }
        ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => SendOp::FetchAdd { remote: target, add: atomic.compare_add },
        ibv_wr_opcode::IBV_WR_SEND_WITH_INV => SendOp::SendInv(word),
        ibv_wr_opcode::IBV_WR_LOCAL_INV => SendOp::LocalInv(word),
        ibv_wr_opcode::IBV_WR_BIND_MW => {
            // SAFETY: as above; the window and its region are ours.
            unsafe {
                let bind = wr.__bindgen_anon_2.bind_mw;
                window::request(bind.mw, bind.rkey, &bind.bind_info)
            }
        }
        other => return Err(invalid(format!("requests with opcode {other}"))),
    };
    // Other operations, which datagrams do not have, have something else in its bytes.
    let to = if service == Service::Ud && matches!(op, SendOp::Send | SendOp::SendImm(_)) {
        // SAFETY: a datagram names an address handle of ours.
        let (ud, handle) = unsafe { (wr.wr.ud, wr.wr.ud.ah.cast::<Ah>().as_ref()) };
        let handle = handle.ok_or_else(|| invalid("a datagram without an address handle".to_owned()))?;
        Some(Datagram { path: handle.path.clone(), qpn: ud.remote_qpn, qkey: ud.remote_qkey })
    } else {
        None
    };
    // SAFETY: the program's list.
    let sges = unsafe { elements(wr.sg_list, wr.num_sge) }?;
    Ok(SendRequest { id: wr.wr_id, op, sges, flags: flags(wr.send_flags), to })
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of ours, and the program's chain of requests.
    unsafe {
        let ours = &*qp.cast::<Qp>();
        let service = ours.inner.init().service;
        let mut chain = Vec::new();
        let mut wr = first;
        let mut refused = None;
        while let Some(next) = wr.as_ref() {
            match request(next, service) {
                // One alone, as most are, goes without a list.
                Ok(only) if wr == first && next.next.is_null() => {
                    return ours.inner.post_send(&[only]).map_or_else(
                        |(_, e)| {
                            *bad = first;
                            code(&e)
                        },
                        |()| 0,
                    );
                }
                Ok(request) => chain.push(request),
                Err(e) => {
                    refused = Some((wr, e));
                    break;
                }
            }
            wr = next.next;
        }
        if let Err((i, e)) = ours.inner.post_send(&chain) {
            *bad = (0..i).fold(first, |wr, _| (*wr).next);
            return code(&e);
        }
        match refused {
            Some((wr, e)) => {
                *bad = wr;
                code(&e)
            }
            None => 0,
        }
    }
}

/// Posts a chain of receives by `post`; names the first one that is refused.
///
/// # Safety
/// The program's chain, and its output.
pub(crate) unsafe fn receives(
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&RecvRequest<'_>) -> softroce::Result<()>,
) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        while let Some(request) = wr.as_ref() {
            let posted = elements(request.sg_list, request.num_sge)
                .and_then(|sges| post(&RecvRequest { id: request.wr_id, sges }));
            if let Err(e) = posted {
                *bad = wr;
                return code(&e);
            }
            wr = request.next;
        }
    }
    0
}

pub(crate) unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a queue pair of ours, and the program's chain of requests, whose memory stays until they complete.
    unsafe {
        let ours = &*qp.cast::<Qp>();
        receives(wr, bad, |request| ours.inner.post_recv(std::slice::from_ref(request)).map_err(|(_, e)| e))
    }
}

/// Binds a window of type 1, for which the program has its next key when this returns.
pub(crate) unsafe extern "C" fn bind(qp: *mut ibv_qp, mw: *mut ibv_mw, how: *mut ibv_mw_bind) -> c_int {
    // SAFETY: a queue pair, a window and a region of ours, and the program's output buffer.
    unsafe {
        let rkey = (*mw).rkey & !0xff | (*mw).rkey.wrapping_add(1) & 0xff;
        let op = window::request(mw, rkey, &(*how).bind_info);
        let flags = flags((*how).send_flags);
        let posted =
            (*qp.cast::<Qp>()).inner.post_send(&[SendRequest { id: (*how).wr_id, op, sges: &[], flags, to: None }]);
        if let Err((_, e)) = posted {
            return code(&e);
        }
        (*mw).rkey = rkey;
    }
    0
}
