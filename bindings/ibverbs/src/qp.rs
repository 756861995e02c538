//! Queue pairs: made, changed, asked, posted to.

use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex, PoisonError};

use softroce::{
    Access, AttrMask, Capacity, Datagram, QpAttr, QpInit, RecvRequest, Remote, SendFlags, SendOp, SendRequest, Service,
    Sge, State,
};

use crate::ah::{self, Ah};
use crate::context::Context;
use crate::cq::Cq;
use crate::memory::Pd;
use crate::srq::Srq;
use crate::wr::{self, Batch};
use crate::{abi, code, null, take};

/// A queue pair.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) base: abi::QpEx,
    pub(crate) inner: Arc<softroce::Qp>,
    pub(crate) batch: Mutex<Batch>,
}

/// Kinds of `ibv_qp_type`.
const RC: c_int = 2;
const UC: c_int = 3;
const UD: c_int = 4;

/// Capacities where a program asks for none: of inline bytes, what `ibv_send_wr` programs take for granted.
fn capacity(cap: &abi::QpCap) -> Capacity {
    Capacity {
        sends: cap.max_send_wr.max(1),
        recvs: cap.max_recv_wr,
        send_sges: cap.max_send_sge.max(1),
        recv_sges: cap.max_recv_sge.max(1),
        inline: cap.max_inline_data.max(64),
    }
}

pub(crate) unsafe extern "C" fn create(pd: *mut abi::Pd, init: *mut abi::QpInitAttr) -> *mut abi::Qp {
    // SAFETY: objects of ours, or null where verbs allows it, and the program's attributes.
    let (ours, attr, send_cq, recv_cq, srq) = unsafe {
        let attr = &mut *init;
        let queue = |cq: *mut abi::Cq| cq.cast::<Cq>().as_ref().map(|cq| cq.inner.clone());
        let srq = attr.srq.cast::<Srq>().as_ref().map(|srq| srq.inner.clone());
        (&*pd.cast::<Pd>(), &mut *init, queue(attr.send_cq), queue(attr.recv_cq), srq)
    };
    let service = match attr.qp_type {
        RC => Service::Rc,
        UC => Service::Uc,
        UD => Service::Ud,
        other => return null(&softroce::Error::new(libc::EOPNOTSUPP, format!("queue pairs of type {other}"))),
    };
    let (Some(send_cq), Some(recv_cq)) = (send_cq, recv_cq) else {
        return null(&softroce::Error::new(libc::EINVAL, "a queue pair without completion queues"));
    };
    let capacity = capacity(&attr.cap);
    let init = QpInit { service, capacity, signal_all: attr.sq_sig_all != 0, send_cq, recv_cq, srq };
    let inner = match ours.inner.create_qp(&init) {
        Ok(inner) => inner,
        Err(e) => return null(&e),
    };
    attr.cap = abi::QpCap {
        max_send_wr: capacity.sends,
        max_recv_wr: capacity.recvs,
        max_send_sge: capacity.send_sges,
        max_recv_sge: capacity.recv_sges,
        max_inline_data: capacity.inline,
    };
    // SAFETY: a domain of ours.
    let context = unsafe { (*pd).context };
    let qpn = inner.number();
    let base = abi::Qp {
        context,
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: qpn,
        qp_num: qpn,
        state: State::Reset as c_int,
        qp_type: attr.qp_type,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    let made: *mut abi::Qp = crate::give(Qp { base: wr::table(base), inner, batch: Mutex::default() }).cast();
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    context.qps.lock().unwrap_or_else(PoisonError::into_inner).insert(qpn, made as usize);
    made
}

/// Bit of `ibv_qp_init_attr_mask`: the domain is among the attributes.
const HAS_PD: u32 = 1;

pub(crate) unsafe extern "C" fn create_extended(
    _context: *mut abi::Context,
    init: *mut abi::QpInitAttrEx,
) -> *mut abi::Qp {
    // SAFETY: the program's attributes.
    unsafe {
        if (*init).comp_mask & HAS_PD == 0 || (*init).pd.is_null() {
            return null(&softroce::Error::new(libc::EINVAL, "a queue pair without protection domain"));
        }
        create((*init).pd, &raw mut (*init).base)
    }
}

pub(crate) unsafe extern "C" fn to_extended(qp: *mut abi::Qp) -> *mut abi::QpEx {
    qp.cast()
}

pub(crate) unsafe extern "C" fn destroy(qp: *mut abi::Qp) -> c_int {
    // SAFETY: `create` made it; the program does not use it any more.
    unsafe {
        let context = Context::of((*qp).context);
        context.qps.lock().unwrap_or_else(PoisonError::into_inner).remove(&(*qp).qp_num);
        drop(take::<Qp, _>(qp));
    }
    0
}

fn state(code: c_int) -> Option<State> {
    [State::Reset, State::Init, State::Rtr, State::Rts, State::Sqd, State::Sqe, State::Err]
        .get(usize::try_from(code).ok()?)
        .copied()
}

fn attributes(qp: &Qp, attr: &abi::QpAttr, mask: AttrMask) -> softroce::Result<QpAttr> {
    let unknown = || softroce::Error::new(libc::EINVAL, "an unknown state");
    let mut to = QpAttr::default();
    if mask.contains(AttrMask::STATE) {
        to.state = state(attr.qp_state).ok_or_else(unknown)?;
    }
    if mask.contains(AttrMask::CUR_STATE) {
        to.cur_state = state(attr.cur_qp_state).ok_or_else(unknown)?;
    }
    if mask.contains(AttrMask::PATH) {
        to.path = Some(ah::path(qp.inner.pd().context(), &attr.ah_attr)?);
    }
    to.path_mtu = 1u32.checked_shl(attr.path_mtu.clamp(0, 20) as u32 + 7).unwrap_or(0);
    to.sqd_notify = attr.en_sqd_async_notify != 0;
    to.access = Access::from_bits(attr.qp_access_flags);
    (to.pkey_index, to.port, to.qkey) = (attr.pkey_index, attr.port_num, attr.qkey);
    (to.timeout, to.retry_cnt, to.rnr_retry) = (attr.timeout, attr.retry_cnt, attr.rnr_retry);
    (to.rq_psn, to.sq_psn, to.dest_qpn) = (attr.rq_psn, attr.sq_psn, attr.dest_qp_num);
    (to.max_rd_atomic, to.max_dest_rd_atomic) = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
    to.min_rnr_timer = attr.min_rnr_timer;
    Ok(to)
}

pub(crate) unsafe extern "C" fn modify(qp: *mut abi::Qp, attr: *mut abi::QpAttr, mask: c_int) -> c_int {
    // SAFETY: a queue pair of ours, and the program's attributes.
    let (ours, attr) = unsafe { (&*qp.cast::<Qp>(), &*attr) };
    let mask = AttrMask(mask as u32);
    match attributes(ours, attr, mask).and_then(|to| ours.inner.modify(&to, mask)) {
        Ok(()) => {
            // SAFETY: the program's field of the queue pair, which only this call writes.
            unsafe { (*qp).state = ours.inner.query().state as c_int };
            0
        }
        Err(e) => code(&e),
    }
}

pub(crate) unsafe extern "C" fn query(
    qp: *mut abi::Qp,
    to: *mut abi::QpAttr,
    _mask: c_int,
    init: *mut abi::QpInitAttr,
) -> c_int {
    // SAFETY: a queue pair of ours.
    let ours = unsafe { &*qp.cast::<Qp>() };
    let attr = ours.inner.query();
    let Capacity { sends, recvs, send_sges, recv_sges, inline } = ours.inner.init().capacity;
    let cap = abi::QpCap {
        max_send_wr: sends,
        max_recv_wr: recvs,
        max_send_sge: send_sges,
        max_recv_sge: recv_sges,
        max_inline_data: inline,
    };
    // SAFETY: all zeros are attributes; the program's places.
    unsafe {
        let mut all: abi::QpAttr = std::mem::zeroed();
        all.qp_state = attr.state as c_int;
        all.cur_qp_state = attr.state as c_int;
        all.path_mtu = crate::context::mtu_code(attr.path_mtu);
        (all.qkey, all.rq_psn, all.sq_psn) = (attr.qkey, attr.rq_psn, attr.sq_psn);
        (all.dest_qp_num, all.qp_access_flags, all.cap) = (attr.dest_qpn, attr.access.bits(), cap);
        if let Some(path) = &attr.path {
            all.ah_attr = ah::attribute(path);
        }
        (all.max_rd_atomic, all.max_dest_rd_atomic) = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
        (all.min_rnr_timer, all.port_num, all.timeout) = (attr.min_rnr_timer, attr.port, attr.timeout);
        (all.retry_cnt, all.rnr_retry) = (attr.retry_cnt, attr.rnr_retry);
        to.write(all);
        if !init.is_null() {
            init.write(abi::QpInitAttr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap,
                qp_type: (*qp).qp_type,
                sq_sig_all: c_int::from(ours.inner.init().signal_all),
            });
        }
    }
    0
}

/// The elements of a request.
///
/// # Safety
/// The program's list is as long as it says for as long as the result is used.
pub(crate) unsafe fn elements<'a>(list: *const Sge, count: c_int) -> &'a [Sge] {
    if list.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: by the caller; `Sge` is laid out as `ibv_sge`.
    unsafe { std::slice::from_raw_parts(list, count as usize) }
}

/// Bits of `ibv_send_flags`.
pub(crate) fn flags(bits: c_uint) -> SendFlags {
    SendFlags { fence: bits & 1 != 0, signaled: bits & 2 != 0, solicited: bits & 4 != 0, inline: bits & 8 != 0 }
}

/// A request of C as one of ours.
unsafe fn request<'a>(wr: &abi::SendWr, service: Service) -> Option<SendRequest<'a>> {
    let imm = wr.imm_data.to_ne_bytes();
    // SAFETY: the opcode says which part of the union the program set.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let remote = Remote { addr: rdma.remote_addr, rkey: rdma.rkey };
    let word = Remote { addr: atomic.remote_addr, rkey: atomic.rkey };
    let op = match wr.opcode {
        0 => SendOp::Write(remote),
        1 => SendOp::WriteImm(remote, imm),
        2 => SendOp::Send,
        3 => SendOp::SendImm(imm),
        4 => SendOp::Read(remote),
        5 => SendOp::CompareSwap { remote: word, compare: atomic.compare_add, swap: atomic.swap },
        6 => SendOp::FetchAdd { remote: word, add: atomic.compare_add },
        9 => SendOp::SendInv(wr.imm_data),
        _ => return None,
    };
    let to = if service == Service::Ud {
        // SAFETY: a datagram names an address handle of ours.
        let (ud, handle) = unsafe { (wr.wr.ud, wr.wr.ud.ah.cast::<Ah>().as_ref()?) };
        Some(Datagram { path: handle.path.clone(), qpn: ud.remote_qpn, qkey: ud.remote_qkey })
    } else {
        None
    };
    // SAFETY: the program's list.
    let sges = unsafe { elements(wr.sg_list, wr.num_sge) };
    Some(SendRequest { id: wr.wr_id, op, sges, flags: flags(wr.send_flags), to })
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut abi::Qp,
    first: *mut abi::SendWr,
    bad: *mut *mut abi::SendWr,
) -> c_int {
    // SAFETY: a queue pair of ours, and the program's chain of requests.
    unsafe {
        let ours = &*qp.cast::<Qp>();
        let service = ours.inner.init().service;
        let mut chain = Vec::new();
        let mut wr = first;
        let mut unknown = None;
        while let Some(next) = wr.as_ref() {
            match request(next, service) {
                // One alone, as most are, goes without a list.
                Some(only) if wr == first && next.next.is_null() => {
                    return ours.inner.post_send(&[only]).map_or_else(
                        |(_, e)| {
                            *bad = first;
                            code(&e)
                        },
                        |()| 0,
                    );
                }
                Some(request) => chain.push(request),
                None => {
                    unknown = Some(wr);
                    break;
                }
            }
            wr = next.next;
        }
        if let Err((i, e)) = ours.inner.post_send(&chain) {
            *bad = (0..i).fold(first, |wr, _| (*wr).next);
            return code(&e);
        }
        match unknown {
            Some(wr) => {
                *bad = wr;
                code(&softroce::Error::new(libc::EINVAL, format!("requests with opcode {}", (*wr).opcode)))
            }
            None => 0,
        }
    }
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut abi::Qp,
    mut wr: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    // SAFETY: a queue pair of ours, and the program's chain of requests.
    unsafe {
        let ours = &*qp.cast::<Qp>();
        while let Some(request) = wr.as_ref() {
            let sges = elements(request.sg_list, request.num_sge);
            if let Err((_, e)) = ours.inner.post_recv(&[RecvRequest { id: request.wr_id, sges }]) {
                *bad = wr;
                return code(&e);
            }
            wr = request.next;
        }
    }
    0
}
