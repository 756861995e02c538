//! Completion channels and queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use softroce::{Affected, Wc};

use crate::constants::{ibv_wc_flags, ibv_wc_opcode, ibv_wc_status};
use crate::context::Context;
use crate::cq_ex;
use crate::extended::ibv_cq_ex;
use crate::named::PATIENCE;
use crate::types::{ibv_comp_channel, ibv_context, ibv_cq, ibv_wc};
use crate::uses::Uses;
use crate::{code, give, null, set_errno, take};

/// A completion channel.
#[repr(C)]
struct CompChannel {
    base: ibv_comp_channel,
    inner: Arc<softroce::CompChannel>,
    /// Completion queues that notify by it.
    uses: Uses,
}

/// A completion queue.
#[repr(C)]
pub(crate) struct Cq {
    base: ibv_cq_ex,
    pub(crate) inner: Arc<softroce::Cq>,
    /// The completion that `ibv_start_poll` or `ibv_next_poll` found last.
    pub(crate) current: UnsafeCell<ibv_wc>,
    /// Queue pairs that complete into it: one counts twice where both of its queues do.
    pub(crate) uses: Uses,
}

pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: an open context.
    let made = unsafe { Context::of(context) }.inner.check_here().and_then(|()| softroce::CompChannel::new());
    match made {
        Ok(inner) => {
            let fd = inner.fd().as_raw_fd();
            // SAFETY: an open context.
            unsafe { Context::of(context) }.uses.add();
            let base = ibv_comp_channel { context, fd, refcnt: 0 };
            give(CompChannel { base, inner, uses: Uses::default() }).cast()
        }
        Err(e) => null(&e),
    }
}

pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: `create_comp_channel` made it; where the call succeeds the program does not use it any more.
    unsafe {
        let context = (*channel).context;
        if Context::of(context).is_inherited() {
            return 0;
        }
        if let Err(busy) = (*channel.cast::<CompChannel>()).uses.check("a completion channel", "queues") {
            return busy;
        }
        drop(take::<CompChannel, _>(channel));
        Context::release(context);
    }
    0
}

pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: as the caller promises.
    unsafe { create(context, cqe, cq_context, channel, vector, false) }
}

/// Least entries of a queue: a program that requests fewer gets these.
const FEWEST: c_int = 64;

/// Creates a queue for both forms of reading it.
pub(crate) unsafe fn create(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
    ignore_overrun: bool,
) -> *mut ibv_cq {
    if vector != 0 {
        return null(&softroce::Error::new(libc::EINVAL, "there is completion vector 0 alone"));
    }
    // At least: a program with one request under way may leave the last one's completion in the queue, as
    // `ib_send_lat -e` does.
    let cqe = if cqe > 0 { cqe.max(FEWEST) } else { cqe };
    let mut base = ibv_cq_ex { context, channel, cq_context, cqe, ..ibv_cq_ex::default() };
    cq_ex::table(&mut base);
    // The queue's cookie is its address, which is known first.
    let place = Box::<Cq>::new_uninit();
    let cookie = place.as_ptr() as u64;
    // SAFETY: a channel of ours, if there is one, and an open context.
    let made = unsafe {
        let channel = channel.cast::<CompChannel>().as_ref().map(|c| c.inner.clone());
        Context::of(context).inner.create_cq(cqe.max(0) as usize, cookie, channel)
    };
    match made {
        Ok(inner) => {
            if ignore_overrun {
                inner.ignore_overrun();
            }
            let ours = Cq { base, inner, current: UnsafeCell::default(), uses: Uses::default() };
            let made = Box::into_raw(Box::write(place, ours));
            // SAFETY: an open context, and a channel of ours, if there is one.
            unsafe {
                if let Some(channel) = channel.cast::<CompChannel>().as_ref() {
                    channel.uses.add();
                }
                Context::of(context).uses.add();
                Context::of(context).named.add(made as usize);
            }
            made.cast()
        }
        Err(e) => null(&e),
    }
}

pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: a queue of ours.
    let ours = unsafe { &mut *cq.cast::<Cq>() };
    match ours.inner.resize(cqe.max(0) as usize) {
        Ok(()) => {
            ours.base.cqe = cqe;
            0
        }
        Err(e) => code(&e),
    }
}

pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: `create_cq` made it; where the call succeeds the program does not use it any more.
    unsafe {
        let (context, channel) = ((*cq).context, (*cq).channel);
        if Context::of(context).is_inherited() {
            return 0;
        }
        if let Err(busy) = (*cq.cast::<Cq>()).uses.check("a completion queue", "queue pairs") {
            return busy;
        }
        if !Context::of(context).named.remove(cq as usize, PATIENCE) {
            return libc::EBUSY;
        }
        drop(take::<Cq, _>(cq));
        if let Some(channel) = channel.cast::<CompChannel>().as_ref() {
            channel.uses.release();
        }
        Context::release(context);
    }
    0
}

pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel of ours and the program's output buffers; the cookie is the address of a queue that stays until
    // the program acknowledges this event.
    unsafe {
        let ours = &*channel.cast::<CompChannel>();
        let named = &Context::of((*channel).context).named;
        loop {
            let cookie = match ours.inner.get_event() {
                Ok(cookie) => cookie,
                Err(e) => {
                    set_errno(e.errno());
                    return -1;
                }
            };
            // An event of a queue that was destroyed meanwhile is dropped.
            let Some(address) = named.deliver(Affected::Cq(cookie)) else { continue };
            let which = std::ptr::with_exposed_provenance_mut::<ibv_cq>(address);
            *cq = which;
            *cq_context = (*which).cq_context;
            return 0;
        }
    }
}

pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: a queue of ours, which stays until its events are acknowledged.
    unsafe {
        let context = Context::of((*cq).context);
        if !context.is_inherited() {
            context.named.acknowledge(cq as usize, count);
        }
    }
}

pub(crate) unsafe extern "C" fn req_notify(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a queue of ours.
    let inner = unsafe { &(*cq.cast::<Cq>()).inner };
    if let Err(e) = inner.check_here() {
        return code(&e);
    }
    inner.req_notify(solicited_only != 0);
    0
}

pub(crate) fn completion(wc: &Wc) -> ibv_wc {
    let mut flags = ibv_wc_flags(0);
    let (mut word, mut sl) = (0, 0);
    if wc.grh {
        // verbs.h has no field for the kind of header. ConnectX puts it into the service level, where UCX looks for it:
        // 8 for RoCEv2, 1 for IPv6, 2 for IPv4.
        sl = if wc.ipv4 { 8 | 2 } else { 8 | 1 };
        flags |= ibv_wc_flags::IBV_WC_GRH;
    }
    if let Some(imm) = wc.imm {
        flags |= ibv_wc_flags::IBV_WC_WITH_IMM;
        word = u32::from_ne_bytes(imm);
    }
    if let Some(rkey) = wc.invalidated {
        flags |= ibv_wc_flags::IBV_WC_WITH_INV;
        word = rkey;
    }
    ibv_wc {
        wr_id: wc.id,
        status: wc.status as ibv_wc_status::Type,
        opcode: wc.opcode as ibv_wc_opcode::Type,
        byte_len: wc.byte_len,
        imm_data: word,
        qp_num: wc.qpn,
        src_qp: wc.src_qpn,
        wc_flags: flags,
        sl,
        ..ibv_wc::default()
    }
}

pub(crate) unsafe extern "C" fn poll(cq: *mut ibv_cq, count: c_int, to: *mut ibv_wc) -> c_int {
    // SAFETY: a queue of ours.
    let ours = unsafe { &*cq.cast::<Cq>() };
    if let Err(e) = ours.inner.check_here() {
        return -code(&e);
    }
    let mut found = [Wc::EMPTY; 32];
    let mut done = 0;
    let count = count.max(0) as usize;
    while done < count {
        let room = (count - done).min(found.len());
        let Some(part) = found.get_mut(..room) else { break };
        let n = ours.inner.poll(part);
        for wc in part.iter().take(n) {
            // SAFETY: the program's table has `count` entries.
            unsafe { to.add(done).write(completion(wc)) };
            done += 1;
        }
        if n < room || done > 0 {
            break;
        }
    }
    done as c_int
}
