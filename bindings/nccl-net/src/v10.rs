//! Version 10: NCCL 2.26 and 2.27; a traffic class per connection, and handles of the profiler per request.

use std::ffi::{c_int, c_void};

use crate::abi::{Absent, CommConfig, Logger, PropertiesV9, Status};
use crate::plugin;
use crate::table::{filled, table};
use crate::v8::listen;
use crate::v9::properties;

type Init = unsafe extern "C" fn(Option<Logger>, Absent) -> Status;
type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
type Connect = unsafe extern "C" fn(c_int, *mut CommConfig, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type Isend =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;

table! {
    /// `ncclNet_v10_t`.
    Table {
        init: Init, properties: PropertiesV9<4>, listen: Listen, connect: Connect, isend: Isend, irecv: Irecv,
        make_v_device: Absent,
    }
}

/// Symbol by which NCCL finds the table of version 10.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v10: Table = filled! {
    Table {
        init: init, get_properties: properties, listen: listen, connect: connect, isend: isend, irecv: irecv,
        make_v_device: None,
    }
};

unsafe extern "C" fn init(logger: Option<Logger>, _profiler: Absent) -> Status {
    plugin::init(logger)
}

unsafe extern "C" fn connect(
    dev: c_int,
    _config: *mut CommConfig,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::connect(dev, handle, comm) }
}

pub(crate) unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    _mhandle: *mut c_void,
    _phandle: *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::isend(comm, data, size, tag, request) }
}

pub(crate) unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    _mhandles: *mut *mut c_void,
    _phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL passes `n` of each.
    let group = |i| unsafe { (data.add(i).read(), sizes.add(i).read(), tags.add(i).read()) };
    // SAFETY: as NCCL calls it.
    unsafe { plugin::irecv(comm, group, n, request) }
}
