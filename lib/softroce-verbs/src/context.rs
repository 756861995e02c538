//! Contexts, and their asynchronous events.

use std::ffi::c_int;
use std::sync::Arc;

use softroce::Affected;

use crate::constants::*;
use crate::named::Named;
use crate::tables::verbs_context;
use crate::take;
use crate::types::*;
use crate::uses::Uses;

/// An open device.
#[repr(C)]
pub(crate) struct Context {
    pub(crate) base: verbs_context,
    pub(crate) inner: Arc<softroce::Context>,
    pub(crate) named: Named,
    /// Domains, channels and completion queues, and the program's pointer until it closes the device.
    pub(crate) uses: Uses,
}

impl Context {
    /// # Safety
    /// An open context of ours.
    pub(crate) unsafe fn of<'a>(context: *mut ibv_context) -> &'a Context {
        let offset = std::mem::offset_of!(verbs_context, context);
        // SAFETY: C's context is a field of ours.
        unsafe { &*context.byte_sub(offset).cast() }
    }

    /// Returns true in a process that was forked from the one that opened the device: what it inherited is its
    /// parent's.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.inner.is_here()
    }

    /// Releases an object of the context, or the program's pointer: the last frees the context.
    ///
    /// # Safety
    /// A context of ours, of which the caller has that object.
    pub(crate) unsafe fn release(context: *mut ibv_context) {
        // SAFETY: by the caller; `open_device` made it, and no one has it any more after the last.
        unsafe {
            if Context::of(context).uses.release() {
                drop(take::<Context, _>(context.byte_sub(std::mem::offset_of!(verbs_context, context))));
            }
        }
    }
}

pub unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, to: *mut ibv_async_event) -> c_int {
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    loop {
        let event = match context.inner.get_async_event() {
            Ok(event) => event,
            Err(e) => {
                crate::set_errno(e.errno());
                return -1;
            }
        };
        let element = match (event.affected, context.named.deliver(event.affected)) {
            (Affected::Port(number), _) => ibv_async_event__bindgen_ty_1 { port_num: c_int::from(number) },
            // Pointers to objects have one field in the union.
            (_, Some(address)) => ibv_async_event__bindgen_ty_1 { qp: std::ptr::with_exposed_provenance_mut(address) },
            // An event of an object that is gone is dropped.
            (_, None) => continue,
        };
        // SAFETY: the program's output buffer.
        unsafe { to.write(ibv_async_event { element, event_type: event.kind as ibv_event_type }) };
        return 0;
    }
}

/// The context of the object that an event names; null for one of a port or a device.
///
/// # Safety
/// An event that was not acknowledged.
pub unsafe fn context_of_event(event: *const ibv_async_event) -> *mut ibv_context {
    // SAFETY: by the caller; all objects that events name begin with their context.
    unsafe {
        match (*event).event_type {
            IBV_EVENT_DEVICE_FATAL
            | IBV_EVENT_PORT_ACTIVE
            | IBV_EVENT_PORT_ERR
            | IBV_EVENT_LID_CHANGE
            | IBV_EVENT_PKEY_CHANGE
            | IBV_EVENT_SM_CHANGE
            | IBV_EVENT_CLIENT_REREGISTER
            | IBV_EVENT_GID_CHANGE => std::ptr::null_mut(),
            _ => (*(*event).element.qp).context,
        }
    }
}

pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event of ours that was not acknowledged, so its object is live.
    unsafe {
        let context = context_of_event(event);
        if !context.is_null() {
            let context = Context::of(context);
            if !context.is_inherited() {
                context.named.acknowledge((*event).element.qp as usize, 1);
            }
        }
    }
}
