//! An open device: the root of every other object.

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::netdevice::index_to_name;
use rustix::net::{AddressFamily, SocketType, socket};

use super::{complain, ffi};
use crate::gid::{Gid, GidKind, GidRow};
use crate::unavailable::Unavailable;
use crate::words;

/// An open device (`struct ibv_context`): a file descriptor of `/dev/infiniband/uverbsN` and the driver's functions.
#[derive(Debug)]
pub struct Context {
    raw: NonNull<ffi::ibv_context>,
    name: String,
}

// SAFETY: libibverbs allows every call from every thread; the pointer is freed once, in `drop`.
unsafe impl Send for Context {}
// SAFETY: as above; there is no unsynchronised state on our side.
unsafe impl Sync for Context {}

/// A port's current attributes.
#[derive(Debug, Clone, Copy)]
pub struct Port {
    /// Maximum payload of a packet: 256 to 4096 bytes.
    pub active_mtu: u32,
    /// The port's address within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// True when the link is Ethernet (RoCE).
    pub ethernet: bool,
}

impl Context {
    /// Opens the device called `name`.
    pub fn open(name: &str) -> Result<Arc<Context>> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        let list = unsafe { ffi::ibv_get_device_list(&mut count) };
        if list.is_null() {
            return Err(Unavailable::no_device(&io::Error::last_os_error().to_string()).into());
        }
        let opened = open_from(list, usize::try_from(count).unwrap_or(0), name);
        // SAFETY: `list` is what ibv_get_device_list returned; an opened device stays valid without it.
        unsafe { ffi::ibv_free_device_list(list) };
        let context = opened?;
        // SAFETY: the descriptor is open as long as `context`, and only used here.
        let events = unsafe { BorrowedFd::borrow_raw((*context.raw()).async_fd) };
        let flags = fcntl_getfl(events).context("asynchronous events")?;
        fcntl_setfl(events, flags | OFlags::NONBLOCK).context("asynchronous events")?;
        Ok(Arc::new(context))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pointer for calls of libibverbs; valid while `self` is.
    pub fn raw(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    /// The state of port `number`; an error unless it exists and is up.
    pub fn port(&self, number: u8) -> Result<Port> {
        let device = self.attributes()?;
        let ports = device.phys_port_cnt;
        ensure!((1..=ports).contains(&number), "{} has ports 1 to {ports}, not {number} (--port)", self.name);
        let mut port = ffi::ibv_port_attr::default();
        // SAFETY: the exported symbol fills the first part of `ibv_port_attr`, whatever type the header gives it.
        let code = unsafe { ffi::ibv_query_port(self.raw(), number, (&raw mut port).cast()) };
        ensure!(code == 0, "ibv_query_port({} port {number}): {}", self.name, io::Error::from_raw_os_error(code));
        ensure!(
            port.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            "port {number} of {} is {}, not ACTIVE: is its network device up?",
            self.name,
            words::port_state(port.state)
        );
        let active_mtu = words::mtu_bytes(port.active_mtu)
            .ok_or_else(|| anyhow!("port {number} of {} has the unknown MTU code {}", self.name, port.active_mtu))?;
        let ethernet = u32::from(port.link_layer) == ffi::IBV_LINK_LAYER_ETHERNET;
        Ok(Port { active_mtu, lid: port.lid, ethernet })
    }

    /// The GID tables of all ports, without their empty entries.
    pub fn gids(&self) -> Result<Vec<GidRow>> {
        let mut entries = vec![ffi::ibv_gid_entry::default(); MOST_GIDS];
        let size = size_of::<ffi::ibv_gid_entry>();
        // SAFETY: the context is open, and the call writes at most `entries.len()` entries of this size.
        let count = unsafe { ffi::_ibv_query_gid_table(self.raw(), entries.as_mut_ptr(), entries.len(), 0, size) };
        let count = usize::try_from(count).map_err(|_| {
            let cause = io::Error::from_raw_os_error(count.unsigned_abs() as i32);
            anyhow!("ibv_query_gid_table({}): {cause}", self.name)
        })?;
        let row = |entry: &ffi::ibv_gid_entry| GidRow {
            device: self.name.clone(),
            port: u8::try_from(entry.port_num).unwrap_or(0),
            index: entry.gid_index,
            // SAFETY: both forms of a GID are 16 bytes.
            gid: Gid(unsafe { entry.gid.raw }),
            kind: GidKind::from_raw(entry.gid_type),
            netdev: interface(entry.ndev_ifindex),
        };
        Ok(entries.iter().take(count).map(row).collect())
    }

    /// Takes the oldest asynchronous event without waiting and describes it. Such events concern the device, a port or
    /// a QP, not a request.
    pub fn async_event(&self) -> Result<Option<&'static str>> {
        let mut event = ffi::ibv_async_event::default();
        // SAFETY: the context is open and `event` outlives the call. It does not block (O_NONBLOCK, `open`).
        if unsafe { ffi::ibv_get_async_event(self.raw(), &mut event) } != 0 {
            let cause = io::Error::last_os_error();
            ensure!(cause.kind() == io::ErrorKind::WouldBlock, "ibv_get_async_event({}): {cause}", self.name);
            return Ok(None);
        }
        // An unacknowledged event would make ibv_destroy_qp wait forever.
        // SAFETY: acknowledges the event just taken, once.
        unsafe { ffi::ibv_ack_async_event(&mut event) };
        Ok(Some(words::async_event(event.event_type)))
    }

    /// The device's limits.
    pub fn attributes(&self) -> Result<ffi::ibv_device_attr> {
        let mut device = ffi::ibv_device_attr::default();
        // SAFETY: the context is open and `device` outlives the call.
        let code = unsafe { ffi::ibv_query_device(self.raw(), &mut device) };
        ensure!(code == 0, "ibv_query_device({}): {}", self.name, io::Error::from_raw_os_error(code));
        Ok(device)
    }
}

/// The kernel takes up to 64 KiB for the answer and refuses more.
const MOST_GIDS: usize = 2000;

/// Name of the network interface with this index; empty for 0, InfiniBand.
fn interface(index: u32) -> String {
    let none = String::new();
    if index == 0 {
        return none;
    }
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None);
    socket.and_then(|socket| index_to_name(socket, index)).unwrap_or(none)
}

/// Opens the device called `name` among the `count` devices at `list`.
fn open_from(list: *mut *mut ffi::ibv_device, count: usize, name: &str) -> Result<Context> {
    let mut names = Vec::new();
    for index in 0..count {
        // SAFETY: the list has `count` entries and is freed by the caller, after this.
        let device = unsafe { *list.add(index) };
        // SAFETY: a device from the list; its name is part of it and ends with 0.
        let found = unsafe { CStr::from_ptr(ffi::ibv_get_device_name(device)) }.to_string_lossy().into_owned();
        if found == name {
            // SAFETY: a device from the list.
            let raw = unsafe { ffi::ibv_open_device(device) };
            let raw = NonNull::new(raw).ok_or_else(|| {
                anyhow!("cannot open {name}: {}; may this user use /dev/infiniband?", io::Error::last_os_error())
            })?;
            return Ok(Context { raw, name: found });
        }
        names.push(found);
    }
    bail!("there is no RDMA device called {name} (--device); there are: {}", names.join(", "))
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once; every object on it held an `Arc` and is gone.
        complain("ibv_close_device", unsafe { ffi::ibv_close_device(self.raw()) });
    }
}
