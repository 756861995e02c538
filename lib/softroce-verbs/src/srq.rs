//! Shared receive queues.

use std::ffi::c_int;
use std::sync::Arc;

use crate::constants::{IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_LIMIT, IBV_SRQT_BASIC};
use crate::context::Context;
use crate::extended::ibv_srq_init_attr_ex;
use crate::memory::Pd;
use crate::named::PATIENCE;
use crate::post::receives;
use crate::types::{ibv_context, ibv_pd, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr};
use crate::uses::Uses;
use crate::{code, null, take};

/// A shared receive queue.
#[repr(C)]
pub(crate) struct Srq {
    base: ibv_srq,
    pub(crate) inner: Arc<softroce::Srq>,
    /// Queue pairs that take their receives from it.
    pub(crate) uses: Uses,
}

unsafe fn create_from(pd: *mut ibv_pd, srq_context: *mut std::ffi::c_void, attr: &ibv_srq_attr) -> *mut ibv_srq {
    // SAFETY: a domain of ours.
    let (ours, context) = unsafe { (Pd::of(pd), (*pd).context) };
    let place = Box::<Srq>::new_uninit();
    let cookie = place.as_ptr() as u64;
    match ours.inner.create_srq(attr.max_wr as usize, attr.max_sge.max(1) as usize, cookie) {
        Ok(inner) => {
            let base = ibv_srq {
                context,
                srq_context,
                pd,
                handle: 0,
                mutex: libc::PTHREAD_MUTEX_INITIALIZER,
                cond: libc::PTHREAD_COND_INITIALIZER,
                events_completed: 0,
            };
            let made = Box::into_raw(Box::write(place, Srq { base, inner, uses: Uses::default() }));
            ours.uses.add();
            // SAFETY: an open context.
            unsafe { Context::of(context) }.named.add(made as usize);
            made.cast()
        }
        Err(e) => null(&e),
    }
}

pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the program's attributes.
    unsafe { create_from(pd, (*init).srq_context, &(*init).attr) }
}

pub(crate) unsafe extern "C" fn create_extended(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: the program's attributes.
    let init = unsafe { &*init };
    if init.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && init.srq_type != IBV_SRQT_BASIC {
        return null(&softroce::Error::new(libc::EOPNOTSUPP, "shared receive queues are basic ones alone"));
    }
    // SAFETY: as the caller promises.
    unsafe { create_from(init.pd, init.srq_context, &init.attr) }
}

pub unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    if mask & !(IBV_SRQ_LIMIT as c_int) != 0 {
        return libc::EINVAL;
    }
    // SAFETY: a queue of ours, and the program's attributes.
    let result = unsafe { (*srq.cast::<Srq>()).inner.set_limit((*attr).srq_limit as usize) };
    result.map_or_else(|e| code(&e), |()| 0)
}

pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: a queue of ours, and the program's output buffer.
    unsafe {
        let (max_wr, max_sge, limit) = (*srq.cast::<Srq>()).inner.query();
        attr.write(ibv_srq_attr { max_wr: max_wr as u32, max_sge: max_sge as u32, srq_limit: limit as u32 });
    }
    0
}

pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: `create` made it; where the call succeeds the program does not use it any more.
    unsafe {
        let context = Context::of((*srq).context);
        if context.is_inherited() {
            return 0;
        }
        if let Err(busy) = (*srq.cast::<Srq>()).uses.check("a shared receive queue", "queue pairs") {
            return busy;
        }
        if !context.named.remove(srq as usize, PATIENCE) {
            return libc::EBUSY;
        }
        let pd = (*srq).pd;
        drop(take::<Srq, _>(srq));
        Pd::of(pd).uses.release();
    }
    0
}

pub(crate) unsafe extern "C" fn post_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue of ours, and the program's chain of requests, whose memory stays until they complete.
    unsafe {
        let ours = &*srq.cast::<Srq>();
        receives(wr, bad, |request| ours.inner.post_recv(request))
    }
}
