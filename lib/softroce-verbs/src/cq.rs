//! Completion channels and queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use softroce::{Affected, Wc};

use crate::completion::{Cq, completion};
use crate::constants::*;
use crate::context::Context;
use crate::cq_ex;
use crate::extended::{ibv_cq_ex, ibv_cq_init_attr_ex};
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

/// All that a completion here has; not times of completion, VLANs and tags.
const FIELDS: c_uint = (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) - 1;
const MASKS: c_uint = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
const FLAGS: c_uint = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

pub(crate) unsafe extern "C" fn create_extended(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the program's attributes; its mask has a bit if they go as far as the flags.
    let (init, flags) = unsafe {
        let has_flags = (*init).comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
        (&*init, if has_flags { (*init).flags } else { 0 })
    };
    let unknown = init.wc_flags & !u64::from(FIELDS);
    if unknown != 0 || init.comp_mask & !MASKS != 0 || flags & !FLAGS != 0 {
        let text = format!("completions with fields {unknown:#x}, mask {:#x}, flags {flags:#x}", init.comp_mask);
        return null(&softroce::Error::new(libc::EOPNOTSUPP, text));
    }
    if init.cqe == 0 || init.cqe > i32::MAX as u32 {
        return null(&softroce::Error::new(libc::EINVAL, format!("a completion queue of {} entries", init.cqe)));
    }
    let ignore = flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0;
    let (cqe, vector) = (init.cqe as c_int, init.comp_vector as c_int);
    // SAFETY: as the caller promises.
    unsafe { create(context, cqe, init.cq_context, init.channel, vector, ignore) }.cast()
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
