//! The one device that the plugin shows to NCCL.
//!
//! NCCL plans its rings and trees over devices as if device 0 of every host reached device 0 of every other one. With a
//! cable per pair of hosts that is not so, and only a connection's two ends know which of their ports it can take. So
//! all ports are one device, and [`tinynccl_transport::rails`] takes the right ones per connection, several if there
//! are several.

use std::ffi::{CStr, c_int};
use std::fs;

use tinynccl_sys::Config;
use tinynccl_transport::rails::Net;

use crate::abi::{
    MAX_BYTES, NET_DEVICE_HOST, NET_DEVICE_NO_VERSION, PTR_HOST, PropertiesV8, PropertiesV9, VirtualDevice,
};

/// Speed that NCCL assumes of its own sockets where an interface does not report it, in Mbit/s.
const UNKNOWN: i64 = 10_000;
const NAME: &CStr = c"tinynccl";

/// The speed of all ports together, in Mbit/s.
pub(crate) fn speed(config: &Config, net: &Net) -> c_int {
    if config.net_speed > 0 {
        return c_int::try_from(config.net_speed).unwrap_or(c_int::MAX);
    }
    let mut interfaces: Vec<&str> = net.ports().iter().filter(|p| !p.loopback).map(|p| p.interface.as_str()).collect();
    // One with addresses of both kinds is there twice.
    interfaces.sort_unstable();
    interfaces.dedup();
    let told = |interface: &str| {
        let text = fs::read_to_string(format!("/sys/class/net/{interface}/speed")).ok()?;
        text.trim().parse().ok().filter(|speed: &i64| *speed > 0)
    };
    let sum: i64 = interfaces.into_iter().map(|interface| told(interface).unwrap_or(UNKNOWN)).sum();
    c_int::try_from(if sum > 0 { sum } else { UNKNOWN }).unwrap_or(c_int::MAX)
}

/// Its properties as version 8 has them.
pub(crate) fn properties_v8(speed: c_int) -> PropertiesV8 {
    let p = properties::<4>(speed);
    PropertiesV8 {
        name: p.name,
        pci_path: p.pci_path,
        guid: p.guid,
        ptr_support: p.ptr_support,
        reg_is_global: p.reg_is_global,
        speed: p.speed,
        port: p.port,
        latency: p.latency,
        max_comms: p.max_comms,
        max_recvs: p.max_recvs,
        net_device_type: p.net_device_type,
        net_device_version: p.net_device_version,
    }
}

/// Its properties as later versions have them.
pub(crate) fn properties<const N: usize>(speed: c_int) -> PropertiesV9<N> {
    PropertiesV9 {
        name: NAME.as_ptr(),
        // No NIC: as near to one GPU as to another.
        pci_path: std::ptr::null(),
        guid: 0,
        // NCCL copies GPUs' memory through the host's.
        ptr_support: PTR_HOST,
        reg_is_global: 0,
        force_flush: 0,
        speed,
        port: 0,
        // Not known, as NCCL's own sockets report.
        latency: 0.0,
        max_comms: 65_536,
        max_recvs: tinynccl_transport::rails::MAX_GROUP as c_int,
        net_device_type: NET_DEVICE_HOST,
        net_device_version: NET_DEVICE_NO_VERSION,
        v_props: VirtualDevice { ndevs: 1, devs: [0; N] },
        max_p2p_bytes: MAX_BYTES,
        max_coll_bytes: MAX_BYTES,
    }
}
