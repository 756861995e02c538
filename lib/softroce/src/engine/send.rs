//! From packets to datagrams: ICRCs, batches, system calls.
//!
//! Packets of the same length that go to one destination leave as one datagram of many segments (UDP segmentation
//! offload): one pass through the kernel's network stack instead of one for each packet. Payload is not copied here:
//! the kernel gathers it from registered memory.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};

use rustix::net::addr::SocketAddrArg;

use super::control::{Control, Marks};
use super::faults::To;
use super::sockaddr::{self, Raw};
use super::trace::Trace;
use super::{Shared, forward, slot};
use crate::counters::COUNTING;
use crate::path::Path;
use crate::qp::{Body, Machine, OutPacket, Outbox};
use crate::wire::Bth;
use crate::wire::icrc::{Icrc, Route};
use crate::wire::packet::ICRC_LEN;

/// Segments of a datagram at most: what kernels before 6.9 take.
const MAX_SEGMENTS: usize = 64;
/// Bytes of UDP payload at most: 2^16 - 1 less the headers of IPv6 and UDP.
const MAX_DATAGRAM: usize = 65_535 - 48;
/// Payload up to here is copied to its headers: less work than another element.
const COPY_UP_TO: usize = 256;
/// Bytes of a message that is long enough for its connection to get a receive queue.
const LONG: u32 = 64 << 10;

/// Route of packets to a queue pair's peer.
#[derive(Debug, Clone)]
pub(super) struct Way {
    how: How,
    marks: Marks,
    icrc: Icrc,
    /// The peer's slot on this host, until the connection has its receive queue there; `None` after that and for other
    /// peers.
    unspread: Option<u32>,
}

#[derive(Debug, Clone)]
enum How {
    /// A socket of ours, and the address that it sends to.
    Udp(RawFd, SocketAddr),
    /// Handed on to the RDMA device with the slot: over IPv6, which has a single address of this host.
    Slot(u32),
}

impl Way {
    /// The route by `path` to queue pair `qpn`; `None` where the address that the path begins at is not ours any more.
    pub(super) fn new(shared: &Shared, path: &Path, qpn: u32) -> Option<Way> {
        let sender = shared.senders.iter().find(|s| s.local.ip() == path.src)?;
        let scope = shared.scope;
        let dst = super::sockets::with_scope(path.dst, crate::wire::UDP_PORT, scope);
        let (how, dst, unspread) = match (path.local, path.dst.is_ipv4()) {
            (true, true) => {
                let dst = slot::address(slot::of(qpn), 0);
                (How::Udp(sender.raw(), dst), dst, Some(slot::of(qpn)))
            }
            (true, false) => (How::Slot(slot::of(qpn)), dst, None),
            (false, _) => (How::Udp(sender.raw(), dst), dst, None),
        };
        Some(Way { how, marks: Marks::of(path), icrc: Icrc::new(Route { src: sender.local, dst }), unspread })
    }

    /// Takes the next receive queue at the peer, once, when the connection is about to send its first long message:
    /// none of its packets is under way then, so none is overtaken.
    pub(super) fn spread(&mut self, shared: &Shared, machine: &Machine) {
        let (Some(slot), How::Udp(_, dst)) = (self.unspread, &mut self.how) else { return };
        if !machine.begins(LONG) {
            return;
        }
        self.unspread = None;
        if slot::has_lanes(slot) {
            *dst = slot::address(slot, shared.next_lane());
            self.icrc = Icrc::new(Route { dst: *dst, ..*self.icrc.route() });
        }
    }
}

/// Datagrams in the making. One for each thread that sends.
#[derive(Default)]
pub(super) struct Sending {
    /// Headers, short payloads, padding and ICRCs, in the order of the wire.
    bytes: Vec<u8>,
    /// Parts of the datagrams: bytes of `bytes` by their position, or memory.
    parts: Vec<Part>,
    datagrams: Vec<Datagram>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    names: Vec<Raw>,
    controls: Vec<Control>,
}

enum Part {
    Own(usize, usize),
    Memory(*const u8, usize),
}

struct Datagram {
    parts: std::ops::Range<usize>,
    segments: usize,
    /// Bytes of each segment but the last.
    segment: usize,
    last: usize,
    bytes: usize,
}

impl Sending {
    /// Sends all packets of `out`; those without their own path take `way`. `true` where that had to wait, because the
    /// kernel's queue was full.
    ///
    /// # Safety
    /// The pieces of the outbox are valid: the lock of the table is held that gave them out.
    pub(super) unsafe fn flush(&mut self, shared: &Shared, out: &Outbox, way: Option<&mut Way>) -> bool {
        let Some(first) = out.packets.first() else { return false };
        if first.path.is_none() {
            return way.is_some_and(|way| self.pack(shared, out, &out.packets, way));
        }
        let mut waited = false;
        // Datagrams: each for itself.
        for packet in &out.packets {
            let Some(path) = &packet.path else { continue };
            let Some(qpn) = Bth::dest_qpn_of(packet.head()) else { continue };
            if let Some(mut way) = Way::new(shared, path, qpn) {
                waited |= self.pack(shared, out, std::slice::from_ref(packet), &mut way);
            }
        }
        waited
    }

    fn pack(&mut self, shared: &Shared, out: &Outbox, packets: &[OutPacket], way: &mut Way) -> bool {
        self.bytes.clear();
        self.parts.clear();
        self.datagrams.clear();
        let counts = matches!(way.how, How::Udp(_, dst) if dst.is_ipv4());
        let most = if matches!(way.how, How::Slot(_)) { forward::MOST - forward::HEADER } else { MAX_DATAGRAM };
        for packet in packets {
            if shared.faults.loses() {
                continue;
            }
            let total = packet.head().len() + packet.len as usize + usize::from(packet.pad) + ICRC_LEN;
            let joins = shared.segmentation()
                && self.datagrams.last().is_some_and(|d| {
                    d.segments < MAX_SEGMENTS && d.last == d.segment && total <= d.segment && d.bytes + total <= most
                });
            if !joins {
                let at = self.parts.len();
                self.datagrams.push(Datagram { parts: at..at, segments: 0, segment: total, last: 0, bytes: 0 });
            }
            let index = self.datagrams.last().map_or(0, |d| d.segments);
            let flip = shared.faults.flips(packet.len as usize);
            self.add(out, packet, &mut way.icrc, if counts { index as u16 } else { 0 }, flip);
            let end = self.parts.len();
            if let Some(d) = self.datagrams.last_mut() {
                (d.segments, d.last, d.bytes, d.parts.end) = (d.segments + 1, total, d.bytes + total, end);
            }
        }
        COUNTING.sent_pkts.add(self.datagrams.iter().map(|d| d.segments as u64).sum());
        if let Some(trace) = &shared.faults.trace {
            self.trace(trace, way.icrc.route(), counts);
        }
        match way.how {
            _ if shared.faults.delay > 0 => self.hold(shared, way),
            How::Udp(fd, dst) => return self.send_udp(shared, fd, &dst, way.marks),
            How::Slot(slot) => self.send_on(shared, slot, way.icrc.route()),
        }
        false
    }

    /// Adds a packet's parts. `id` is the IPv4 identification that it will have: its index in its datagram.
    /// `flip`: a bit of the payload that is sent wrong, for tests.
    fn add(&mut self, out: &Outbox, packet: &OutPacket, icrc: &mut Icrc, id: u16, flip: Option<usize>) {
        let zeros = &[0u8; 3][..usize::from(packet.pad)];
        self.own(packet.head());
        let crc = match packet.body {
            _ if flip.is_some() => {
                let mut body = match packet.body {
                    Body::Copied(from, to) => out.bytes.get(from..to).unwrap_or_default().to_vec(),
                    Body::Memory(from, to) => {
                        let pieces = out.pieces.get(from..to).unwrap_or_default();
                        // SAFETY: `flush`'s caller holds the lock of the table.
                        pieces.iter().flat_map(|piece| unsafe { piece.bytes() }).copied().collect()
                    }
                };
                if let Some((bit, byte)) = flip.and_then(|bit| Some((bit, body.get_mut(bit / 8)?))) {
                    *byte ^= 1 << (bit % 8);
                }
                self.own(&body);
                icrc.seal(packet.head(), [&body[..], zeros], id)
            }
            Body::Copied(from, to) => {
                let body = out.bytes.get(from..to).unwrap_or_default();
                if body.len() <= COPY_UP_TO {
                    self.own(body);
                } else {
                    self.parts.push(Part::Memory(body.as_ptr(), body.len()));
                }
                icrc.seal(packet.head(), [body, zeros], id)
            }
            Body::Memory(from, to) => {
                let pieces = out.pieces.get(from..to).unwrap_or_default();
                for piece in pieces {
                    // SAFETY: `flush`'s caller holds the lock of the table.
                    let bytes = unsafe { piece.bytes() };
                    if bytes.len() <= COPY_UP_TO {
                        self.own(bytes);
                    } else {
                        self.parts.push(Part::Memory(bytes.as_ptr(), bytes.len()));
                    }
                }
                // SAFETY: as above.
                let bodies = pieces.iter().map(|piece| unsafe { piece.bytes() });
                icrc.seal(packet.head(), bodies.chain(std::iter::once(zeros)), id)
            }
        };
        self.own(zeros);
        self.own(&crc);
    }

    /// Adds bytes of ours; they join those before them, of the same datagram.
    fn own(&mut self, bytes: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        let first = self.datagrams.last().map_or(0, |d| d.parts.start);
        let joins = self.parts.len() > first;
        match self.parts.last_mut() {
            Some(Part::Own(_, end)) if joins => *end = self.bytes.len(),
            _ => self.parts.push(Part::Own(start, self.bytes.len())),
        }
    }

    fn fill_iovecs(&mut self) {
        self.iovecs.clear();
        for part in &self.parts {
            let (at, len) = match *part {
                Part::Own(from, to) => (self.bytes.get(from..to).unwrap_or_default().as_ptr(), to - from),
                Part::Memory(at, len) => (at, len),
            };
            self.iovecs.push(libc::iovec { iov_base: at.cast_mut().cast(), iov_len: len });
        }
    }

    /// The bytes of a datagram.
    fn bytes_of(&self, d: &Datagram) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(d.bytes);
        for part in self.parts.get(d.parts.clone()).unwrap_or_default() {
            match *part {
                Part::Own(from, to) => bytes.extend_from_slice(self.bytes.get(from..to).unwrap_or_default()),
                // SAFETY: `flush`'s caller holds the lock of the table.
                Part::Memory(at, len) => bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at, len) }),
            }
        }
        bytes
    }

    fn trace(&self, trace: &Trace, route: &Route, counts: bool) {
        for d in &self.datagrams {
            for (i, packet) in self.bytes_of(d).chunks(d.segment).enumerate() {
                trace.packet(route, if counts { i as u16 } else { 0 }, std::iter::once(packet));
            }
        }
    }

    /// Copies the datagrams, which the engine's thread sends when their time has come.
    fn hold(&self, shared: &Shared, way: &Way) {
        let now = super::now();
        for d in &self.datagrams {
            let mut bytes = self.bytes_of(d);
            let to = match way.how {
                How::Udp(fd, dst) => To::Udp(fd, dst, way.marks),
                How::Slot(slot) => {
                    bytes.splice(0..0, forward::header(way.icrc.route(), d.segment));
                    To::Slot(slot)
                }
            };
            let until = shared.faults.hold(now, to, bytes);
            shared.timer.at_latest(until);
        }
    }

    /// Sends the datagrams by socket `fd`. `true` where it had to wait.
    fn send_udp(&mut self, shared: &Shared, fd: RawFd, dst: &SocketAddr, marks: Marks) -> bool {
        self.fill_iovecs();
        self.names.clear();
        self.names.resize(1, sockaddr::EMPTY);
        let name_len = self.names.first_mut().map_or(0, |name| sockaddr::store(dst, name));
        self.controls.clear();
        for d in &self.datagrams {
            let mut control = Control::new(marks, dst);
            if d.segments > 1 {
                control.segments(d.segment as u16);
            }
            self.controls.push(control);
        }
        self.headers.clear();
        for (d, control) in self.datagrams.iter().zip(&mut self.controls) {
            // SAFETY: all zeros are a header without anything.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_name = self.names.as_mut_ptr().cast();
            header.msg_hdr.msg_namelen = name_len;
            header.msg_hdr.msg_iov = self.iovecs.as_mut_ptr().wrapping_add(d.parts.start);
            header.msg_hdr.msg_iovlen = d.parts.len() as _;
            control.attach(&mut header.msg_hdr);
            self.headers.push(header);
        }
        let (mut done, mut flags) = (0, libc::MSG_DONTWAIT);
        while let Some(rest) = self.headers.get_mut(done..).filter(|rest| !rest.is_empty()) {
            // SAFETY: the headers name vectors of `self`, unchanged since, and memory that `flush`'s caller vouches
            // for.
            let sent = unsafe { libc::sendmmsg(fd, rest.as_mut_ptr(), rest.len() as u32, flags) };
            if sent > 0 {
                done += sent as usize;
                continue;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::WouldBlock if flags != 0 => {
                    flags = 0;
                    continue;
                }
                _ => {}
            }
            // What is not sent is lost, as a wire loses it: reliable queue pairs send again.
            let segmented = self.datagrams.get(done).is_some_and(|d| d.segments > 1);
            shared.send_failed(&error, dst, segmented);
            done += 1;
        }
        flags == 0
    }

    fn send_on(&mut self, shared: &Shared, slot: u32, route: &Route) {
        self.fill_iovecs();
        for d in &self.datagrams {
            let mut header = forward::header(route, d.segment);
            let parts = self.iovecs.get(d.parts.clone()).unwrap_or_default();
            let mut all = Vec::with_capacity(parts.len() + 1);
            all.push(libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: header.len() });
            all.extend_from_slice(parts);
            // SAFETY: as in `send_udp`.
            unsafe { hand_on(shared, slot, &mut all) };
        }
    }
}

/// Sends the packets that were held back until now.
pub(super) fn release(shared: &Shared, now: u64) {
    let (due, next) = shared.faults.release(now);
    for (to, bytes) in due {
        match to {
            To::Udp(fd, dst, marks) => {
                let mut name = sockaddr::EMPTY;
                let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
                let mut control = Control::new(marks, &dst);
                // SAFETY: all zeros are a header without anything.
                let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
                header.msg_namelen = sockaddr::store(&dst, &mut name);
                header.msg_name = (&raw mut name).cast();
                (header.msg_iov, header.msg_iovlen) = (&raw mut vector, 1);
                control.attach(&mut header);
                // SAFETY: bytes, name and control messages outlive the call.
                unsafe { libc::sendmsg(fd, &raw const header, 0) };
            }
            To::Slot(slot) => {
                let mut all = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
                // SAFETY: the bytes outlive the call.
                unsafe { hand_on(shared, slot, &mut all) };
            }
        }
    }
    if let Some(next) = next {
        shared.timer.at_latest(next);
    }
}

/// Hands a datagram on to a slot. One that no process takes is lost.
///
/// # Safety
/// The vectors name memory that can be read.
pub(super) unsafe fn hand_on(shared: &Shared, slot: u32, iovecs: &mut [libc::iovec]) {
    // SAFETY: all zeros are a header without anything.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iovecs.as_mut_ptr();
    header.msg_iovlen = iovecs.len() as _;
    let mut address = sockaddr::EMPTY;
    let name;
    let fd = match &shared.carrier {
        Some(carrier) => {
            header.msg_namelen = sockaddr::store(&slot::address(slot, 0), &mut address);
            header.msg_name = (&raw mut address).cast();
            carrier.as_raw_fd()
        }
        None => {
            let Ok(unix) = slot::name(slot) else { return };
            name = unix.as_any();
            header.msg_name = name.as_ptr().cast_mut().cast();
            header.msg_namelen = name.addr_len();
            shared.slot.socket.as_raw_fd()
        }
    };
    // SAFETY: the name outlives the call, the vectors by the caller.
    let sent = unsafe { libc::sendmsg(fd, &raw const header, libc::MSG_DONTWAIT) };
    if sent < 0 {
        log::trace!("handing packets on to slot {slot}: {}", io::Error::last_os_error());
    }
}
