//! Version 9: NCCL 2.24 and 2.25; lengths of 64 bits, and virtual devices, of which there are none here.

use std::ffi::{c_int, c_void};

use crate::abi::{Absent, Logger, PropertiesV9, Status};
use crate::table::{filled, table};
use crate::v8::{connect, init, listen};
use crate::{device, plugin};

type Init = unsafe extern "C" fn(Option<Logger>) -> Status;
type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
type Connect = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> Status;
type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut *mut c_void) -> Status;
type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;

table! {
    /// `ncclNet_v9_t`.
    Table {
        init: Init, properties: PropertiesV9<4>, listen: Listen, connect: Connect, isend: Isend, irecv: Irecv,
        make_v_device: Absent,
    }
}

/// Symbol by which NCCL finds the table of version 9.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v9: Table = filled! {
    Table {
        init: init, get_properties: properties, listen: listen, connect: connect, isend: isend, irecv: irecv,
        make_v_device: None,
    }
};

pub(crate) unsafe extern "C" fn properties(dev: c_int, to: *mut PropertiesV9<4>) -> Status {
    // SAFETY: NCCL's variable.
    unsafe { plugin::properties(dev, to, device::properties) }
}

unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    _mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::isend(comm, data, size, tag, request) }
}

unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    _mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL passes `n` of each.
    let group = |i| unsafe { (data.add(i).read(), sizes.add(i).read(), tags.add(i).read()) };
    // SAFETY: as NCCL calls it.
    unsafe { plugin::irecv(comm, group, n, request) }
}
