//! Calls that two libraries share: an object of this library's devices stays here, another goes to the system's.

use std::ffi::{c_char, c_int, c_uint, c_void};

use softroce_verbs::*;

use crate::slot::{Slot, text};
use crate::system;

/// An object of verbs, which leads to its device.
trait Object: Copy {
    /// # Safety
    /// A live object of this library or of the system's.
    unsafe fn device(self) -> *const ibv_device;
}

impl Object for *mut ibv_device {
    unsafe fn device(self) -> *const ibv_device {
        self
    }
}

impl Object for *mut ibv_context {
    unsafe fn device(self) -> *const ibv_device {
        // SAFETY: by the caller.
        unsafe { (*self).device }
    }
}

macro_rules! objects {
    ($($type:ident)*) => {$(
        impl Object for *mut $type {
            unsafe fn device(self) -> *const ibv_device {
                // SAFETY: by the caller; all of them begin with their context.
                unsafe { (*(*self).context).device }
            }
        }
    )*};
}

objects! { ibv_pd ibv_mr ibv_comp_channel ibv_cq ibv_srq ibv_qp ibv_ah }

/// Device memory, which our devices do not have: it begins with its context.
#[repr(C)]
pub(crate) struct ibv_dm {
    context: *mut ibv_context,
}

/// A hint where bytes of a peer go, which our devices do not have: it begins with its context.
#[repr(C)]
pub(crate) struct ibv_dmah {
    context: *mut ibv_context,
}

/// A counter of completions, which our devices do not have: it begins with its context.
#[repr(C)]
pub(crate) struct ibv_comp_cntr {
    context: *mut ibv_context,
}

objects! { ibv_dm ibv_dmah ibv_comp_cntr }

/// Memory that the device gives, which ours does not. It is the system's library's alone, which made it.
#[repr(C)]
pub(crate) struct ibv_buf {
    addr: *mut c_void,
}

unsafe fn is_ours(object: impl Object) -> bool {
    // SAFETY: by the caller.
    is_device(unsafe { object.device() })
}

/// Return value of a call that our devices do not support.
trait Refusal {
    fn refusal() -> Self;
}

impl Refusal for c_int {
    fn refusal() -> c_int {
        // SAFETY: a call without arguments.
        unsafe { unsupported() }
    }
}

impl<T> Refusal for *mut T {
    fn refusal() -> *mut T {
        // SAFETY: a call without arguments.
        unsafe { unsupported_object() }.cast()
    }
}

impl<T> Refusal for *const T {
    fn refusal() -> *const T {
        <*mut T>::refusal()
    }
}

macro_rules! numbers {
    ($($type:ident = $value:expr)*) => {$(
        impl Refusal for $type {
            fn refusal() -> $type {
                $value
            }
        }
    )*};
}

numbers! { u64 = 0 isize = -(libc::EOPNOTSUPP as isize) }

impl Refusal for () {
    fn refusal() {}
}

fn refuse<T: Refusal>() -> T {
    T::refusal()
}

/// The system's function for an object of the system's.
macro_rules! system {
    ($version:literal $name:ident($($argument:ident: $type:ty),*) $(-> $return:ty)?) => {{
        static SLOT: Slot = Slot::new(std::ptr::null());
        let name = text(concat!(stringify!($name), "\0"));
        let found = system::function(&SLOT, name, text(concat!($version, "\0")));
        if found.is_null() {
            // One that is older than the function.
            return refuse();
        }
        // SAFETY: the function of this name and version; an object that is not ours is one of that library's.
        unsafe {
            let call: unsafe extern "C" fn($($type),*) $(-> $return)? = std::mem::transmute(found);
            call($($argument),*)
        }
    }};
}

/// Functions whose first argument shows whose they are: executed here for our objects, else by the system's library.
macro_rules! shared {
    ($($version:literal { $(fn $name:ident($first:ident: $object:ty $(, $argument:ident: $type:ty)*) $(-> $return:ty)?;)* })*) => {
        $($(
            pub(crate) unsafe extern "C" fn $name($first: $object $(, $argument: $type)*) $(-> $return)? {
                // SAFETY: as the caller promises.
                unsafe {
                    if is_ours($first) {
                        return softroce_verbs::$name($first $(, $argument)*);
                    }
                }
                system!($version $name($first: $object $(, $argument: $type)*) $(-> $return)?)
            }
        )*)*
    };
}

/// Functions whose first argument shows whose they are, and which our devices do not support.
macro_rules! refused {
    ($($version:literal { $(fn $name:ident($first:ident: $object:ty $(, $argument:ident: $type:ty)*) $(-> $return:ty)?;)* })*) => {
        $($(
            pub(crate) unsafe extern "C" fn $name($first: $object $(, $argument: $type)*) $(-> $return)? {
                // SAFETY: as the caller promises.
                if unsafe { is_ours($first) } {
                    return refuse();
                }
                system!($version $name($first: $object $(, $argument: $type)*) $(-> $return)?)
            }
        )*)*
    };
}

shared! {
    "IBVERBS_1.0" {
        fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
        fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    }
    "IBVERBS_1.1" {
        fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
        fn ibv_get_device_guid(device: *mut ibv_device) -> u64;
        fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
        fn ibv_close_device(context: *mut ibv_context) -> c_int;
        fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        fn ibv_query_port(context: *mut ibv_context, number: u8, attr: *mut ibv_port_attr) -> c_int;
        fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, to: *mut ibv_gid) -> c_int;
        fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, to: *mut u16) -> c_int;
        fn ibv_get_async_event(context: *mut ibv_context, to: *mut ibv_async_event) -> c_int;
        fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
        fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
        fn ibv_reg_mr(pd: *mut ibv_pd, at: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr;
        fn ibv_rereg_mr(
            mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, at: *mut c_void, len: usize, access: c_int
        ) -> c_int;
        fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
        fn ibv_create_cq(
            context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int
        ) -> *mut ibv_cq;
        fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int;
        fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
        fn ibv_get_cq_event(
            channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void
        ) -> c_int;
        fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32);
        fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
        fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
        fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
        fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
        fn ibv_query_qp(qp: *mut ibv_qp, to: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
        fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
        fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
        fn ibv_init_ah_from_wc(
            context: *mut ibv_context, port: u8, wc: *mut ibv_wc, grh: *mut [u8; 40], to: *mut ibv_ah_attr
        ) -> c_int;
        fn ibv_create_ah_from_wc(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut [u8; 40], port: u8) -> *mut ibv_ah;
    }
    "IBVERBS_1.5" {
        fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int;
    }
    "IBVERBS_1.6" {
        fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
    }
    "IBVERBS_1.7" {
        fn ibv_reg_mr_iova(pd: *mut ibv_pd, at: *mut c_void, len: usize, iova: u64, access: c_int) -> *mut ibv_mr;
    }
    "IBVERBS_1.8" {
        fn ibv_reg_mr_iova2(pd: *mut ibv_pd, at: *mut c_void, len: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
    }
    "IBVERBS_1.9" {
        fn ibv_get_device_index(device: *mut ibv_device) -> c_int;
    }
    "IBVERBS_1.10" {
        fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
        fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
    }
    "IBVERBS_1.11" {
        fn _ibv_query_gid_ex(
            context: *mut ibv_context, port: u32, index: u32, to: *mut ibv_gid_entry, flags: u32, size: usize
        ) -> c_int;
        fn _ibv_query_gid_table(
            context: *mut ibv_context, to: *mut ibv_gid_entry, max: usize, flags: u32, size: usize
        ) -> isize;
    }
    "IBVERBS_1.12" {
        fn ibv_reg_dmabuf_mr(
            pd: *mut ibv_pd, offset: u64, len: usize, iova: u64, fd: c_int, access: c_int
        ) -> *mut ibv_mr;
    }
    "IBVERBS_1.14" {
        fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: c_uint, flags: u32) -> c_int;
    }
    "IBVERBS_1.15" {
        fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr;
    }
    "IBVERBS_1.16" {
        fn ibv_query_port_speed(context: *mut ibv_context, port: u32, to: *mut u64) -> c_int;
    }
    "IBVERBS_PRIVATE_34" {
        fn ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, to: *mut c_int) -> c_int;
    }
}

refused! {
    "IBVERBS_1.1" {
        fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        fn ibv_resolve_eth_l2_from_gid(
            context: *mut ibv_context, attr: *mut ibv_ah_attr, mac: *mut u8, vlan: *mut u16
        ) -> c_int;
    }
    "IBVERBS_1.10" {
        fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd;
        fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr;
        fn ibv_unimport_pd(pd: *mut ibv_pd);
        fn ibv_unimport_mr(mr: *mut ibv_mr);
    }
    "IBVERBS_1.13" {
        fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm;
        fn ibv_unimport_dm(dm: *mut ibv_dm);
    }
    "IBVERBS_1.15" {
        fn ibv_alloc_dmah(context: *mut ibv_context, attr: *mut c_void) -> *mut ibv_dmah;
        fn ibv_dealloc_dmah(dmah: *mut ibv_dmah) -> c_int;
    }
    "IBVERBS_1.16" {
        fn ibv_dm_export_dmabuf_fd(dm: *mut ibv_dm) -> c_int;
    }
    "IBVERBS_1.17" {
        fn ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void;
        fn ibv_reg_buf_mr(
            pd: *mut ibv_pd, buf: *mut ibv_buf, at: *mut c_void, len: usize, access: c_int
        ) -> *mut ibv_mr;
    }
    "IBVERBS_1.18" {
        fn _ibv_query_comp_cntr_caps(context: *mut ibv_context, caps: *mut c_void, size: usize) -> c_int;
        fn ibv_create_comp_cntr(context: *mut ibv_context, attr: *mut c_void) -> *mut ibv_comp_cntr;
        fn ibv_destroy_comp_cntr(counter: *mut ibv_comp_cntr) -> c_int;
        fn ibv_inc_comp_cntr(counter: *mut ibv_comp_cntr, amount: u64) -> c_int;
        fn ibv_inc_err_comp_cntr(counter: *mut ibv_comp_cntr, amount: u64) -> c_int;
        fn ibv_qp_attach_comp_cntr(qp: *mut ibv_qp, counter: *mut ibv_comp_cntr, attr: *mut c_void) -> c_int;
        fn ibv_read_comp_cntr(counter: *mut ibv_comp_cntr, value: *mut u64) -> c_int;
        fn ibv_read_err_comp_cntr(counter: *mut ibv_comp_cntr, value: *mut u64) -> c_int;
        fn ibv_set_comp_cntr(counter: *mut ibv_comp_cntr, value: u64) -> c_int;
        fn ibv_set_err_comp_cntr(counter: *mut ibv_comp_cntr, value: u64) -> c_int;
    }
}

/// Acknowledges an event, by the object that it names. Events of ports and devices name none, and none waits for them.
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the program's event, whose object is live until this call.
    unsafe {
        let context = context_of_event(event);
        if context.is_null() {
            return;
        }
        if is_ours(context) {
            return softroce_verbs::ibv_ack_async_event(event);
        }
    }
    system!("IBVERBS_1.1" ibv_ack_async_event(event: *mut ibv_async_event));
}

/// Frees a buffer by the system's library, as none is of a device of ours.
pub(crate) unsafe extern "C" fn ibv_free_buf(buf: *mut ibv_buf) {
    system!("IBVERBS_1.17" ibv_free_buf(buf: *mut ibv_buf));
}

pub(crate) unsafe extern "C" fn ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> c_int {
    system!("IBVERBS_1.18" ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> c_int)
}

/// The list that is before each one that a program gets: that of the system's library, to be given back with it.
type Header = *mut *mut ibv_device;

/// Devices of the kernel, as the system's library lists them, and then ours.
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    // SAFETY: as the caller promises.
    unsafe {
        let mut theirs: Header = std::ptr::null_mut();
        let mut number = 0;
        if let Some(get) = system::library().and_then(system::Library::device_list) {
            theirs = get(&raw mut number);
        }
        let mut mine = 0;
        let own = softroce_verbs::ibv_get_device_list(&raw mut mine);
        if own.is_null() && theirs.is_null() {
            return own;
        }
        let mut list = vec![theirs.cast::<ibv_device>()];
        let of = |list: Header, length: c_int| {
            (0..if list.is_null() { 0 } else { length as usize }).map(move |i| *list.add(i))
        };
        list.extend(of(theirs, number).chain(of(own, mine)));
        softroce_verbs::ibv_free_device_list(own);
        if !count.is_null() {
            *count = list.len() as c_int - 1;
        }
        list.push(std::ptr::null_mut());
        // Its length is found again by the null at its end.
        Box::into_raw(list.into_boxed_slice()).cast::<*mut ibv_device>().add(1)
    }
}

pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    // SAFETY: `get_device_list` made it, with the system's list before it and a null at its end.
    let whole = unsafe {
        let devices = (0..).take_while(|i| !(*list.add(*i)).is_null()).count();
        Box::from_raw(std::ptr::slice_from_raw_parts_mut(list.sub(1), devices + 2))
    };
    let theirs: Header = whole.first().map_or(std::ptr::null_mut(), |header| header.cast());
    if !theirs.is_null() {
        system!("IBVERBS_1.1" ibv_free_device_list(theirs: Header));
    }
}

/// Prepares for forks: our devices need nothing; the kernel's, where there are any, do.
pub(crate) unsafe extern "C" fn ibv_fork_init() -> c_int {
    match system::library() {
        Some(_) => system!("IBVERBS_1.1" ibv_fork_init() -> c_int),
        None => 0,
    }
}

pub(crate) unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    match system::library() {
        Some(_) => system!("IBVERBS_1.13" ibv_is_fork_initialized() -> c_int),
        // SAFETY: a call without arguments.
        None => unsafe { softroce_verbs::ibv_is_fork_initialized() },
    }
}
