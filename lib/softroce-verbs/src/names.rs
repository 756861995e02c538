//! Names of numbers, and conversions that need no device.

use std::ffi::{CStr, c_char, c_int};

use crate::constants::{ibv_event_type, ibv_port_state, ibv_wc_status};
use crate::extended::ibv_ece;
use crate::types::ibv_qp;

fn name(table: &[&'static CStr], code: u32) -> *const c_char {
    table.get(code as usize).copied().unwrap_or(c"unknown").as_ptr()
}

pub unsafe extern "C" fn ibv_wc_status_str(status: ibv_wc_status::Type) -> *const c_char {
    name(
        &[
            c"success",
            c"local length error",
            c"local QP operation error",
            c"local EE context operation error",
            c"local protection error",
            c"Work Request Flushed Error",
            c"memory management operation error",
            c"bad response error",
            c"local access error",
            c"remote invalid request error",
            c"remote access error",
            c"remote operation error",
            c"transport retry counter exceeded",
            c"RNR retry counter exceeded",
            c"local RDD violation error",
            c"remote invalid RD request",
            c"aborted error",
            c"invalid EE context number",
            c"invalid EE context state",
            c"fatal error",
            c"response timeout error",
            c"general error",
        ],
        status,
    )
}

pub unsafe extern "C" fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    name(
        &[
            c"CQ error",
            c"local work queue catastrophic error",
            c"invalid request local work queue error",
            c"local access violation work queue error",
            c"communication established",
            c"send queue drained",
            c"path migrated",
            c"path migration request error",
            c"local catastrophic error",
            c"port active",
            c"port error",
            c"LID change",
            c"P_Key change",
            c"SM change",
            c"SRQ catastrophic error",
            c"SRQ limit reached",
            c"last WQE reached",
            c"client reregistration",
            c"GID table change",
            c"WQ fatal",
        ],
        event,
    )
}

pub unsafe extern "C" fn ibv_node_type_str(node: u32) -> *const c_char {
    name(&[c"unknown", c"InfiniBand channel adapter", c"InfiniBand switch", c"InfiniBand router"], node)
}

pub unsafe extern "C" fn ibv_port_state_str(state: ibv_port_state::Type) -> *const c_char {
    name(&[c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"], state)
}

/// Codes of `ibv_rate` and what they are in units of 2.5 Gbit/s and in Mbit/s.
const RATES: [(c_int, c_int, c_int); 9] = [
    (2, 1, 2500),
    (5, 2, 5000),
    (3, 4, 10000),
    (6, 8, 20000),
    (4, 12, 30000),
    (7, 16, 40000),
    (8, 24, 60000),
    (9, 32, 80000),
    (10, 48, 120_000),
];

fn rate(code: c_int) -> Option<&'static (c_int, c_int, c_int)> {
    RATES.iter().find(|r| r.0 == code)
}

fn code_of(found: Option<&(c_int, c_int, c_int)>) -> c_int {
    // `IBV_RATE_MAX`: as fast as the port is.
    found.map_or(0, |r| r.0)
}

pub unsafe extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    code_of(RATES.iter().find(|r| r.1 == mult))
}

pub unsafe extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    code_of(RATES.iter().find(|r| r.2 == mbps))
}

pub unsafe extern "C" fn ibv_rate_to_mult(code: c_int) -> c_int {
    rate(code).map_or(-1, |r| r.1)
}

pub unsafe extern "C" fn ibv_rate_to_mbps(code: c_int) -> c_int {
    rate(code).map_or(-1, |r| r.2)
}

/// Fails, as nothing is at such a path: the device is no kernel's.
pub unsafe extern "C" fn ibv_read_sysfs_file(
    _dir: *const c_char,
    _file: *const c_char,
    _to: *mut c_char,
    _size: usize,
) -> c_int {
    -1
}

/// Fails with `EOPNOTSUPP`: a call that this library does not support.
pub unsafe extern "C" fn unsupported() -> c_int {
    crate::set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

pub unsafe extern "C" fn unsupported_object() -> *mut std::ffi::c_void {
    crate::set_errno(libc::EOPNOTSUPP);
    std::ptr::null_mut()
}

/// Bytes of a message are written in the order of its packets, but a message that came again may be written again.
pub unsafe extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: u32, _flags: u32) -> c_int {
    0
}

/// Succeeds without doing anything.
pub unsafe extern "C" fn nothing() -> c_int {
    0
}

/// Queue pairs agree on no extras.
pub unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the program's output buffer.
    unsafe { ece.write(ibv_ece::default()) };
    0
}

pub unsafe extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the program's extras.
    let wanted = unsafe { *ece };
    if wanted.vendor_id == 0 && wanted.options == 0 { 0 } else { libc::EOPNOTSUPP }
}

pub unsafe extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}
