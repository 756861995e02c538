//! Contexts: opening, queries, asynchronous events.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use softroce::{Affected, LIMITS, PortState};

use crate::constants::*;
use crate::device::Device;
use crate::extended::*;
use crate::named::Named;
use crate::tables::{ibv_context_ops, verbs_context};
use crate::types::*;
use crate::uses::Uses;
use crate::{cq, cq_ex, device, give, null, qp, srq, take, window};

/// An open device.
#[repr(C)]
pub(crate) struct Context {
    base: verbs_context,
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
        bind_mw: Some(window::bind),
        dealloc_mw: Some(window::dealloc),
        _compat2: None,
        poll_cq: Some(cq::poll),
        req_notify_cq: Some(cq::req_notify),
        _compat3: [None; 7],
        post_srq_recv: Some(srq::post_recv),
        _compat4: [None; 4],
        post_send: Some(qp::post_send),
        post_recv: Some(qp::post_recv),
        _compat5: [None; 5],
    };
    let base = verbs_context {
        query_port: Some(query_port_extended),
        before: [None; 23],
        query_rt_values: Some(query_rt_values),
        create_cq_ex: Some(cq_ex::create_extended),
        private: std::ptr::null_mut(),
        query_device_ex: Some(query_device_extended),
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

fn device_attributes(device: &softroce::Device) -> ibv_device_attr {
    let guid = u64::from_ne_bytes(device.guid());
    let (work, sges, atomic) = (LIMITS.work_requests as c_int, LIMITS.sges as c_int, c_int::from(LIMITS.rd_atomic));
    let mut fw_ver = [0; 64];
    for (place, byte) in fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *place = byte as _;
    }
    ibv_device_attr {
        fw_ver,
        node_guid: guid,
        sys_image_guid: guid,
        // No vendor's, which rxe has, too.
        vendor_id: 0xff_ffff,
        max_mr_size: 1 << 47,
        page_size_cap: 0xffff_f000,
        max_qp: LIMITS.qps as c_int,
        max_qp_wr: work,
        device_cap_flags: IBV_DEVICE_PORT_ACTIVE_EVENT
            | IBV_DEVICE_RC_RNR_NAK_GEN
            | IBV_DEVICE_MEM_WINDOW
            | IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        max_sge: sges,
        max_sge_rd: sges,
        max_cq: 1 << 16,
        max_cqe: LIMITS.completions as c_int,
        max_mr: LIMITS.regions as c_int,
        max_mw: LIMITS.windows as c_int,
        max_pd: 1 << 16,
        max_qp_rd_atom: atomic,
        max_res_rd_atom: atomic * LIMITS.qps as c_int,
        max_qp_init_rd_atom: atomic,
        // With the processor's own operations, too.
        atomic_cap: IBV_ATOMIC_GLOB,
        max_ah: 1 << 16,
        max_srq: 1 << 16,
        max_srq_wr: work,
        max_srq_sge: sges,
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
        ..ibv_device_attr::default()
    }
}

pub unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: an open context, and the program's output buffer.
    unsafe { attr.write(device_attributes(Context::of(context).inner.device())) };
    0
}

unsafe extern "C" fn query_device_extended(
    context: *mut ibv_context,
    _input: *const c_void,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: an open context.
    let orig_attr = device_attributes(unsafe { Context::of(context) }.inner.device());
    let all = ibv_device_attr_ex {
        hca_core_clock: CLOCK_KHZ,
        device_cap_flags_ex: u64::from(orig_attr.device_cap_flags),
        phys_port_cnt_ex: u32::from(orig_attr.phys_port_cnt),
        orig_attr,
        ..ibv_device_attr_ex::default()
    };
    if size < size_of_val(&all.orig_attr) {
        return libc::EINVAL;
    }
    // SAFETY: the program's output buffer, of the size in the call.
    unsafe { write_sized(&all, attr, size) };
    0
}

/// Frequency of the clock that `query_rt_values` reads, which counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

unsafe extern "C" fn query_rt_values(_context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: the program's output buffer.
    unsafe {
        if (*values).comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return libc::EOPNOTSUPP;
        }
        if (*values).comp_mask != 0 && libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut (*values).raw_clock) != 0 {
            return *libc::__errno_location();
        }
    }
    0
}

/// Writes as much of a structure as the program knows of, and zeros where it knows of more.
unsafe fn write_sized<T>(all: &T, to: *mut T, size: usize) {
    // SAFETY: the program's output buffer, of the size in the call.
    unsafe {
        to.cast::<u8>().write_bytes(0, size);
        std::ptr::copy_nonoverlapping((&raw const *all).cast::<u8>(), to.cast(), size.min(size_of::<T>()));
    }
}

/// The code of a number of bytes.
pub(crate) fn mtu_code(bytes: u32) -> ibv_mtu {
    bytes.max(256).ilog2() - 7
}

/// Returns true for the loopback interface's port beside those of other RDMA devices: it leads to no other host.
/// Programs that spread over all ports (UCX) do not distinguish where they lead, but they do leave out those that are
/// much slower.
fn is_slow(context: &Context) -> bool {
    context.inner.device().is_loopback() && device::count() > 1
}

fn port_attributes(context: &Context) -> ibv_port_attr {
    let (port, counters) = (context.inner.port(), softroce::counters());
    let (active_width, active_speed) = if is_slow(context) { (1, 1) } else { (2, 32) };
    ibv_port_attr {
        state: port.state as ibv_port_state::Type,
        max_mtu: IBV_MTU_4096,
        active_mtu: mtu_code(port.active_mtu),
        gid_tbl_len: port.gids as c_int,
        port_cap_flags: (ibv_port_cap_flags::IBV_PORT_CM_SUP | ibv_port_cap_flags::IBV_PORT_IP_BASED_GIDS).0,
        max_msg_sz: LIMITS.message,
        // Counted for all RDMA devices of the process.
        bad_pkey_cntr: counters.bad_pkey_cntr as u32,
        qkey_viol_cntr: counters.qkey_viol_cntr as u32,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        active_width,
        active_speed,
        phys_state: if port.state == PortState::Active { 5 } else { 3 },
        link_layer: IBV_LINK_LAYER_ETHERNET as u8,
        ..ibv_port_attr::default()
    }
}

unsafe fn write_port(context: *mut ibv_context, number: u8, attr: *mut ibv_port_attr, size: usize) -> c_int {
    if number != 1 {
        return libc::EINVAL;
    }
    // SAFETY: an open context, and the program's output buffer, of the size in the call.
    unsafe { write_sized(&port_attributes(Context::of(context)), attr, size) };
    0
}

unsafe extern "C" fn query_port_extended(
    context: *mut ibv_context,
    number: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { write_port(context, number, attr, size) }
}

pub unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, number: u8, attr: *mut ibv_port_attr) -> c_int {
    // The structure before `port_cap_flags2` came.
    const OLD: usize = std::mem::offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: as the caller promises.
    unsafe { write_port(context, number, attr, OLD) }
}

fn gid(context: &Context, port: u32, index: c_int) -> Option<softroce::Gid> {
    let index = usize::try_from(index).ok().filter(|_| port == 1)?;
    context.inner.device().gids().get(index).copied()
}

/// Returns true for an entry of the table that has an address.
fn used(gid: &softroce::Gid) -> bool {
    *gid != softroce::Gid::default()
}

pub unsafe extern "C" fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, to: *mut ibv_gid) -> c_int {
    // SAFETY: an open context.
    let Some(gid) = gid(unsafe { Context::of(context) }, u32::from(port), index) else {
        crate::set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: the program's output buffer.
    unsafe { to.write(ibv_gid { raw: gid.0 }) };
    0
}

fn entry(context: &Context, gid: softroce::Gid, index: u32) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: gid.0 },
        gid_index: index,
        port_num: 1,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: context.inner.device().interface_index(),
    }
}

pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    to: *mut ibv_gid_entry,
    _flags: u32,
    _size: usize,
) -> c_int {
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    let Some(gid) = gid(context, port, index as c_int).filter(used) else { return libc::ENODATA };
    // SAFETY: the program's output buffer.
    unsafe { to.write(entry(context, gid, index)) };
    0
}

pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    to: *mut ibv_gid_entry,
    max: usize,
    _flags: u32,
    _size: usize,
) -> isize {
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    let gids = context.inner.device().gids();
    let entries: Vec<_> =
        gids.iter().enumerate().filter(|(_, gid)| used(gid)).map(|(i, gid)| entry(context, *gid, i as u32)).collect();
    if entries.len() > max {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: the program's table has `max` entries.
    unsafe { std::ptr::copy_nonoverlapping(entries.as_ptr(), to, entries.len()) };
    entries.len() as isize
}

/// Writes the type of a GID as in sysfs: 1 for RoCE version 2.
pub unsafe extern "C" fn ibv_query_gid_type(
    _context: *mut ibv_context,
    _port: u8,
    _index: u32,
    to: *mut c_int,
) -> c_int {
    // SAFETY: the program's output buffer.
    unsafe { *to = 1 };
    0
}

pub unsafe extern "C" fn ibv_query_pkey(_context: *mut ibv_context, port: u8, index: c_int, to: *mut u16) -> c_int {
    if port != 1 || index != 0 {
        crate::set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the program's output buffer.
    unsafe { *to = 0xffff };
    0
}

pub unsafe extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    if port == 1 && pkey == 0xffff { 0 } else { -1 }
}

/// Writes the speed of the port in units of 100 Mbit/s, by its width and speed codes.
pub unsafe extern "C" fn ibv_query_port_speed(context: *mut ibv_context, port: u32, to: *mut u64) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: an open context, and the program's output buffer.
    unsafe { *to = if is_slow(Context::of(context)) { 25 } else { 1000 } };
    0
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

pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

pub unsafe extern "C" fn ibv_is_fork_initialized() -> c_int {
    // `IBV_FORK_UNNEEDED`: registered memory is memory of the process, nothing is pinned.
    2
}
