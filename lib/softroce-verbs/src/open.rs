//! Opening and closing a device: its table of calls.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use crate::context::Context;
use crate::device::Device;
use crate::named::Named;
use crate::tables::verbs_context;
use crate::types::*;
use crate::uses::Uses;
use crate::{cq, give, null, post, qp, query, srq, window};

const EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of ours.
    let ours = unsafe { &*device.cast::<Device>() };
    let inner = match ours.inner.open() {
        Ok(inner) => inner,
        Err(e) => return null(&e),
    };
    let ops = ibv_context_ops {
        _compat1: [None; 7],
        alloc_mw: Some(window::alloc),
        bind_mw: Some(post::bind),
        dealloc_mw: Some(window::dealloc),
        _compat2: None,
        poll_cq: Some(cq::poll),
        req_notify_cq: Some(cq::req_notify),
        _compat3: [None; 7],
        post_srq_recv: Some(srq::post_recv),
        _compat4: [None; 4],
        post_send: Some(post::post_send),
        post_recv: Some(post::post_recv),
        _compat5: [None; 5],
    };
    let base = verbs_context {
        query_port: Some(query::query_port_extended),
        before: [None; 23],
        query_rt_values: Some(query::query_rt_values),
        create_cq_ex: Some(cq::create_extended),
        private: std::ptr::null_mut(),
        query_device_ex: Some(query::query_device_extended),
        flows: [None; 4],
        open_qp: None,
        create_qp_ex: Some(qp::create_extended),
        get_srq_num: None,
        create_srq_ex: Some(srq::create_extended),
        open_xrcd: None,
        close_xrcd: None,
        placeholder: 0,
        size: size_of::<verbs_context>(),
        context: ibv_context {
            device,
            ops,
            cmd_fd: -1,
            async_fd: inner.async_fd().as_raw_fd(),
            num_comp_vectors: 1,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            abi_compat: EXTENDED,
        },
    };
    let uses = Uses::default();
    uses.add();
    let made = give(Context { base, inner, named: Named::default(), uses });
    // SAFETY: just made.
    unsafe { &raw mut (*made).base.context }
}

/// Closes a device. It succeeds while there are objects of it, as libibverbs has it: queue pairs do nothing more, and
/// what else is left can still be destroyed.
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: `open_device` made it; the program does not use it any more. Queue pairs that are named are live.
    unsafe {
        let ours = Context::of(context);
        if ours.is_inherited() {
            return 0;
        }
        for address in ours.named.qps() {
            qp::stop(std::ptr::with_exposed_provenance_mut(address));
        }
        Context::release(context);
    }
    0
}

pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

pub unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    // `IBV_FORK_UNNEEDED`: registered memory is memory of the process, nothing is pinned.
    2
}
