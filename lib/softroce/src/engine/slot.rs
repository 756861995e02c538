//! Slots: numbers that name the RDMA device, and so the process, that has a queue pair.
//!
//! All RDMA devices of a host answer on UDP port 4791. A queue pair's number names its owner: its upper 10 bits are the
//! slot of the device that has it, leased for as long as the device is open. The lease is an abstract Unix socket with
//! the slot's name, which one process at a time can bind and which goes with the process, however it ends. No file, no
//! daemon, no root.
//!
//! Packets reach a slot by three routes:
//!
//! * From the same host, IPv4: the sender reads the slot out of the destination queue pair and sends to `127.77.x.y`,
//!   an address of the loopback network that the slot's socket alone is bound to. This is the fast path: no socket is
//!   shared. A slot has two more such addresses, `127.78.x.y` and `127.79.x.y`: *receive queues* (not those of queue
//!   pairs), over which senders spread connections with long messages. Acknowledgements do not queue behind those then,
//!   and two threads can receive (see `assistant`). A second Unix socket, which is never read, announces them.
//! * From elsewhere: all RDMA devices of an interface bind its address with `SO_REUSEPORT`, the kernel picks one of
//!   them by the packet's addresses and ports or, as a rule, by a filter that names one for all (see `steer`), and a
//!   process that gets packets for another slot hands them on to that slot's address, those of one datagram together.
//! * From the same host, IPv6, which has a single loopback address: handed on to the slot's address at once.
//!
//! A filter that steers each packet to the socket that has its queue pair would have to know all sockets of the group
//! by their index, and indexes change when a socket goes (the last one takes its index), so it would be right only
//! between such moments. Handing on is right at any time; a process that comes or goes costs at most the packets in its
//! queue, which are sent again.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with};

use crate::error::{Error, Result};
use crate::fork::Own;
use crate::wire::UDP_PORT;

/// Bits of a queue pair's number that count within a slot.
pub(crate) const INDEX_BITS: u32 = 14;
/// Slots of a host; slot 0 is never leased, as queue pairs 0 and 1 are special.
const SLOTS: u32 = 1 << (24 - INDEX_BITS);

/// A lease, and the socket through which packets are handed on to it.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) number: u32,
    /// Socket whose name announces the receive queues. Closed before the lease is; `None` where they are not offered.
    lanes: Option<Own<OwnedFd>>,
    pub(crate) socket: Own<OwnedFd>,
}

/// Name of a slot's socket.
pub(crate) fn name(slot: u32) -> Result<SocketAddrUnix> {
    abstract_name(&format!("tinyroce.{slot}"))
}

fn lanes_name(slot: u32) -> Result<SocketAddrUnix> {
    abstract_name(&format!("tinyroce.{slot}.lanes"))
}

fn abstract_name(name: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|e| Error::system("naming a socket", &e.into()))
}

fn unix_socket() -> Result<Own<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None);
    // Before it is bound: no child has one that is.
    socket.map(Own::new).map_err(|e| Error::system("opening a Unix socket", &e.into()))
}

/// Returns true if a slot's RDMA device takes packets by all its receive queues; the box of a lab, for one, has only
/// the first address.
pub(crate) fn has_lanes(slot: u32) -> bool {
    let connected = || Ok::<_, Error>(connect(unix_socket()?, &lanes_name(slot)?).is_ok());
    connected().unwrap_or(false)
}

/// The slot that has queue pair `qpn`.
pub(crate) fn of(qpn: u32) -> u32 {
    qpn >> INDEX_BITS
}

/// Addresses at which a slot takes packets of the same host. A connection's packets all take the same one; those but
/// the first are for long messages.
pub(crate) const LANES: usize = 3;

/// The address at which a slot takes packets of the same host, for a receive queue.
pub(crate) fn address(slot: u32, lane: usize) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(127, 77 + lane as u8, (slot >> 8) as u8, slot as u8), UDP_PORT))
}

impl Slot {
    /// Leases a free slot.
    ///
    /// # Errors
    /// `ENOSPC` where all are taken, or what the system refuses.
    pub(crate) fn lease() -> Result<Slot> {
        // From different numbers, so that a queue pair's number is not used again soon after its process has gone.
        let start = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        for i in 0..SLOTS - 1 {
            let number = 1 + (start.wrapping_add(i)) % (SLOTS - 1);
            let socket = unix_socket()?;
            match bind(&socket, &name(number)?) {
                Ok(()) => return Ok(Slot { number, socket, lanes: None }),
                Err(Errno::ADDRINUSE) => {}
                Err(e) => return Err(Error::system("binding a slot's Unix socket", &e.into())),
            }
        }
        Err(Error::new(libc::ENOSPC, format!("all {} cards of this host are taken", SLOTS - 1)))
    }

    /// Lets senders use the receive queues, which are listened to.
    ///
    /// # Errors
    /// The system's error where it refuses a socket or its name.
    pub(crate) fn offer_lanes(&mut self) -> Result<()> {
        let socket = unix_socket()?;
        bind(&socket, &lanes_name(self.number)?)
            .map_err(|e| Error::system("binding a slot's Unix socket", &e.into()))?;
        self.lanes = Some(socket);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_exclusive_and_ends() {
        let first = Slot::lease().expect("a free slot");
        let second = Slot::lease().expect("another");
        assert_ne!(first.number, second.number);
        let number = first.number;
        drop(first);
        let mut slot = Slot::lease().expect("the first again");
        assert_eq!(slot.number, number);
        // Its receive queues are there while they are offered. In the same test: a lease of another test would take the
        // number.
        assert!(!has_lanes(number));
        slot.offer_lanes().expect("a name of our own");
        assert!(has_lanes(number));
        drop(slot);
        assert!(!has_lanes(number));
    }

    #[test]
    fn numbers_and_addresses_name_their_slot() {
        assert_eq!(of(5 << INDEX_BITS | 17), 5);
        assert_eq!(address(0x203, 0).to_string(), "127.77.2.3:4791");
        assert_eq!(address(0x203, LANES - 1).to_string(), "127.79.2.3:4791");
    }
}
