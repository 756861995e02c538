//! Changes of the interface become events and entries of the tables of GIDs.
//!
//! The kernel sends them to a netlink socket, which the engine's thread waits for beside the others: there is one while
//! a context is open.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::Shared;
use crate::fork::Own;
use crate::gids::GidTable;
use crate::interface;
use crate::netlink::{Change, changes};
use crate::queue::event::{Affected, EventKind, Events};
use crate::sync::lock;

/// Bytes of a datagram of the kernel at most; messages are much shorter.
const ROOM: usize = 1 << 15;
/// Datagrams in a row before other descriptors are served.
const ROUNDS: usize = 64;
/// The kernel announces a new IPv4 address just before its routing table has it (`__inet_insert_ifa`), and until then
/// no socket can be bound to it. That takes microseconds.
const TRIES: usize = 50;
const PAUSE: Duration = Duration::from_millis(1);
/// The one port of an RDMA device.
const PORT: Affected = Affected::Port(1);

/// A context that receives the interface's events.
struct Watcher {
    events: Weak<Events>,
    gids: GidTable,
}

pub(super) struct Watch {
    /// The netlink socket; `None` where the system gives out none.
    socket: Option<Own<OwnedFd>>,
    /// True if the interface was up in the last message about it.
    up: AtomicBool,
    watchers: Mutex<Vec<Watcher>>,
}

fn open() -> rustix::io::Result<OwnedFd> {
    let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // No protocol is NETLINK_ROUTE. Only the kernel, and a process that may configure the network, can send to it.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups as u32))?;
    Ok(socket)
}

impl Watch {
    /// Watches from now on.
    pub(super) fn new(interface: &str) -> Watch {
        let socket = open().inspect_err(|e| log::info!("{interface} is not watched: no netlink socket ({e})")).ok();
        let socket = socket.map(Own::new);
        Watch { socket, up: AtomicBool::new(interface::up(interface)), watchers: Mutex::default() }
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Adds a context that receives the events, and whose RDMA device's table is kept.
    pub(super) fn add(&self, events: &Arc<Events>, gids: GidTable) {
        lock(&self.watchers).push(Watcher { events: Arc::downgrade(events), gids });
    }

    /// Reports an event to every context for whose table `changed` returns true.
    fn report(&self, kind: EventKind, changed: impl Fn(&GidTable) -> bool) {
        lock(&self.watchers).retain(|watcher| {
            let Some(events) = watcher.events.upgrade() else { return false };
            if changed(&watcher.gids) {
                events.report(kind, PORT);
            }
            true
        });
    }

    /// The addresses of all tables.
    fn known(&self) -> Vec<IpAddr> {
        lock(&self.watchers).iter().flat_map(|watcher| watcher.gids.entries()).flatten().collect()
    }
}

impl Shared {
    /// Receives the kernel's messages. For the engine's thread.
    pub(super) fn watch(&self) {
        let Some(socket) = &self.watch.socket else { return };
        let mut buffer = vec![0u8; ROOM];
        for _ in 0..ROUNDS {
            // SAFETY: the buffer is writable for its length.
            let n = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), ROOM, libc::MSG_DONTWAIT) };
            if n >= 0 {
                for change in changes(buffer.get(..n as usize).unwrap_or_default()) {
                    self.apply(change);
                }
                continue;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // The kernel had more messages than the socket holds.
                Some(libc::ENOBUFS) => self.look_again(),
                _ => return,
            }
        }
    }

    fn apply(&self, change: Change) {
        let (Change::Link { index, .. } | Change::Gone { index } | Change::Address { index, .. }) = change;
        if index != self.scope {
            return;
        }
        match change {
            Change::Link { up, .. } => {
                let was_up = self.watch.up.swap(up, Ordering::Relaxed);
                let kind = if up { EventKind::PortActive } else { EventKind::PortError };
                self.watch.report(kind, |_| up != was_up);
            }
            Change::Gone { .. } => self.watch.report(EventKind::DeviceFatal, |_| true),
            Change::Address { ip, there: true, .. } => match self.serve_address(ip) {
                // A GID can be used from its event on.
                Ok(()) => self.watch.report(EventKind::GidChange, |gids| gids.add(ip)),
                Err(e) => log::warn!("{}: no GID for the new address {ip}: {e}", self.interface),
            },
            // Its sockets stay: queue pairs may use them, and the address may come back.
            Change::Address { ip, there: false, .. } => self.watch.report(EventKind::GidChange, |gids| gids.remove(ip)),
        }
    }

    /// Queries the interface's state and applies what changed, after messages were lost.
    fn look_again(&self) {
        let Ok(all) = if_addrs::get_if_addrs() else { return };
        let index = self.scope;
        let now: Vec<IpAddr> = all.iter().filter(|i| i.index == Some(index)).map(if_addrs::Interface::ip).collect();
        for ip in self.watch.known() {
            if !now.contains(&ip) {
                self.apply(Change::Address { index, ip, there: false });
            }
        }
        for ip in now {
            self.apply(Change::Address { index, ip, there: true });
        }
        self.apply(Change::Link { index, up: interface::up(&self.interface) });
    }

    /// Opens the sockets of an address, if there are none.
    fn serve_address(&self, ip: IpAddr) -> crate::Result<()> {
        if self.senders.iter().any(|sender| sender.local.ip() == ip) {
            return Ok(());
        }
        let mut tries = TRIES;
        loop {
            match self.open_sockets(ip) {
                Err(e) if e.errno() == libc::EADDRNOTAVAIL && ip.is_ipv4() && tries > 0 => {
                    tries -= 1;
                    std::thread::sleep(PAUSE);
                }
                result => return result,
            }
        }
    }
}
