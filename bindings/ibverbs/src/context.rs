//! Contexts: opening, queries, asynchronous events.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use softroce::{Affected, LIMITS, PortState};

use crate::device::Device;
use crate::{abi, cq, give, null, qp, srq, take};

/// An open device.
#[repr(C)]
pub(crate) struct Context {
    base: abi::VerbsContext,
    pub(crate) inner: Arc<softroce::Context>,
    /// Queue pairs by number: events name them.
    pub(crate) qps: Mutex<HashMap<u32, usize>>,
}

impl Context {
    /// # Safety
    /// An open context of ours.
    pub(crate) unsafe fn of<'a>(context: *mut abi::Context) -> &'a Context {
        let offset = std::mem::offset_of!(abi::VerbsContext, context);
        // SAFETY: C's context is a field of ours.
        unsafe { &*context.byte_sub(offset).cast() }
    }
}

const EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

pub(crate) unsafe extern "C" fn open_device(device: *mut abi::Device) -> *mut abi::Context {
    // SAFETY: a device of ours.
    let ours = unsafe { &*device.cast::<Device>() };
    let inner = match ours.inner.open() {
        Ok(inner) => inner,
        Err(e) => return null(&e),
    };
    let ops = abi::ContextOps {
        compat1: [None; 7],
        alloc_mw: None,
        bind_mw: None,
        dealloc_mw: None,
        compat2: None,
        poll_cq: Some(cq::poll),
        req_notify_cq: Some(cq::req_notify),
        compat3: [None; 7],
        post_srq_recv: Some(srq::post_recv),
        compat4: [None; 4],
        post_send: Some(qp::post_send),
        post_recv: Some(qp::post_recv),
        compat5: [None; 5],
    };
    let base = abi::VerbsContext {
        query_port: Some(query_port_extended),
        before: [None; 24],
        create_cq_ex: None,
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
        size: size_of::<abi::VerbsContext>(),
        context: abi::Context {
            device,
            ops,
            cmd_fd: -1,
            async_fd: inner.async_fd().as_raw_fd(),
            num_comp_vectors: 1,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            abi_compat: EXTENDED,
        },
    };
    let made = give(Context { base, inner, qps: Mutex::default() });
    // SAFETY: just made.
    unsafe { &raw mut (*made).base.context }
}

pub(crate) unsafe extern "C" fn close_device(context: *mut abi::Context) -> c_int {
    let offset = std::mem::offset_of!(abi::VerbsContext, context);
    // SAFETY: `open_device` made it; the program does not use it any more.
    drop(unsafe { take::<Context, _>(context.byte_sub(offset)) });
    0
}

fn device_attributes(device: &softroce::Device) -> abi::DeviceAttr {
    let guid = device.guid();
    let (work, sges, atomic) = (LIMITS.work_requests as c_int, LIMITS.sges as c_int, c_int::from(LIMITS.rd_atomic));
    let mut fw_ver = [0; 64];
    for (place, byte) in fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *place = byte as _;
    }
    abi::DeviceAttr {
        fw_ver,
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: 1 << 47,
        page_size_cap: 0xffff_f000,
        vendor_id: 0,
        vendor_part_id: 0,
        hw_ver: 0,
        max_qp: LIMITS.qps as c_int,
        max_qp_wr: work,
        // Shutdown port, system image GUID, RC RNR NAK, SRQ resize are not there; port active event and RNR NAK are.
        device_cap_flags: 1 << 10 | 1 << 12,
        max_sge: sges,
        max_sge_rd: sges,
        max_cq: 1 << 16,
        max_cqe: LIMITS.completions as c_int,
        max_mr: 1 << 24,
        max_pd: 1 << 16,
        max_qp_rd_atom: atomic,
        max_ee_rd_atom: 0,
        max_res_rd_atom: atomic * LIMITS.qps as c_int,
        max_qp_init_rd_atom: atomic,
        max_ee_init_rd_atom: 0,
        // Atomic with the processor's own operations.
        atomic_cap: 2,
        unused: [0; 8],
        max_ah: 1 << 16,
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: 1 << 16,
        max_srq_wr: work,
        max_srq_sge: sges,
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
    }
}

pub(crate) unsafe extern "C" fn query_device(context: *mut abi::Context, attr: *mut abi::DeviceAttr) -> c_int {
    // SAFETY: an open context, and the program's place.
    unsafe { attr.write(device_attributes(Context::of(context).inner.device())) };
    0
}

unsafe extern "C" fn query_device_extended(
    context: *mut abi::Context,
    _input: *const c_void,
    attr: *mut abi::DeviceAttrEx,
    size: usize,
) -> c_int {
    if size < size_of::<abi::DeviceAttrEx>() {
        return libc::EINVAL;
    }
    // SAFETY: an open context, and the program's place of the size it says.
    unsafe {
        attr.cast::<u8>().write_bytes(0, size);
        (*attr).orig = device_attributes(Context::of(context).inner.device());
    }
    0
}

/// Codes of `ibv_mtu`.
pub(crate) fn mtu_code(bytes: u32) -> c_int {
    bytes.max(256).ilog2() as c_int - 7
}

fn port_attributes(context: &Context) -> abi::PortAttr {
    let port = context.inner.port();
    abi::PortAttr {
        state: port.state as c_int,
        max_mtu: mtu_code(4096),
        active_mtu: mtu_code(port.active_mtu),
        gid_tbl_len: port.gids as c_int,
        // Communication management, and GIDs that are addresses.
        port_cap_flags: 1 << 16 | 1 << 26,
        max_msg_sz: LIMITS.message,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        active_width: 2,
        active_speed: 32,
        phys_state: if port.state == PortState::Active { 5 } else { 3 },
        // Ethernet.
        link_layer: 2,
        ..abi::PortAttr::default()
    }
}

/// Writes as much of the attributes as the program knows of.
unsafe fn write_port(context: *mut abi::Context, number: u8, attr: *mut abi::PortAttr, size: usize) -> c_int {
    if number != 1 {
        return libc::EINVAL;
    }
    // SAFETY: an open context, and the program's place of the size it says.
    unsafe {
        let all = port_attributes(Context::of(context));
        attr.cast::<u8>().write_bytes(0, size);
        std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast(), size.min(size_of_val(&all)));
    }
    0
}

unsafe extern "C" fn query_port_extended(
    context: *mut abi::Context,
    number: u8,
    attr: *mut abi::PortAttr,
    size: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { write_port(context, number, attr, size) }
}

pub(crate) unsafe extern "C" fn query_port(context: *mut abi::Context, number: u8, attr: *mut abi::PortAttr) -> c_int {
    // The structure before `port_cap_flags2` came.
    const OLD: usize = std::mem::offset_of!(abi::PortAttr, port_cap_flags2);
    // SAFETY: as the caller promises.
    unsafe { write_port(context, number, attr, OLD) }
}

fn gid(context: &Context, port: u32, index: c_int) -> Option<softroce::Gid> {
    let index = usize::try_from(index).ok().filter(|_| port == 1)?;
    context.inner.device().gids().get(index).copied()
}

pub(crate) unsafe extern "C" fn query_gid(
    context: *mut abi::Context,
    port: u8,
    index: c_int,
    to: *mut [u8; 16],
) -> c_int {
    // SAFETY: an open context.
    let Some(gid) = gid(unsafe { Context::of(context) }, u32::from(port), index) else {
        crate::set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: the program's place.
    unsafe { to.write(gid.0) };
    0
}

/// `IBV_GID_TYPE_ROCE_V2`.
const ROCE_V2: u32 = 2;

fn entry(context: &Context, gid: softroce::Gid, index: u32) -> abi::GidEntry {
    let (a, b) = gid.0.split_at(8);
    let half = |b: &[u8]| b.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
    abi::GidEntry {
        gid: [half(a), half(b)],
        gid_index: index,
        port_num: 1,
        gid_type: ROCE_V2,
        ndev_ifindex: context.inner.device().interface_index(),
    }
}

pub(crate) unsafe extern "C" fn query_gid_ex(
    context: *mut abi::Context,
    port: u32,
    index: u32,
    to: *mut abi::GidEntry,
    _flags: u32,
    _size: usize,
) -> c_int {
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    let Some(gid) = gid(context, port, index as c_int) else { return libc::ENODATA };
    // SAFETY: the program's place.
    unsafe { to.write(entry(context, gid, index)) };
    0
}

pub(crate) unsafe extern "C" fn query_gid_table(
    context: *mut abi::Context,
    to: *mut abi::GidEntry,
    max: usize,
    _flags: u32,
    _size: usize,
) -> isize {
    // SAFETY: an open context.
    let context = unsafe { Context::of(context) };
    let gids = context.inner.device().gids();
    for (i, gid) in gids.iter().take(max).enumerate() {
        // SAFETY: the program's table has `max` places.
        unsafe { to.add(i).write(entry(context, *gid, i as u32)) };
    }
    gids.len().min(max) as isize
}

/// In sysfs' words: 1 for RoCE version 2.
pub(crate) unsafe extern "C" fn query_gid_type(
    _context: *mut abi::Context,
    _port: u8,
    _index: u32,
    to: *mut c_int,
) -> c_int {
    // SAFETY: the program's place.
    unsafe { *to = 1 };
    0
}

pub(crate) unsafe extern "C" fn query_pkey(_context: *mut abi::Context, port: u8, index: c_int, to: *mut u16) -> c_int {
    if port != 1 || index != 0 {
        crate::set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the program's place.
    unsafe { *to = 0xffff };
    0
}

pub(crate) unsafe extern "C" fn get_pkey_index(_context: *mut abi::Context, port: u8, pkey: u16) -> c_int {
    if port == 1 && pkey == 0xffff { 0 } else { -1 }
}

/// In units of 100 Mbit/s: what the port's width and speed say.
pub(crate) unsafe extern "C" fn query_port_speed(_context: *mut abi::Context, port: u32, to: *mut u64) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: the program's place.
    unsafe { *to = 1000 };
    0
}

pub(crate) unsafe extern "C" fn get_async_event(context: *mut abi::Context, to: *mut abi::AsyncEvent) -> c_int {
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
        let element = match event.affected {
            Affected::Qp(qpn) => {
                let qps = context.qps.lock().unwrap_or_else(PoisonError::into_inner);
                // One of a queue pair that is gone is nobody's.
                let Some(qp) = qps.get(&qpn) else { continue };
                *qp as u64
            }
            Affected::Cq(cookie) | Affected::Srq(cookie) => cookie,
            Affected::Port(number) => u64::from(number),
        };
        // SAFETY: the program's place.
        unsafe { to.write(abi::AsyncEvent { element, event_type: event.kind as c_int }) };
        return 0;
    }
}

pub(crate) unsafe extern "C" fn ack_async_event(_event: *mut abi::AsyncEvent) {}

pub(crate) unsafe extern "C" fn fork_init() -> c_int {
    0
}

pub(crate) unsafe extern "C" fn is_fork_initialized() -> c_int {
    // `IBV_FORK_UNNEEDED`: registered memory is memory of the process, nothing is pinned.
    2
}
