//! A box between two queue pairs of this host: it shows every packet that passes, and may lose it.
//!
//! RDMA devices of a host send a packet to the address that the destination queue pair's number stands for (see
//! `lib/softroce/src/engine/slot.rs`). The box takes such an address, as a device would. Each end is connected to a
//! number of the box, which replaces it by the other end's number and sends the packet on. Addresses, ports and the
//! BTH differ then, so the ICRC has to be renewed.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Result, bail};
use softroce::wire::icrc::{Icrc, Route};
use softroce::wire::packet::ICRC_LEN;
use softroce::wire::{Packet, UDP_PORT};

use super::shown;
use crate::ranks::CannotRunHere;

/// As in softroce: the lower bits of a queue pair's number count within its slot.
const INDEX_BITS: u32 = 14;
const SLOTS: u32 = 1 << (24 - INDEX_BITS);

/// End that a packet comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    A,
    B,
}

/// Called for every packet, with the end that it comes from; returns true if the packet is lost.
pub(crate) type Loses = Box<dyn FnMut(Side, &Packet<'_>) -> bool + Send>;

/// Treatment of packets in the box.
pub(crate) struct Rules {
    /// True if the ICRC is computed anew for the changed headers.
    pub(crate) renews_icrc: bool,
    /// Packets that it loses.
    pub(crate) loses: Loses,
}

/// The box, until it is dropped.
pub(crate) struct Wire {
    slot: u32,
    address: SocketAddr,
    /// Shows other RDMA devices that the slot is taken.
    _lease: UnixDatagram,
    socket: Arc<UdpSocket>,
    lines: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

fn address(slot: u32) -> SocketAddr {
    SocketAddrV4::new(Ipv4Addr::new(127, 77, (slot >> 8) as u8, slot as u8), UDP_PORT).into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
    /// Takes a slot that no RDMA device has.
    pub(crate) fn lay() -> Result<Wire> {
        for slot in (1..SLOTS).rev() {
            let lease = match UnixDatagram::bind_addr(&UnixAddr::from_abstract_name(format!("tinyroce.{slot}"))?) {
                Ok(lease) => lease,
                Err(e) if e.kind() == ErrorKind::AddrInUse => continue,
                Err(e) => bail!(CannotRunHere(format!("leasing a slot: {e}"))),
            };
            let address = address(slot);
            let socket = UdpSocket::bind(address).map_err(|e| CannotRunHere(format!("listening on {address}: {e}")))?;
            return Ok(Wire {
                slot,
                address,
                _lease: lease,
                socket: Arc::new(socket),
                lines: Arc::default(),
                thread: None,
            });
        }
        bail!(CannotRunHere("all cards of this host are taken".to_owned()))
    }

    /// The queue pair's number that this end's peer has here.
    pub(crate) fn peer_of(&self, end: Side) -> u32 {
        self.slot << INDEX_BITS | end as u32
    }

    /// Carries packets between queue pairs `a` and `b`.
    pub(crate) fn carry(&mut self, a: u32, b: u32, rules: Rules) -> Result<()> {
        // The address that both ends know as their peer's.
        let out = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (socket, lines) = (self.socket.clone(), self.lines.clone());
        let from_b = self.peer_of(Side::B);
        self.thread = Some(std::thread::spawn(move || carry(&socket, &out, [a, b], from_b, rules, &lines)));
        Ok(())
    }

    /// The packets that passed, a line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        lock(&self.lines).clone()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // A datagram without bytes ends the thread.
        if let (Some(thread), Ok(_)) = (self.thread.take(), self.socket.send_to(&[], self.address)) {
            let _ = thread.join();
        }
    }
}

fn carry(
    socket: &UdpSocket,
    out: &UdpSocket,
    [a, b]: [u32; 2],
    from_b: u32,
    mut rules: Rules,
    lines: &Mutex<Vec<String>>,
) {
    let mut room = vec![0; 1 << 16];
    let mut start = None;
    loop {
        let Ok(len) = socket.recv(&mut room) else { return };
        let Some(bytes) = room.get_mut(..len).filter(|bytes| !bytes.is_empty()) else { return };
        let Ok(packet) = Packet::parse(bytes) else { continue };
        let (from, arrow, to) =
            if packet.headers.bth.dest_qpn == from_b { (Side::B, "A <- B", a) } else { (Side::A, "A -> B", b) };
        let time = start.get_or_insert_with(Instant::now).elapsed().as_micros();
        let lost = (rules.loses)(from, &packet);
        let mark = if lost { "   LOST" } else { "" };
        lock(lines).push(format!("{time:>6} us  {arrow}  {}{mark}", shown::packet(&packet)));
        if !lost {
            let dst = address(to >> INDEX_BITS);
            bytes[5..8].copy_from_slice(&to.to_be_bytes()[1..]);
            if let (true, Ok(src)) = (rules.renews_icrc, out.local_addr()) {
                let (body, icrc) = bytes.split_at_mut(len - ICRC_LEN);
                icrc.copy_from_slice(&Icrc::new(Route { src, dst }).seal(body, [], 0));
            }
            let _ = out.send_to(bytes, dst);
        }
    }
}
