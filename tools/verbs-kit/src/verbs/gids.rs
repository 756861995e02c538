//! Devices and their GID tables.

use std::ffi::CStr;
use std::io;

use anyhow::Result;

use super::{Context, ffi};
use crate::gid::GidRow;
use crate::unavailable::Unavailable;

/// A device and its GID table.
#[derive(Debug)]
pub struct Device {
    /// Its name, like `mlx5_0`, `rxe0` or `tinyroce0`.
    pub name: String,
    /// The non-empty entries of all ports, or the reason why they are unavailable.
    pub gids: Result<Vec<GidRow>, String>,
}

/// All RDMA devices of this machine; [`Unavailable`] when there is none.
pub fn devices() -> Result<Vec<Device>> {
    let gids = |name: &str| Context::open(name).and_then(|context| context.gids()).map_err(|e| format!("{e:#}"));
    let devices: Vec<Device> = names()?.into_iter().map(|name| Device { gids: gids(&name), name }).collect();
    if devices.is_empty() { Err(Unavailable::no_device("the list of devices is empty").into()) } else { Ok(devices) }
}

fn names() -> Result<Vec<String>> {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    let list = unsafe { ffi::ibv_get_device_list(&mut count) };
    if list.is_null() {
        return Err(Unavailable::no_device(&io::Error::last_os_error().to_string()).into());
    }
    let names = (0..usize::try_from(count).unwrap_or(0))
        .map(|index| {
            // SAFETY: the list has `count` entries; a device's name is part of it and ends with 0.
            let name = unsafe { CStr::from_ptr(ffi::ibv_get_device_name(*list.add(index))) };
            name.to_string_lossy().into_owned()
        })
        .collect();
    // SAFETY: `list` is what ibv_get_device_list returned; nothing refers to it any more.
    unsafe { ffi::ibv_free_device_list(list) };
    Ok(names)
}
