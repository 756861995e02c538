//! Version 11: NCCL 2.28 and 2.29; a context per communicator, of which nothing is kept here.

use std::ffi::{c_int, c_void};

use crate::abi::{Absent, CommConfig, Logger, PropertiesV9, Status};
use crate::table::{filled, table};
use crate::v10::{Irecv, Isend, irecv, isend};
use crate::{device, plugin};

pub(crate) type Init = unsafe extern "C" fn(*mut *mut c_void, u64, *mut CommConfig, Option<Logger>, Absent) -> Status;
pub(crate) type Listen = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type Connect =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type Finalize = unsafe extern "C" fn(*mut c_void) -> Status;

/// `ncclNetProperties_v11_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Properties {
    /// As in earlier versions.
    pub common: PropertiesV9<4>,
    /// Most requests in one.
    pub max_multi_request_size: c_int,
}

table! {
    /// `ncclNet_v11_t`.
    Table {
        init: Init, properties: Properties, listen: Listen, connect: Connect, isend: Isend, irecv: Irecv,
        make_v_device: Absent, finalize: Finalize, set_net_attr: Absent,
    }
}

/// Symbol by which NCCL finds the table of version 11.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v11: Table = filled! {
    Table {
        init: init, get_properties: properties, listen: listen, connect: connect, isend: isend, irecv: irecv,
        make_v_device: None, finalize: plugin::finalize, set_net_attr: None,
    }
};

pub(crate) unsafe extern "C" fn init(
    ctx: *mut *mut c_void,
    _comm_id: u64,
    _config: *mut CommConfig,
    logger: Option<Logger>,
    _profiler: Absent,
) -> Status {
    // SAFETY: NCCL's variable, or null.
    if let Some(ctx) = unsafe { ctx.as_mut() } {
        *ctx = std::ptr::null_mut();
    }
    plugin::init(logger)
}

unsafe extern "C" fn properties(dev: c_int, to: *mut Properties) -> Status {
    let make = |speed| Properties { common: device::properties(speed), max_multi_request_size: 1 };
    // SAFETY: NCCL's variable.
    unsafe { plugin::properties(dev, to, make) }
}

pub(crate) unsafe extern "C" fn listen(
    _ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::listen(dev, handle, comm) }
}

pub(crate) unsafe extern "C" fn connect(
    _ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> Status {
    // SAFETY: as NCCL calls it.
    unsafe { plugin::connect(dev, handle, comm) }
}
