//! Packets from other hosts come to a process that reads them.
//!
//! All RDMA devices of an interface listen on one address (see `slot`), and of sockets that share an address the kernel
//! picks one by a packet's addresses and ports: also one whose process was stopped, or that a child of a process that
//! has gone still holds. Its packets would wait there forever. So one device takes all that comes to an address, and
//! hands on what is for others. It is named by a filter of the group (`SO_ATTACH_REUSEPORT_CBPF`), as its index in the
//! kernel's list, and any device can become it at any time:
//!
//! - an RDMA device that opens does. It finds its index by packets to one index after the other, which the filter lets
//!   through, until one comes to it;
//! - one whose *canaries* do not come back does. Each RDMA device with a connection to another host sends some to
//!   itself every 0.1 s, from ports that were not used before, by the route that such packets take.
//!
//! An index changes when another RDMA device goes. If no socket has it then, the kernel picks by addresses and ports
//! again, which is right unless one of the processes does not run; then a canary is lost soon.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use socket2::{Domain, SockAddr, Socket, Type};

use super::sockets::{Listener, with_scope};
use super::{Shared, now, slot};
use crate::sync::lock;

/// Opcodes of no service: for the index that a packet names, and for the socket that takes all.
const PLACE: u8 = 0xff;
const CANARY: u8 = 0xfe;
/// Sockets of a group at most: as many as the host has RDMA devices.
const PLACES: u32 = 1024;
/// An index that no socket has: the kernel picks.
const NOBODY: u32 = u32::MAX;
/// Nanoseconds between two looks after canaries, and how many fly.
const EVERY: u64 = 100_000_000;
const CANARIES: u32 = 2;

/// Bytes of one of our packets: opcode, queue pair, index, the sender's secret, number.
const LEN: usize = 24;

/// A listener that packets of other hosts come to.
struct Watched {
    socket: usize,
    /// Canaries that left, and those that came back.
    sent: u32,
    back: u32,
}

/// State of an RDMA device about the route of packets of other hosts to it.
pub(super) struct Steer {
    /// Secret in our packets that tells them from unauthenticated ones.
    secret: u64,
    watched: Mutex<Vec<Watched>>,
    /// Number of the search under way, and that of the last search that ended with the index that it found.
    search: AtomicU32,
    found: AtomicU64,
    /// True once a queue pair takes packets of other hosts.
    remote: AtomicBool,
    /// Time of the next look after canaries, in nanoseconds of the monotonic clock; 0 is never.
    next: AtomicU64,
}

impl Steer {
    pub(super) fn new() -> Steer {
        let mut secret = [0; 8];
        // SAFETY: the buffer has the length given. Without random bytes the secret is the time.
        let n = unsafe { libc::getrandom(secret.as_mut_ptr().cast(), secret.len(), libc::GRND_NONBLOCK) };
        Steer {
            secret: if n == 8 { u64::from_ne_bytes(secret) } else { now() },
            watched: Mutex::default(),
            search: AtomicU32::new(0),
            found: AtomicU64::new(0),
            remote: AtomicBool::new(false),
            next: AtomicU64::new(0),
        }
    }

    fn packet(&self, opcode: u8, slot: u32, place: u32, number: u32) -> [u8; LEN] {
        let mut raw = [0; LEN];
        raw[0] = opcode;
        raw[4..8].copy_from_slice(&(slot << slot::INDEX_BITS).to_be_bytes());
        raw[8..12].copy_from_slice(&place.to_be_bytes());
        raw[12..20].copy_from_slice(&self.secret.to_be_bytes());
        raw[20..].copy_from_slice(&number.to_be_bytes());
        raw
    }

    /// Takes one of our own packets; `direct`: out of a socket, not handed on. `false` where it is a packet of RoCE, or
    /// for another RDMA device.
    pub(super) fn take(&self, bytes: &[u8], direct: bool) -> bool {
        let Some(&raw) = bytes.first_chunk::<LEN>().filter(|raw| raw[0] >= CANARY) else { return false };
        let word = |at: usize| u32::from_be_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let ours = u64::from(word(12)) << 32 | u64::from(word(16)) == self.secret;
        let (place, number) = (word(8), word(20));
        if raw[0] == PLACE {
            if ours && direct && number == self.search.load(Ordering::Relaxed) {
                // The first: a packet for an index that no socket has may come here as well.
                let found = u64::from(number) << 32 | u64::from(place);
                let before = self.found.load(Ordering::Relaxed);
                if before >> 32 != u64::from(number) {
                    self.found.store(found, Ordering::Relaxed);
                }
            }
            return true;
        }
        if ours && let Some(watched) = lock(&self.watched).iter_mut().find(|w| w.socket == number as usize) {
            watched.back += 1;
        }
        ours
    }
}

/// Steers packets to the listener's group to the socket with index `place` from here on, but those that name an index
/// themselves.
fn attach(listener: &Listener, place: u32) -> io::Result<()> {
    let statement = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0),
        libc::sock_filter { jf: 2, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, u32::from(PLACE)) },
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 8),
        // `BPF_A`, which libc does not have.
        statement(libc::BPF_RET | 0x10, 0),
        statement(libc::BPF_RET | libc::BPF_K, place),
    ];
    // SAFETY: all zeros are a filter without statements, also between its fields.
    let mut filter: libc::sock_fprog = unsafe { std::mem::zeroed() };
    (filter.len, filter.filter) = (program.len() as u16, program.as_mut_ptr());
    // SAFETY: the filter and its statements live until the call returns.
    let rc = unsafe {
        libc::setsockopt(
            listener.raw(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A socket of a port that was not used before, for packets from `ip` to itself.
fn outlet(ip: IpAddr, scope: u32) -> io::Result<Socket> {
    let socket = Socket::new(if ip.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 }, Type::DGRAM.nonblocking(), None)?;
    socket.bind(&SockAddr::from(with_scope(ip, 0, scope)))?;
    Ok(socket)
}

impl Shared {
    /// Takes all packets to a listener of an address that RDMA devices share, which no packet of this host comes to,
    /// and watches it.
    pub(super) fn steer(&self, socket: usize) {
        if let Some(listener) = self.listeners.get(socket)
            && !listener.local.ip().is_loopback()
            && self.take_all(socket)
        {
            lock(&self.steer.watched).push(Watched { socket, sent: 0, back: 0 });
        }
    }

    /// Begins to look after canaries, as a queue pair begins to take packets of other hosts.
    pub(super) fn expect_others(&self) {
        if !self.steer.remote.swap(true, Ordering::Relaxed) {
            let at = now();
            self.steer.next.store(at, Ordering::Relaxed);
            self.timer.at_latest(at);
        }
    }

    /// Makes this RDMA device take all that comes to the address. `false` where the kernel goes on to pick: it takes no
    /// filter, or lets no packet through from the address to itself.
    fn take_all(&self, socket: usize) -> bool {
        let Some(listener) = self.listeners.get(socket) else { return false };
        if let Err(e) = attach(listener, NOBODY) {
            log::debug!("{}: the kernel picks who takes packets: {e}", listener.local);
            return false;
        }
        let search = self.steer.search.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let Ok(outlet) = outlet(listener.local.ip(), self.scope) else { return false };
        for place in 0..PLACES {
            let packet = self.steer.packet(PLACE, 0, place, search);
            if outlet.send_to(&packet, &SockAddr::from(listener.local)).is_err() {
                return false;
            }
            self.receive(Some(socket));
            let found = self.steer.found.load(Ordering::Relaxed);
            if found >> 32 == u64::from(search) {
                let place = found as u32;
                log::debug!("{}: takes all packets, as number {place}", listener.local);
                return attach(listener, place).is_ok();
            }
        }
        log::debug!("{}: the kernel picks who takes packets: none comes from the address to itself", listener.local);
        false
    }

    /// Looks after canaries, if it is time. For the engine's thread.
    pub(super) fn look_after_canaries(&self, now: u64) {
        let next = self.steer.next.load(Ordering::Relaxed);
        if next == 0 || now < next {
            if next != 0 {
                self.timer.at_latest(next);
            }
            return;
        }
        let mut lost = Vec::new();
        let mut fresh = Vec::new();
        for watched in lock(&self.steer.watched).iter_mut() {
            if watched.back < watched.sent {
                lost.push(watched.socket);
            }
            (watched.sent, watched.back) = (0, 0);
            fresh.push(watched.socket);
        }
        for socket in lost {
            // A packet of the search may be lost on a busy machine; nothing comes of looking forever.
            if !self.take_all(socket) && !self.take_all(socket) {
                lock(&self.steer.watched).retain(|watched| watched.socket != socket);
            }
        }
        for socket in fresh {
            let sent = self.send_canaries(socket);
            if let Some(watched) = lock(&self.steer.watched).iter_mut().find(|w| w.socket == socket) {
                watched.sent = sent;
            }
        }
        let next = super::now() + EVERY;
        self.steer.next.store(next, Ordering::Relaxed);
        self.timer.at_latest(next);
    }

    /// Sends canaries; returns how many left: none where the address is gone or the interface is down.
    fn send_canaries(&self, socket: usize) -> u32 {
        let Some(listener) = self.listeners.get(socket) else { return 0 };
        let to: SocketAddr = listener.local;
        let packet = self.steer.packet(CANARY, self.slot.number, 0, socket as u32);
        let send = |_: &u32| {
            outlet(to.ip(), self.scope).and_then(|outlet| outlet.send_to(&packet, &SockAddr::from(to))).is_ok()
        };
        (0..CANARIES).filter(send).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_packets_are_known_and_no_others() {
        let (ours, theirs) = (Steer::new(), Steer::new());
        lock(&ours.watched).push(Watched { socket: 7, sent: 1, back: 0 });
        assert!(ours.take(&ours.packet(CANARY, 1, 0, 7), false) && lock(&ours.watched)[0].back == 1);
        assert!(!ours.take(&theirs.packet(CANARY, 1, 0, 7), true), "for another card");
        ours.search.store(3, Ordering::Relaxed);
        for (packet, direct) in [
            (theirs.packet(PLACE, 0, 5, 3), true),
            (ours.packet(PLACE, 0, 5, 2), true),
            (ours.packet(PLACE, 0, 5, 3), false),
        ] {
            assert!(ours.take(&packet, direct), "nobody else's either");
            assert_eq!(ours.found.load(Ordering::Relaxed), 0);
        }
        assert!(ours.take(&ours.packet(PLACE, 0, 5, 3), true) && ours.take(&ours.packet(PLACE, 0, 6, 3), true));
        assert_eq!(ours.found.load(Ordering::Relaxed), 3 << 32 | 5);
        assert!(!ours.take(&[4; 64], true) && !ours.take(&[PLACE; 8], true));
        assert_eq!(lock(&ours.watched)[0].back, 1);
    }
}
