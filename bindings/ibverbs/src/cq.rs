//! Completion channels and queues.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use softroce::Wc;

use crate::context::Context;
use crate::{abi, give, null, set_errno, take};

/// A completion channel.
#[repr(C)]
struct CompChannel {
    base: abi::CompChannel,
    inner: Arc<softroce::CompChannel>,
}

/// A completion queue.
#[repr(C)]
pub(crate) struct Cq {
    base: abi::Cq,
    pub(crate) inner: Arc<softroce::Cq>,
}

pub(crate) unsafe extern "C" fn create_comp_channel(context: *mut abi::Context) -> *mut abi::CompChannel {
    match softroce::CompChannel::new() {
        Ok(inner) => {
            let fd = inner.fd().as_raw_fd();
            give(CompChannel { base: abi::CompChannel { context, fd, refcnt: 0 }, inner }).cast()
        }
        Err(e) => null(&e),
    }
}

pub(crate) unsafe extern "C" fn destroy_comp_channel(channel: *mut abi::CompChannel) -> c_int {
    // SAFETY: `create_comp_channel` made it; the program does not use it any more.
    drop(unsafe { take::<CompChannel, _>(channel) });
    0
}

pub(crate) unsafe extern "C" fn create_cq(
    context: *mut abi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::CompChannel,
    vector: c_int,
) -> *mut abi::Cq {
    if vector != 0 {
        return null(&softroce::Error::new(libc::EINVAL, "there is completion vector 0 alone"));
    }
    let base = abi::Cq {
        context,
        channel,
        cq_context,
        handle: 0,
        cqe,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        comp_events_completed: 0,
        async_events_completed: 0,
    };
    // The queue's cookie is its address, which is known first.
    let place = Box::<Cq>::new_uninit();
    let cookie = place.as_ptr() as u64;
    // SAFETY: a channel of ours, if there is one, and an open context.
    let made = unsafe {
        let channel = channel.cast::<CompChannel>().as_ref().map(|c| c.inner.clone());
        Context::of(context).inner.create_cq(cqe.max(0) as usize, cookie, channel)
    };
    match made {
        Ok(inner) => Box::into_raw(Box::write(place, Cq { base, inner })).cast(),
        Err(e) => null(&e),
    }
}

pub(crate) unsafe extern "C" fn resize_cq(cq: *mut abi::Cq, cqe: c_int) -> c_int {
    // SAFETY: a queue of ours.
    let ours = unsafe { &mut *cq.cast::<Cq>() };
    ours.inner.resize(cqe.max(1) as usize);
    ours.base.cqe = cqe;
    0
}

pub(crate) unsafe extern "C" fn destroy_cq(cq: *mut abi::Cq) -> c_int {
    // SAFETY: `create_cq` made it; the program does not use it any more.
    let ours = unsafe { take::<Cq, _>(cq) };
    if let Some(channel) = ours.inner.channel() {
        channel.forget(ours.inner.cookie());
    }
    0
}

pub(crate) unsafe extern "C" fn get_cq_event(
    channel: *mut abi::CompChannel,
    cq: *mut *mut abi::Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel of ours; the cookie is the address of a queue that is not destroyed, as those forget theirs.
    unsafe {
        match (*channel.cast::<CompChannel>()).inner.get_event() {
            Ok(cookie) => {
                let which = std::ptr::with_exposed_provenance_mut::<abi::Cq>(cookie as usize);
                *cq = which;
                *cq_context = (*which).cq_context;
                0
            }
            Err(e) => {
                set_errno(e.errno());
                -1
            }
        }
    }
}

pub(crate) unsafe extern "C" fn ack_cq_events(cq: *mut abi::Cq, count: u32) {
    // SAFETY: a queue of ours; programs acknowledge under a lock of theirs, or from one thread.
    unsafe { (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(count) };
}

pub(crate) unsafe extern "C" fn req_notify(cq: *mut abi::Cq, solicited_only: c_int) -> c_int {
    // SAFETY: a queue of ours.
    unsafe { &*cq.cast::<Cq>() }.inner.req_notify(solicited_only != 0);
    0
}

/// Bits of `ibv_wc_flags`.
const WITH_GRH: u32 = 1;
const WITH_IMM: u32 = 1 << 1;
const WITH_INV: u32 = 1 << 3;

pub(crate) fn completion(wc: &Wc) -> abi::Wc {
    let mut flags = 0;
    let mut word = 0;
    if wc.grh {
        flags |= WITH_GRH;
    }
    if let Some(imm) = wc.imm {
        flags |= WITH_IMM;
        word = u32::from_ne_bytes(imm);
    }
    if let Some(rkey) = wc.invalidated {
        flags |= WITH_INV;
        word = rkey;
    }
    abi::Wc {
        wr_id: wc.id,
        status: wc.status as c_int,
        opcode: wc.opcode as c_int,
        vendor_err: 0,
        byte_len: wc.byte_len,
        imm_data: word,
        qp_num: wc.qpn,
        src_qp: wc.src_qpn,
        wc_flags: flags,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}

pub(crate) unsafe extern "C" fn poll(cq: *mut abi::Cq, count: c_int, to: *mut abi::Wc) -> c_int {
    // SAFETY: a queue of ours.
    let ours = unsafe { &*cq.cast::<Cq>() };
    let mut found = [Wc::EMPTY; 32];
    let mut done = 0;
    let count = count.max(0) as usize;
    while done < count {
        let room = (count - done).min(found.len());
        let Some(part) = found.get_mut(..room) else { break };
        let n = ours.inner.poll(part);
        for wc in part.iter().take(n) {
            // SAFETY: the program's table has `count` places.
            unsafe { to.add(done).write(completion(wc)) };
            done += 1;
        }
        if n < room || done > 0 {
            break;
        }
    }
    done as c_int
}
