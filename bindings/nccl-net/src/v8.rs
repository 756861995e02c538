//! Version 8: NCCL 2.20 to 2.23.

use std::ffi::{c_int, c_void};

use crate::abi::{Logger, PropertiesV8, Status};
use crate::table::{filled, table};
use crate::{device, plugin};

type Init = unsafe extern "C" fn(Option<Logger>) -> Status;
type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
type Connect = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> Status;
type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> Status;
type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;

table! {
    /// `ncclNet_v8_t`.
    Table { init: Init, properties: PropertiesV8, listen: Listen, connect: Connect, isend: Isend, irecv: Irecv }
}

/// Symbol by which NCCL finds the table of version 8.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v8: Table = filled! { Table { init: init, get_properties: properties, listen: listen, connect: connect, isend: isend, irecv: irecv } };

pub(crate) unsafe extern "C" fn init(logger: Option<Logger>) -> Status {
    plugin::init(logger)
}

unsafe extern "C" fn properties(dev: c_int, to: *mut PropertiesV8) -> Status {
    // SAFETY: NCCL's variable.
    unsafe { plugin::properties(dev, to, device::properties_v8) }
}

pub(crate) unsafe extern "C" fn listen(dev: c_int, handle: *mut c_void, comm: *mut *mut c_void) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::listen(dev, handle, comm) }
}

pub(crate) unsafe extern "C" fn connect(
    dev: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::connect(dev, handle, comm) }
}

unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    _mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    let Ok(size) = usize::try_from(size) else { return Status::InvalidArgument };
    // SAFETY: as NCCL calls it.
    unsafe { plugin::isend(comm, data, size, tag, request) }
}

unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    _mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL passes `n` of each.
    let group =
        |i| unsafe { (data.add(i).read(), usize::try_from(sizes.add(i).read()).unwrap_or(0), tags.add(i).read()) };
    // SAFETY: as NCCL calls it.
    unsafe { plugin::irecv(comm, group, n, request) }
}
