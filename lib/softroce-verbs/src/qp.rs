//! Queue pairs: create, change, query, destroy.

use std::ffi::c_int;
use std::sync::Mutex;

use softroce::{Access, AttrMask, Capacity, QpAttr, QpInit, Service, State};

use crate::ah;
use crate::completion::Cq;
use crate::constants::*;
use crate::context::Context;
use crate::extended::ibv_qp_init_attr_ex;
use crate::memory::Pd;
use crate::named::PATIENCE;
use crate::post::Qp;
use crate::srq::Srq;
use crate::tables::ibv_qp_ex;
use crate::types::*;
use crate::{code, null, query, take, wr};

/// Capacities of a queue pair, with defaults for those that are 0: for inline bytes, the 64 that `ibv_send_wr` programs
/// take for granted.
fn capacity(cap: &ibv_qp_cap) -> Capacity {
    Capacity {
        sends: cap.max_send_wr.max(1),
        recvs: cap.max_recv_wr,
        send_sges: cap.max_send_sge.max(1),
        recv_sges: cap.max_recv_sge.max(1),
        inline: cap.max_inline_data.max(64),
    }
}

pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: objects of ours, or null where verbs allows it, and the program's attributes.
    let (ours, attr, send_cq, recv_cq, srq) = unsafe {
        let attr = &mut *init;
        let queue = |cq: *mut ibv_cq| cq.cast::<Cq>().as_ref();
        (Pd::of(pd), &mut *init, queue(attr.send_cq), queue(attr.recv_cq), attr.srq.cast::<Srq>().as_ref())
    };
    let service = match attr.qp_type {
        ibv_qp_type::IBV_QPT_RC => Service::Rc,
        ibv_qp_type::IBV_QPT_UC => Service::Uc,
        ibv_qp_type::IBV_QPT_UD => Service::Ud,
        other => return null(&softroce::Error::new(libc::EOPNOTSUPP, format!("queue pairs of type {other}"))),
    };
    let (Some(send_cq), Some(recv_cq)) = (send_cq, recv_cq) else {
        return null(&softroce::Error::new(libc::EINVAL, "a queue pair without completion queues"));
    };
    let capacity = capacity(&attr.cap);
    let init = QpInit {
        service,
        capacity,
        signal_all: attr.sq_sig_all != 0,
        send_cq: send_cq.inner.clone(),
        recv_cq: recv_cq.inner.clone(),
        srq: srq.map(|srq| srq.inner.clone()),
    };
    let inner = match ours.inner.create_qp(&init) {
        Ok(inner) => inner,
        Err(e) => return null(&e),
    };
    for uses in [&ours.uses, &send_cq.uses, &recv_cq.uses].into_iter().chain(srq.map(|srq| &srq.uses)) {
        uses.add();
    }
    attr.cap = ibv_qp_cap {
        max_send_wr: capacity.sends,
        max_recv_wr: capacity.recvs,
        max_send_sge: capacity.send_sges,
        max_recv_sge: capacity.recv_sges,
        max_inline_data: capacity.inline,
    };
    // SAFETY: a domain of ours.
    let context = unsafe { (*pd).context };
    let qpn = inner.number();
    let base = ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: qpn,
        qp_num: qpn,
        state: State::Reset as ibv_qp_state::Type,
        qp_type: attr.qp_type,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    let made: *mut ibv_qp = crate::give(Qp { base: wr::table(base), inner, batch: Mutex::default() }).cast();
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    context.named.add_qp(qpn, made as usize);
    made
}

/// Requests of the extended interface that a type of queue pair takes.
fn send_ops(qp_type: ibv_qp_type::Type) -> u32 {
    let datagram = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let windows = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    let unreliable = datagram | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | windows;
    match qp_type {
        ibv_qp_type::IBV_QPT_UD => datagram,
        ibv_qp_type::IBV_QPT_UC => unreliable,
        _ => {
            let atomic = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
            unreliable | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_RDMA_READ | atomic
        }
    }
}

pub(crate) unsafe extern "C" fn create_extended(
    _context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: the program's attributes.
    unsafe {
        let mask = (*init).comp_mask;
        let has = |bit: u32| mask & bit != 0;
        if !has(IBV_QP_INIT_ATTR_PD) || (*init).pd.is_null() {
            return null(&softroce::Error::new(libc::EINVAL, "a queue pair without protection domain"));
        }
        let known = IBV_QP_INIT_ATTR_PD
            | IBV_QP_INIT_ATTR_CREATE_FLAGS
            | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
            | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        let ops = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) { (*init).send_ops_flags } else { 0 };
        let refused = mask & !known != 0
            || (has(IBV_QP_INIT_ATTR_CREATE_FLAGS) && (*init).create_flags != 0)
            || (has(IBV_QP_INIT_ATTR_MAX_TSO_HEADER) && (*init).max_tso_header != 0)
            || ops & !u64::from(send_ops((*init).qp_type)) != 0;
        if refused {
            let text = format!("queue pairs of type {} with mask {mask:#x}, requests {ops:#x}", (*init).qp_type);
            return null(&softroce::Error::new(libc::EOPNOTSUPP, text));
        }
        // It begins as the other form does.
        ibv_create_qp((*init).pd, init.cast())
    }
}

pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    qp.cast()
}

pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: `create` made it; where the call succeeds the program does not use it any more. What it is made of is
    // not destroyed before it.
    unsafe {
        let context = Context::of((*qp).context);
        if context.is_inherited() {
            return 0;
        }
        if !context.named.remove(qp as usize, PATIENCE) {
            return libc::EBUSY;
        }
        let ibv_qp { pd, send_cq, recv_cq, srq, .. } = *qp;
        drop(take::<Qp, _>(qp));
        (*send_cq.cast::<Cq>()).uses.release();
        (*recv_cq.cast::<Cq>()).uses.release();
        if let Some(srq) = srq.cast::<Srq>().as_ref() {
            srq.uses.release();
        }
        Pd::of(pd).uses.release();
    }
    0
}

/// Stops a queue pair whose device is closed: it sends, receives and completes nothing more.
///
/// # Safety
/// A queue pair of ours.
pub(crate) unsafe fn stop(qp: *mut ibv_qp) {
    // SAFETY: by the caller. Every state has a transition to RESET.
    let _ = unsafe { &*qp.cast::<Qp>() }.inner.modify(&QpAttr::default(), AttrMask::STATE);
}

fn state(code: ibv_qp_state::Type) -> Option<State> {
    [State::Reset, State::Init, State::Rtr, State::Rts, State::Sqd, State::Sqe, State::Err].get(code as usize).copied()
}

fn attributes(qp: &Qp, attr: &ibv_qp_attr, mask: AttrMask) -> softroce::Result<QpAttr> {
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
    to.path_mtu = 1u32.checked_shl(attr.path_mtu.min(20) + 7).unwrap_or(0);
    to.sqd_notify = attr.en_sqd_async_notify != 0;
    to.access = Access::from_bits(attr.qp_access_flags);
    (to.pkey_index, to.port, to.qkey) = (attr.pkey_index, attr.port_num, attr.qkey);
    (to.timeout, to.retry_cnt, to.rnr_retry) = (attr.timeout, attr.retry_cnt, attr.rnr_retry);
    (to.rq_psn, to.sq_psn, to.dest_qpn) = (attr.rq_psn, attr.sq_psn, attr.dest_qp_num);
    (to.max_rd_atomic, to.max_dest_rd_atomic) = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
    to.min_rnr_timer = attr.min_rnr_timer;
    Ok(to)
}

pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a queue pair of ours, and the program's attributes.
    let (ours, attr) = unsafe { (&*qp.cast::<Qp>(), &*attr) };
    let mask = AttrMask(mask as u32);
    match attributes(ours, attr, mask).and_then(|to| ours.inner.modify(&to, mask)) {
        Ok(()) => {
            // SAFETY: the program's field of the queue pair, which only this call writes.
            unsafe { (*qp).state = ours.inner.query().state as ibv_qp_state::Type };
            0
        }
        Err(e) => code(&e),
    }
}

pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    to: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a queue pair of ours.
    let ours = unsafe { &*qp.cast::<Qp>() };
    let attr = ours.inner.query();
    let Capacity { sends, recvs, send_sges, recv_sges, inline } = ours.inner.init().capacity;
    let cap = ibv_qp_cap {
        max_send_wr: sends,
        max_recv_wr: recvs,
        max_send_sge: send_sges,
        max_recv_sge: recv_sges,
        max_inline_data: inline,
    };
    // SAFETY: all zeros are attributes; the program's output buffers.
    unsafe {
        let mut all: ibv_qp_attr = std::mem::zeroed();
        all.qp_state = attr.state as ibv_qp_state::Type;
        all.cur_qp_state = attr.state as ibv_qp_state::Type;
        all.path_mtu = query::mtu_code(attr.path_mtu);
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
            init.write(ibv_qp_init_attr {
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
