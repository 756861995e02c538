//! Devices and GID tables, from the safe interface of the crate `ibverbs`. Sysfs supplies the columns the crate omits.

use std::fs;

use anyhow::Result;

use crate::gid::{Gid, GidKind, GidRow};
use crate::unavailable::Unavailable;

/// A device and its GID table.
#[derive(Debug)]
pub struct Device {
    /// Its name, like `mlx5_0` or `rxe0`.
    pub name: String,
    /// The non-empty entries of all ports, or the reason why they are unavailable.
    pub gids: Result<Vec<GidRow>, String>,
}

/// All RDMA devices of this machine; [`Unavailable`] when there is none.
pub fn devices() -> Result<Vec<Device>> {
    let list = ibverbs::devices().map_err(|e| Unavailable::no_device(&e.to_string()))?;
    let devices: Vec<Device> = list
        .iter()
        .map(|device| {
            let name = device.name().map_or_else(|| "?".to_owned(), |n| n.to_string_lossy().into_owned());
            // The crate opens a device only if port 1 is up, and keeps the whole table.
            let gids = device.open().map(|open| rows(&name, open.gid_table())).map_err(|e| e.to_string());
            Device { name, gids }
        })
        .collect();
    if devices.is_empty() { Err(Unavailable::no_device("the list of devices is empty").into()) } else { Ok(devices) }
}

fn rows(device: &str, table: &[ibverbs::GidEntry]) -> Vec<GidRow> {
    table
        .iter()
        .map(|entry| {
            let mut gid = [0; 16];
            gid[..8].copy_from_slice(&entry.gid.subnet_prefix().to_be_bytes());
            gid[8..].copy_from_slice(&entry.gid.interface_id().to_be_bytes());
            let attribute = |what: &str| {
                let (port, index) = (entry.port_num, entry.gid_index);
                fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/{what}/{index}"))
                    .unwrap_or_default()
            };
            let kind = match GidKind::from_sysfs(&attribute("types")) {
                GidKind::Unknown => GidKind::from_raw(entry.gid_type),
                kind => kind,
            };
            GidRow {
                device: device.to_owned(),
                port: u8::try_from(entry.port_num).unwrap_or(0),
                index: entry.gid_index,
                gid: Gid(gid),
                kind,
                netdev: attribute("ndevs").trim().to_owned(),
            }
        })
        .collect()
}
