//! From datagrams to queue pairs.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use super::cell::Cell;
use super::sockaddr::{self, Raw};
use super::sockets::Listener;
use super::{Shared, forward, send, slot};
use crate::memory::Table;
use crate::wire::icrc::{Icrc, Route};
use crate::wire::{Bth, Packet};

/// Datagrams of one system call, and the room for each: several segments join to one (UDP receive offload).
const BATCH: usize = 8;
const ROOM: usize = 1 << 16;
/// Datagrams of one system call where they are mostly long.
const LONG_BATCH: usize = 2;
/// System calls in a row before answers are sent and other sockets are served.
const ROUNDS: usize = 2;
/// Bytes after which answers are sent, also in the middle of a batch: a sender waits for them with a full window.
const ANSWERED: usize = 128 << 10;
/// Peers whose CRC's beginning is kept.
const MAX_PEERS: usize = 512;

/// State of a receiving side: one thread at a time holds it.
pub(super) struct Receiving {
    buffers: Vec<u8>,
    names: [Raw; BATCH],
    controls: [[u64; 8]; BATCH],
    icrcs: HashMap<Route, Icrc>,
    /// Queue pairs to which something came that is not answered.
    touched: Vec<Arc<Cell>>,
    /// True if the receiving thread waits for the one that sends, see `polling`.
    pub(super) waits: bool,
    /// Bytes that came since this was last set to 0, and how many of them were answered.
    bytes: usize,
    answered: usize,
}

impl Shared {
    /// The address that a peer means by one that a packet came to: for the slot's, which no peer knows of, the RDMA
    /// device's own. A datagram's receiver finds it in the GRH (UCX drops datagrams that it does not).
    fn public(&self, local: SocketAddr) -> SocketAddr {
        let of_slot = |at: SocketAddr| (0..slot::LANES).any(|lane| at == slot::address(self.slot.number, lane));
        if !of_slot(local) {
            return local;
        }
        let mut own = self.listeners.iter().map(|listener| listener.local).filter(|own| !of_slot(*own));
        own.find(SocketAddr::is_ipv4).unwrap_or(local)
    }
}

impl Receiving {
    pub(super) fn new() -> Receiving {
        Receiving {
            buffers: vec![0; BATCH * ROOM],
            names: [sockaddr::EMPTY; BATCH],
            controls: [[0; 8]; BATCH],
            icrcs: HashMap::new(),
            touched: Vec::new(),
            waits: false,
            bytes: 0,
            answered: 0,
        }
    }

    /// Serves the queue pairs that packets came for since the last call.
    fn answer(&mut self, shared: &Shared, table: &Table) {
        self.answered = self.bytes;
        let leaves_requests = shared.program_sends();
        for cell in self.touched.drain(..) {
            if leaves_requests {
                cell.answer(shared, table);
            } else {
                cell.serve(shared, table, self.waits);
            }
        }
    }

    /// Ends a time slice: serves the queue pairs that packets came for; returns how many bytes came in it.
    pub(super) fn finish(&mut self, shared: &Shared, table: &Table) -> usize {
        self.answer(shared, table);
        self.answered = 0;
        std::mem::take(&mut self.bytes)
    }

    /// Takes what waits in a UDP socket. `true` where there may be more.
    pub(super) fn drain_udp(&mut self, shared: &Shared, listener: &Listener, table: &Table) -> bool {
        let (fd, local) = (listener.raw(), listener.local);
        // Long messages are taken in small parts: what comes by the other receive queues does not wait long.
        let (rounds, batch) = if listener.lane > 0 { (1, LONG_BATCH) } else { (ROUNDS, BATCH) };
        for _ in 0..rounds {
            let mut iovecs: [libc::iovec; BATCH] = std::array::from_fn(|i| libc::iovec {
                iov_base: self.buffers.as_mut_ptr().wrapping_add(i * ROOM).cast(),
                iov_len: ROOM,
            });
            // SAFETY: all zeros are headers without anything.
            let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
            for (i, header) in headers.iter_mut().enumerate() {
                let header = &mut header.msg_hdr;
                header.msg_name = self.names.as_mut_ptr().wrapping_add(i).cast();
                header.msg_namelen = size_of::<Raw>() as _;
                header.msg_iov = iovecs.as_mut_ptr().wrapping_add(i);
                header.msg_iovlen = 1;
                header.msg_control = self.controls.as_mut_ptr().wrapping_add(i).cast();
                header.msg_controllen = size_of::<[u64; 8]>() as _;
            }
            // SAFETY: names, vectors and control buffers belong to `self` and the frame, each of the length given.
            let n = unsafe {
                libc::recvmmsg(fd, headers.as_mut_ptr(), batch as u32, libc::MSG_DONTWAIT, std::ptr::null_mut())
            };
            if n <= 0 {
                if n < 0 {
                    let error = io::Error::last_os_error();
                    if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                        log::debug!("receiving on {local}: {error}");
                    }
                }
                return false;
            }
            let buffers = std::mem::take(&mut self.buffers);
            for (i, header) in headers.iter().take(n as usize).enumerate() {
                let len = header.msg_len as usize;
                let Some(src) = self.names.get(i).and_then(sockaddr::load) else { continue };
                let Some(bytes) = buffers.get(i * ROOM..i * ROOM + len.min(ROOM)) else { continue };
                if listener.own && forward::is_one(bytes) {
                    if let Some((route, segment, bytes)) = forward::parse(bytes) {
                        self.packets(shared, &route, segment, bytes, false, table);
                    }
                    continue;
                }
                let segment = segment_of(&header.msg_hdr).unwrap_or(len);
                self.packets(shared, &Route { src, dst: local }, segment, bytes, true, table);
                if self.bytes - self.answered >= ANSWERED {
                    self.answer(shared, table);
                }
            }
            self.buffers = buffers;
            if (n as usize) < batch {
                return false;
            }
        }
        true
    }

    /// Takes what waits in the slot's Unix socket.
    pub(super) fn drain_unix(&mut self, shared: &Shared, fd: RawFd, table: &Table) -> bool {
        for _ in 0..ROUNDS * BATCH {
            let room = self.buffers.get_mut(..ROOM).unwrap_or_default();
            // SAFETY: the buffer is writable for the length given.
            let n = unsafe { libc::recv(fd, room.as_mut_ptr().cast(), room.len(), libc::MSG_DONTWAIT) };
            if n < 0 {
                return false;
            }
            let buffers = std::mem::take(&mut self.buffers);
            if let Some((route, segment, bytes)) = buffers.get(..n as usize).and_then(forward::parse) {
                self.packets(shared, &route, segment, bytes, false, table);
            }
            self.buffers = buffers;
        }
        true
    }

    /// Takes packets of `segment` bytes each. `hands_on`: those of others are handed on.
    fn packets(&mut self, shared: &Shared, route: &Route, segment: usize, bytes: &[u8], hands_on: bool, table: &Table) {
        if self.icrcs.len() >= MAX_PEERS && !self.icrcs.contains_key(route) {
            self.icrcs.clear();
        }
        let shown = Route { dst: shared.public(route.dst), ..*route };
        let icrc = self.icrcs.entry(*route).or_insert_with(|| Icrc::new(*route));
        let now = super::now();
        self.bytes += bytes.len();
        // Packets of one datagram are mostly of one queue pair.
        let mut cell: Option<(u32, Arc<Cell>)> = None;
        let segment = segment.max(Bth::LEN);
        // Packets before this one were handed on to another RDMA device.
        let mut handed_on = 0;
        for (i, packet) in bytes.chunks(segment).enumerate() {
            let Some(qpn) = Bth::dest_qpn_of(packet) else { continue };
            if shared.steer.take(packet, hands_on) {
                continue;
            }
            let owner = slot::of(qpn);
            if owner == shared.slot.number {
                let Some(packet) = checked(shared, icrc, packet, i as u16) else { continue };
                if cell.as_ref().is_none_or(|(number, _)| *number != qpn) {
                    cell = shared.cell(qpn).map(|cell| (qpn, cell));
                    if let Some((_, new)) = &cell
                        && !self.touched.iter().any(|other| Arc::ptr_eq(other, new))
                    {
                        self.touched.push(new.clone());
                    }
                }
                if let Some((_, cell)) = &cell {
                    cell.receive(&packet, &shown, table, now);
                }
            } else if hands_on && i >= handed_on {
                let packets = forward::run(bytes.get(i * segment..).unwrap_or_default(), segment, forward::MOST, owner);
                handed_on = i + packets.len().div_ceil(segment);
                let mut header = forward::header(route, segment);
                let mut parts = [
                    libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: header.len() },
                    libc::iovec { iov_base: packets.as_ptr().cast_mut().cast(), iov_len: packets.len() },
                ];
                // SAFETY: both live until the call returns, and are only read.
                unsafe { send::hand_on(shared, owner, &mut parts) };
            }
        }
    }
}

/// Parses a packet; `None` where its ICRC is wrong or it is malformed.
fn checked<'a>(shared: &Shared, icrc: &mut Icrc, bytes: &'a [u8], id: u16) -> Option<Packet<'a>> {
    if let Some(trace) = &shared.faults.trace {
        trace.packet(icrc.route(), id, std::iter::once(bytes));
    }
    if !icrc.check(bytes, id) {
        log::debug!("a packet from {} with a wrong ICRC", icrc.route().src);
        return None;
    }
    Packet::parse(bytes).inspect_err(|e| log::debug!("from {}: {e}", icrc.route().src)).ok()
}

/// The length of segments that joined to a datagram.
fn segment_of(header: &libc::msghdr) -> Option<usize> {
    // SAFETY: the kernel filled the header and its control buffer, which the caller still has.
    unsafe {
        let mut control = libc::CMSG_FIRSTHDR(header);
        while !control.is_null() {
            if (*control).cmsg_level == libc::SOL_UDP && (*control).cmsg_type == libc::UDP_GRO {
                let size = libc::CMSG_DATA(control).cast::<i32>().read_unaligned();
                return usize::try_from(size).ok().filter(|size| *size > 0);
            }
            control = libc::CMSG_NXTHDR(header, control);
        }
    }
    None
}
