//! An entry point of the fuzzer: an unauthenticated sender's packets to a queue pair, see [`crate::fuzzing`].
//!
//! The input is read as a list of steps: packets of the unauthenticated sender, receives and sends that the program
//! posts, changes of state, time. The memory around it has guards, regions without rights, one that windows alone open,
//! and one of another protection domain. After all steps no byte has changed but where a right of the queue pair and a
//! region or window, or a posted request, allowed it; and READs were answered with bytes of the one region that may be
//! read.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::*;
use crate::memory::{Access, Asker, Backing, Bind, Region, WindowKind};
use crate::path::Path;
use crate::psn::Psn;
use crate::queue::request::SendOp;
use crate::queue::{Datagram, Remote, SendFlags, Sge};
use crate::wire::packet::{MAX_HEADERS, padding};
use crate::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Headers, Ieth, ImmDt, Nak, Opcode, Operation, Position, Reth, Syndrome,
};

/// Bytes between regions, and of a region; more than four packets.
const GAP: usize = 64;
const REGION: usize = 2048;
const BYTES: usize = GAP + COUNT * (REGION + GAP);
/// Regions: one that the unauthenticated sender may write to, one that it may read, one that only our requests write
/// to, and another domain's.
const WRITABLE: usize = 0;
const READABLE: usize = 1;
const LOCAL: usize = 2;
const FOREIGN: usize = 3;
/// A region that the unauthenticated sender may write to through windows alone: the first quarter and the second.
const WINDOWED: usize = 4;
const QUARTER: usize = REGION / 4;
const COUNT: usize = 5;
/// Content: of the readable region, and of everything that no peer may see.
const OPEN: u8 = 0x11;
const SECRET: u8 = 0xee;
/// Slots of the local region for posted requests: half for receives, half for answers to READs and atomics.
const SLOTS: usize = 6;
const SLOT: usize = REGION / SLOTS;
const QPN: u32 = 0x22;
const QKEY: u32 = 5;
/// Packets that one call of the machine may make before that counts as endless.
const ENDLESS: usize = 10_000;

fn region_range(region: usize) -> Range<usize> {
    let start = GAP + region * (REGION + GAP);
    start..start + REGION
}

/// The bytes that window `n` is bound to.
fn quarter(n: usize) -> Range<usize> {
    let start = region_range(WINDOWED).start + n * QUARTER;
    start..start + QUARTER
}

/// The address of a region's first byte in requests.
fn iova(region: usize) -> u64 {
    0x1_0000 * (region as u64 + 1)
}

/// The steps as bytes; zeros behind their end.
struct Steps<'a>(&'a [u8]);

impl Steps<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn take(&mut self, n: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

struct Victim {
    machine: Machine,
    table: Table,
    keys: [u32; COUNT],
    /// Keys of the windows: of any queue pair, and of this one.
    windows: [u32; 2],
    arena: Vec<u64>,
    /// Bytes that the arena must hold where no one may write.
    expected: Vec<u8>,
    /// True for requests that are posted, by their slot in the local region.
    posted: [bool; SLOTS],
    /// Rights that the queue pair gives to peers.
    access: Access,
    /// True once the writable region is gone.
    deregistered: bool,
    /// True for the windows that the program has taken back.
    unbound: [bool; 2],
    cq: Arc<Cq>,
    srq: Option<Arc<Srq>>,
    out: Outbox,
    now: Nanos,
}

thread_local! {
    /// Kept, as it opens a descriptor.
    static EVENTS: RefCell<Option<Arc<Events>>> = const { RefCell::new(None) };
}

impl Victim {
    fn new(service: Service, shares_receives: bool, access: Access) -> Victim {
        let events = EVENTS
            .with_borrow_mut(|kept| kept.get_or_insert_with(|| Arc::new(Events::new().expect("a descriptor"))).clone());
        events.retain(|_| false);
        let mut arena = vec![u64::from_ne_bytes([SECRET; 8]); BYTES.div_ceil(8)];
        let base = arena.as_mut_ptr().cast::<u8>();
        let mut table = Table::default();
        let all = Access::from_bits(0xf);
        let keys = [
            (WRITABLE, 1, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC),
            (READABLE, 1, Access::REMOTE_READ),
            (LOCAL, 1, Access::LOCAL_WRITE),
            (FOREIGN, 2, all),
            (WINDOWED, 1, Access::LOCAL_WRITE | Access::MW_BIND),
        ]
        .map(|(region, pd, access)| {
            let at = base.wrapping_add(region_range(region).start);
            table
                .insert(Region { pd, at, len: REGION, iova: iova(region), access, backing: Backing::Host })
                .expect("room")
        });
        let windows = [WindowKind::Any, WindowKind::OneQp].map(|kind| {
            let rkey = table.add_window(1, kind).expect("room");
            let addr = iova(WINDOWED) + if kind == WindowKind::Any { 0 } else { QUARTER as u64 };
            let access = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
            let to = Bind { rkey, lkey: keys[WINDOWED], addr, len: QUARTER as u64, access };
            table.bind(Asker { pd: 1, qpn: QPN }, to).expect("it fits");
            rkey
        });
        // Each posted request completes once; every run would pay for a queue of 1024 completions.
        let cq = Cq::new(2 * SLOTS, 0, None, None, None);
        let srq = shares_receives.then(|| Srq::new(1, SLOTS, 2, 0, Some(events.clone())));
        let parts = Parts {
            qpn: QPN,
            pd: 1,
            service,
            mtu: 256,
            capacity: Capacity { sends: SLOTS as u32, recvs: SLOTS as u32, send_sges: 2, recv_sges: 2, inline: 64 },
            signal_all: true,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: srq.clone(),
            events,
        };
        let mut victim = Victim {
            machine: Machine::new(parts),
            table,
            keys,
            windows,
            arena,
            expected: Vec::new(),
            posted: [false; SLOTS],
            access,
            deregistered: false,
            unbound: [false; 2],
            cq,
            srq,
            out: Outbox::new(16),
            now: 1,
        };
        victim.bytes_mut(READABLE).fill(OPEN);
        victim.expected = victim.bytes().to_vec();
        victim.connect();
        victim
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the arena's own bytes, initialised; the machine is not running.
        unsafe { std::slice::from_raw_parts(self.arena.as_ptr().cast(), BYTES) }
    }

    fn bytes_mut(&mut self, region: usize) -> &mut [u8] {
        // SAFETY: as above.
        let all = unsafe { std::slice::from_raw_parts_mut(self.arena.as_mut_ptr().cast::<u8>(), BYTES) };
        &mut all[region_range(region)]
    }

    fn path() -> Path {
        let any = std::net::Ipv4Addr::LOCALHOST.into();
        Path { src: any, dst: any, sgid_index: 0, traffic_class: 0, hop_limit: 64, flow_label: 0, local: true }
    }

    fn connect(&mut self) {
        use AttrMask as M;
        let service = self.machine.parts.service;
        let mut attr = QpAttr {
            port: 1,
            access: self.access,
            qkey: QKEY,
            path: Some(Victim::path()),
            path_mtu: 256,
            timeout: 10,
            retry_cnt: 2,
            rnr_retry: 2,
            // Both wrap soon.
            rq_psn: 0xff_fff8,
            sq_psn: 0xff_fffc,
            max_rd_atomic: 2,
            max_dest_rd_atomic: 2,
            min_rnr_timer: 1,
            dest_qpn: 0x11,
            ..QpAttr::default()
        };
        let own = if service == Service::Ud { M::QKEY } else { M::ACCESS };
        let (mut rtr, mut rts) = (M::STATE, M::STATE | M::SQ_PSN);
        if service != Service::Ud {
            rtr |= M::PATH | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        }
        if service == Service::Rc {
            rtr |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
            rts |= M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_RD_ATOMIC;
        }
        let init = M::STATE | M::PKEY_INDEX | M::PORT | own;
        for (state, mask) in [(State::Init, init), (State::Rtr, rtr), (State::Rts, rts)] {
            attr.state = state;
            self.machine.modify(&attr, mask).expect("a way to RTS");
        }
    }

    /// Marks bytes that no one may write to any more: they stay as they are now.
    fn close(&mut self, range: Range<usize>) {
        let now = self.bytes()[range.clone()].to_vec();
        self.expected[range].copy_from_slice(&now);
    }

    fn slot_range(slot: usize) -> Range<usize> {
        let start = region_range(LOCAL).start + slot * SLOT;
        start..start + SLOT
    }

    fn close_slot(&mut self, slot: usize) {
        if std::mem::take(&mut self.posted[slot]) {
            self.close(Victim::slot_range(slot));
        }
    }

    /// Takes completions: memory of their requests belongs to the program again.
    fn poll(&mut self) {
        while let Some(wc) = self.cq.poll_one() {
            self.close_slot(wc.id as usize);
        }
    }

    fn receive(&mut self, bytes: &[u8]) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        let route = Route { src: ([127, 0, 0, 1], 50_000).into(), dst: ([127, 0, 0, 1], 4791).into() };
        let mut none = Outbox::new(0);
        self.machine.receive(&packet, &route, &mut Turn { now: self.now, memory: &self.table, out: &mut none });
        assert!(none.packets.is_empty(), "answers wait for their turn");
    }

    fn serve(&mut self) {
        let mut made = 0;
        loop {
            self.out.clear();
            let more = self.machine.service(&mut Turn { now: self.now, memory: &self.table, out: &mut self.out });
            made += self.out.packets.len();
            assert!(made < ENDLESS && (!more || !self.out.packets.is_empty()), "it never ends");
            for packet in &self.out.packets {
                let mut head = packet.head();
                let bth = Bth::parse(&mut head).expect("a header");
                let opcode = Opcode::parse(bth.opcode).expect("an opcode");
                assert_eq!(packet.pad, padding(packet.len as usize));
                if opcode.operation == Operation::ReadResponse {
                    let Body::Copied(from, to) = packet.body else { panic!("an answer is copied") };
                    assert!(self.access.contains(Access::REMOTE_READ), "without the right");
                    assert!(self.out.bytes[from..to].iter().all(|b| *b == OPEN), "bytes of others");
                }
            }
            if !more {
                return;
            }
        }
    }

    /// A packet as the steps describe it: its fields are near to those that the queue pair expects.
    fn made(&mut self, steps: &mut Steps<'_>) {
        let code = steps.byte();
        let service = Opcode::code(self.machine.parts.service, Operation::Send, Position::First) & 0xe0;
        let code = if code & 0x80 != 0 { code } else { service | code & 0x1f };
        let Some(opcode) = Opcode::parse(code) else { return };
        let flags = steps.byte();
        let near = i32::from(steps.byte() as i8);
        let base = if opcode.is_request() { self.machine.resp.expected } else { self.machine.req.una };
        let psn = Psn::new(base.get().wrapping_add_signed(near));
        let target = usize::from(flags >> 2 & 3);
        let (rkey, target) = match flags & 0x10 {
            0 => (self.keys[target], target),
            _ => match steps.word() {
                window @ 0..2 => (self.windows[usize::from(window)], WINDOWED),
                other => (u32::from(other), target),
            },
        };
        let offset = if flags & 0x20 == 0 { 0 } else { i64::from(steps.word() as i16) };
        let va = iova(target).wrapping_add_signed(offset);
        let len = if opcode.has_payload() {
            match steps.byte() {
                0xff => 256,
                short => usize::from(short),
            }
        } else {
            0
        };
        let dma = if flags & 0x40 == 0 { len as u32 } else { u32::from(steps.word()) };
        let dma = if flags & 0x80 == 0 { dma } else { dma.rotate_right(8) };
        let fill = steps.byte();
        let (bth, service) = (
            Bth {
                opcode: code,
                solicited: flags & 1 != 0,
                pad: padding(len),
                pkey: 0xffff,
                dest_qpn: QPN,
                ack_req: flags & 2 != 0,
                psn,
            },
            opcode.service,
        );
        let syndrome = match fill % 8 {
            0 => Syndrome::Nak(Nak::Sequence),
            1 => Syndrome::Rnr(fill >> 3),
            2 => Syndrome::Nak(Nak::RemoteAccess),
            _ => Syndrome::Ack(fill >> 3),
        };
        let headers = Headers {
            deth: (service == Service::Ud).then_some(Deth { qkey: QKEY, src_qpn: 7 }),
            reth: opcode.has_reth().then_some(Reth { va, rkey, len: dma }),
            atomic: opcode.has_atomic().then_some(AtomicEth {
                va,
                rkey,
                swap_or_add: u64::from(fill),
                compare: u64::from(dma),
            }),
            aeth: opcode.has_aeth().then_some(Aeth { syndrome, msn: dma & 0xff_ffff }),
            atomic_ack: (opcode.operation == Operation::AtomicAck)
                .then_some(AtomicAckEth { original: u64::from(fill) }),
            imm: opcode.has_imm().then_some(ImmDt([fill; 4])),
            ieth: (opcode.operation == Operation::SendInv).then_some(Ieth { rkey }),
            ..Headers::new(bth)
        };
        let mut raw = [0; MAX_HEADERS];
        let n = headers.build(&mut raw);
        let mut bytes = raw[..n].to_vec();
        bytes.resize(n + len, fill);
        bytes.resize(n + len + usize::from(bth.pad) + 4, 0);
        self.receive(&bytes);
    }

    fn sges(&self, steps: &mut Steps<'_>, slot: usize) -> [Sge; 2] {
        let split = u64::from(steps.byte()) % SLOT as u64;
        let addr = iova(LOCAL) + (slot * SLOT) as u64;
        let lkey = self.keys[LOCAL];
        let rest = SLOT as u64 - split;
        [Sge { addr, len: split as u32, lkey }, Sge { addr: addr + split, len: rest as u32, lkey }]
    }

    fn post_recv(&mut self, steps: &mut Steps<'_>) {
        let slot = usize::from(steps.byte()) % (SLOTS / 2);
        let sges = self.sges(steps, slot);
        if self.posted[slot] {
            return;
        }
        let request = RecvRequest { id: slot as u64, sges: &sges };
        self.posted[slot] = true;
        let posted = match &self.srq {
            // SAFETY: the regions live as long as the queue.
            Some(srq) => unsafe { srq.post_recv(&request) },
            None => self.machine.post_recv(&request),
        };
        if posted.is_err() {
            self.close_slot(slot);
        }
    }

    fn post_send(&mut self, steps: &mut Steps<'_>) {
        let kind = steps.byte();
        let slot = SLOTS / 2 + usize::from(kind >> 4) % (SLOTS / 2);
        if self.posted[slot] {
            return;
        }
        let remote = Remote { addr: 64, rkey: 9 };
        let mut sges = self.sges(steps, slot);
        let mut count = 2;
        let op = match kind % 8 {
            0 => SendOp::Send,
            1 => SendOp::SendImm([1; 4]),
            2 => SendOp::SendInv(3),
            3 => SendOp::Write(remote),
            4 => SendOp::WriteImm(remote, [2; 4]),
            5 => SendOp::Read(remote),
            6 => SendOp::CompareSwap { remote, compare: 1, swap: 2 },
            _ => SendOp::FetchAdd { remote, add: 1 },
        };
        if kind % 8 > 5 {
            (sges[0].len, count) = (8, 1);
        }
        let to = (self.machine.parts.service == Service::Ud).then(|| Datagram {
            path: Arc::new(Victim::path()),
            qpn: 1,
            qkey: QKEY,
        });
        let flags = SendFlags { signaled: true, fence: kind & 8 != 0, ..SendFlags::default() };
        self.posted[slot] = true;
        if self.machine.post_send(&SendRequest { id: slot as u64, op, sges: &sges[..count], flags, to }).is_err() {
            self.close_slot(slot);
        }
    }

    fn control(&mut self, steps: &mut Steps<'_>) {
        let to = |state| QpAttr { state, ..QpAttr::default() };
        let by = Asker { pd: 1, qpn: QPN };
        match steps.byte() % 10 {
            0 => {
                self.table.remove(self.keys[WRITABLE]);
                self.close(region_range(WRITABLE));
                self.deregistered = true;
            }
            1 => drop(self.machine.modify(&to(State::Sqd), AttrMask::STATE)),
            2 => drop(self.machine.modify(&to(State::Rts), AttrMask::STATE)),
            3 => drop(self.machine.modify(&to(State::Err), AttrMask::STATE)),
            4 => {
                self.machine.modify(&to(State::Reset), AttrMask::STATE).expect("from every state");
                let first = if self.srq.is_some() { SLOTS / 2 } else { 0 };
                (first..SLOTS).for_each(|slot| self.close_slot(slot));
                self.connect();
            }
            5 => self.machine.hurry(),
            6 => drop(self.table.remove(self.keys[READABLE])),
            7 => drop(self.table.remove(self.keys[LOCAL])),
            8 => {
                let rkey = self.windows[0];
                let nothing = Bind { rkey, lkey: 0, addr: 0, len: 0, access: Access::default() };
                self.table.bind(by, nothing).expect("always");
                self.close(quarter(0));
                self.unbound[0] = true;
            }
            _ if self.table.invalidate(self.windows[1], by).is_ok() => {
                self.close(quarter(1));
                self.unbound[1] = true;
            }
            // The unauthenticated sender was first.
            _ => {}
        }
    }

    /// Panics unless memory is as it must be.
    fn check(&mut self) {
        let remote = Access::REMOTE_WRITE.bits() | Access::REMOTE_ATOMIC.bits();
        if self.access.bits() & remote != 0 {
            if !self.deregistered {
                self.close(region_range(WRITABLE));
            }
            for n in 0..2 {
                if !self.unbound[n] {
                    self.close(quarter(n));
                }
            }
        }
        (0..SLOTS).for_each(|slot| self.close_slot(slot));
        assert!(self.bytes() == self.expected, "bytes were written without a right");
    }
}

/// Runs a queue pair against any packets of an unauthenticated sender: nothing panics, runs forever, or reaches memory
/// without a right.
pub fn roce_responder(data: &[u8]) {
    let mut steps = Steps(data);
    let how = steps.byte();
    let service = [Service::Rc, Service::Rc, Service::Uc, Service::Ud][usize::from(how & 3)];
    let access = Access::from_bits(u32::from(how >> 3) & 0xe);
    let mut victim = Victim::new(service, how & 4 != 0, access);
    while !steps.0.is_empty() {
        match steps.byte() % 8 {
            0 => {
                let len = usize::from(steps.byte());
                let bytes = steps.take(len).to_vec();
                victim.receive(&bytes);
            }
            1..=3 => victim.made(&mut steps),
            4 => victim.post_recv(&mut steps),
            5 => victim.post_send(&mut steps),
            6 => {
                victim.now += u64::from(steps.byte()) << 16;
                victim.serve();
                victim.poll();
            }
            _ => victim.control(&mut steps),
        }
    }
    victim.serve();
    victim.check();
}
