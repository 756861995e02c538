//! Queries of a device, its port, and the tables of its port.

use std::ffi::{c_int, c_void};

use softroce::{LIMITS, PortState};

use crate::constants::*;
use crate::context::Context;
use crate::device;
use crate::extended::*;
use crate::types::*;

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

pub(crate) unsafe extern "C" fn query_device_extended(
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

pub(crate) unsafe extern "C" fn query_rt_values(_context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
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

pub(crate) unsafe extern "C" fn query_port_extended(
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
