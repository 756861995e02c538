//! Version 12: NCCL 2.30 and later; more devices in a virtual one, and names of rails and planes.

use std::ffi::c_int;

use crate::abi::{Absent, PropertiesV9, Status};
use crate::table::{filled, table};
use crate::v10::{Irecv, Isend, irecv, isend};
use crate::v11::{Connect, Finalize, Init, Listen, connect, init, listen};
use crate::{device, plugin};

/// `NCCL_NET_ID_UNDEF`.
const NONE: i16 = -1;

/// `ncclNetProperties_v12_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Properties {
    /// As in earlier versions.
    pub common: PropertiesV9<8>,
    /// Most requests in one.
    pub max_multi_request_size: c_int,
    /// Rail of the device; -1 if it has none.
    pub rail_id: i16,
    /// Plane of the device; -1 if it has none.
    pub plane_id: i16,
}

table! {
    /// `ncclNet_v12_t`.
    Table {
        init: Init, properties: Properties, listen: Listen, connect: Connect, isend: Isend, irecv: Irecv,
        make_v_device: Absent, finalize: Finalize, set_net_attr: Absent,
    }
}

/// Symbol by which NCCL finds the table of version 12.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v12: Table = filled! {
    Table {
        init: init, get_properties: properties, listen: listen, connect: connect, isend: isend, irecv: irecv,
        make_v_device: None, finalize: plugin::finalize, set_net_attr: None,
    }
};

unsafe extern "C" fn properties(dev: c_int, to: *mut Properties) -> Status {
    let make = |speed| Properties {
        common: device::properties(speed),
        max_multi_request_size: 1,
        rail_id: NONE,
        plane_id: NONE,
    };
    // SAFETY: NCCL's variable.
    unsafe { plugin::properties(dev, to, make) }
}
