//! Two queue pairs on a wire in memory that loses, doubles and reorders, under its own clock.

mod acks;
mod strangers;
mod windows;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::memory::{Access, Backing, Region};
use crate::queue::{Remote, SendFlags, SendOp, Sge};

const ALL: Access = Access::from_bits(0xf);

/// A small generator: the same seed, the same faults.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Probabilities in percent.
#[derive(Debug, Clone, Copy)]
struct Faults {
    lose: u64,
    double: u64,
    reorder: u64,
}

const NONE: Faults = Faults { lose: 0, double: 0, reorder: 0 };

struct End {
    machine: Machine,
    table: Table,
    memory: Vec<u8>,
    key: u32,
    cq: Arc<Cq>,
    events: Arc<Events>,
}

impl End {
    fn new(qpn: u32, service: Service, bytes: usize, access: Access) -> End {
        let cq = Cq::new(100_000, 0, None, None, None);
        let events = Arc::new(Events::new().expect("eventfd"));
        let mut memory = vec![0u8; bytes + 8];
        let skip = memory.as_ptr().align_offset(8);
        let mut table = Table::default();
        let region =
            Region { pd: 1, at: memory[skip..].as_mut_ptr(), len: bytes, iova: 0, access, backing: Backing::Host };
        let key = table.insert(region).expect("room");
        let machine = Machine::new(Parts {
            qpn,
            pd: 1,
            service,
            mtu: 1024,
            capacity: Capacity { sends: 1000, recvs: 1000, send_sges: 4, recv_sges: 4, inline: 64 },
            signal_all: true,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            events: events.clone(),
        });
        End { machine, table, memory, key, cq, events }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.memory.as_ptr().align_offset(8)..]
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        let skip = self.memory.as_ptr().align_offset(8);
        self.memory[skip + at..skip + at + bytes.len()].copy_from_slice(bytes);
    }

    fn connect(&mut self, peer: u32, psn: u32, peer_psn: u32, change: impl Fn(&mut QpAttr)) {
        use AttrMask as M;
        let any = std::net::Ipv4Addr::LOCALHOST.into();
        let path = crate::path::Path {
            src: any,
            dst: any,
            sgid_index: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            local: true,
        };
        let mut attr = QpAttr {
            port: 1,
            access: ALL,
            qkey: 5,
            path: Some(path),
            path_mtu: 256,
            timeout: 10,
            retry_cnt: 7,
            rnr_retry: 7,
            rq_psn: peer_psn,
            sq_psn: psn,
            max_rd_atomic: 3,
            max_dest_rd_atomic: 3,
            min_rnr_timer: 1,
            dest_qpn: peer,
            ..QpAttr::default()
        };
        change(&mut attr);
        let service = self.machine.parts.service;
        let own = if service == Service::Ud { M::QKEY } else { M::ACCESS };
        let (mut rtr, mut rts) = (M::STATE, M::STATE | M::SQ_PSN);
        if service != Service::Ud {
            rtr |= M::PATH | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        }
        if service == Service::Rc {
            rtr |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
            rts |= M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_RD_ATOMIC;
        }
        for (state, mask) in
            [(State::Init, M::STATE | M::PKEY_INDEX | M::PORT | own), (State::Rtr, rtr), (State::Rts, rts)]
        {
            attr.state = state;
            self.machine.modify(&attr, mask).expect("a way to RTS");
        }
    }

    fn completions(&self) -> Vec<Wc> {
        std::iter::from_fn(|| self.cq.poll_one()).collect()
    }

    fn send(&mut self, id: u64, op: SendOp, at: u64, len: u32, flags: SendFlags) {
        let sges = [
            Sge { addr: at, len: len / 3, lkey: self.key },
            Sge { addr: at + u64::from(len / 3), len: len - len / 3, lkey: self.key },
        ];
        // An atomic's result lies in one element.
        let sges = if len == 8 { &[Sge { addr: at, len, lkey: self.key }][..] } else { &sges[..] };
        self.machine.post_send(&SendRequest { id, op, sges, flags, to: None }).expect("posted");
    }

    fn recv(&mut self, id: u64, at: u64, len: u32) {
        let sges = [Sge { addr: at, len, lkey: self.key }];
        self.machine.post_recv(&RecvRequest { id, sges: &sges }).expect("posted");
    }
}

/// A packet on the wire: its time of arrival, its number, the index of its end, its bytes.
type Arrival = Reverse<(Nanos, u64, usize, Vec<u8>)>;

/// Two ends and what is between them.
struct World {
    ends: [End; 2],
    now: Nanos,
    wire: BinaryHeap<Arrival>,
    count: u64,
    dice: Dice,
    faults: Faults,
}

impl World {
    fn new(service: Service, faults: Faults, seed: u64) -> World {
        World::with(service, faults, seed, |_| {})
    }

    fn with(service: Service, faults: Faults, seed: u64, change: impl Fn(&mut QpAttr)) -> World {
        let mut ends = [End::new(0x11, service, 1 << 16, ALL), End::new(0x22, service, 1 << 16, ALL)];
        // Both wrap soon.
        ends[0].connect(0x22, 0xff_fff0, 0xff_ffe0, &change);
        ends[1].connect(0x11, 0xff_ffe0, 0xff_fff0, &change);
        World { ends, now: 0, wire: BinaryHeap::new(), count: 0, dice: Dice(seed), faults }
    }

    /// Lets an end send what it wants to.
    fn serve(&mut self, i: usize) {
        let mut out = Outbox::new(5);
        loop {
            let End { machine, table, .. } = &mut self.ends[i];
            let more = machine.service(&mut Turn { now: self.now, memory: table, out: &mut out });
            for packet in &out.packets {
                let mut bytes = out.bytes_of(packet);
                bytes.extend([0; 4]);
                let copies = 1 + u64::from(self.dice.roll(100) < self.faults.double);
                for _ in 0..copies {
                    if self.dice.roll(100) < self.faults.lose {
                        continue;
                    }
                    let late = if self.dice.roll(100) < self.faults.reorder { self.dice.roll(30_000) } else { 0 };
                    self.count += 1;
                    self.wire.push(Reverse((self.now + 1000 + late, self.count, 1 - i, bytes.clone())));
                }
            }
            out.clear();
            if !more {
                return;
            }
        }
    }

    /// The state of both ends, as text for failed assertions.
    fn describe(&self) -> String {
        self.ends
            .iter()
            .map(|end| format!("at {}: {:#?}\n{:#?}\n", self.now, end.machine.req, end.machine.resp))
            .collect()
    }

    /// Runs until nothing is under way and no timer runs; `false` where that takes more than `steps`.
    fn run(&mut self, steps: usize) -> bool {
        for _ in 0..steps {
            self.serve(0);
            self.serve(1);
            let arrival = self.wire.peek().map(|Reverse((at, ..))| *at);
            let timer = self.ends.iter().filter_map(|end| end.machine.next_timer()).min();
            let Some(next) = [arrival, timer].into_iter().flatten().min() else { return true };
            self.now = self.now.max(next);
            if arrival == Some(next) {
                self.deliver();
            }
        }
        false
    }

    /// Lets the packet that comes next arrive; `false` where none is under way.
    fn deliver(&mut self) -> bool {
        let Some(Reverse((at, _, to, bytes))) = self.wire.pop() else { return false };
        let route =
            Route { src: "127.0.0.1:50000".parse().expect("address"), dst: "127.0.0.1:4791".parse().expect("address") };
        self.now = self.now.max(at);
        let packet = Packet::parse(&bytes).expect("what is sent is parsed");
        let End { machine, table, .. } = &mut self.ends[to];
        let mut none = Outbox::new(0);
        machine.receive(&packet, &route, &mut Turn { now: self.now, memory: table, out: &mut none });
        true
    }
}

/// A request of the property test, with a length.
#[derive(Debug, Clone, Copy)]
enum Request {
    Send(u32),
    SendImm(u32),
    Write(u32),
    WriteImm(u32),
    Read(u32),
    Add(u64),
    Swap(u64),
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let len = prop_oneof![Just(0u32), Just(1), Just(256), Just(257), 0..1500u32];
    let one = prop_oneof![
        len.clone().prop_map(Request::Send),
        len.clone().prop_map(Request::SendImm),
        len.clone().prop_map(Request::Write),
        len.clone().prop_map(Request::WriteImm),
        len.prop_map(Request::Read),
        (1..100u64).prop_map(Request::Add),
        (0..3u64).prop_map(Request::Swap),
    ];
    prop::collection::vec(one, 1..20)
}

fn faults() -> impl Strategy<Value = Faults> {
    (0..30u64, 0..20u64, 0..40u64).prop_map(|(lose, double, reorder)| Faults { lose, double, reorder })
}

fn flags() -> SendFlags {
    SendFlags { signaled: true, ..SendFlags::default() }
}

/// Memory of each end: a message `i` of ours lies at `OWN + i * SLOT`, what comes for it at `FOR + i * SLOT`.
const SLOT: u64 = 1536;
const OWN: u64 = 64;
const FOR: u64 = OWN + 20 * SLOT;

proptest! {
    /// Whatever the wire does, each message arrives once, in order, and memory is what a perfect wire makes of it.
    #[test]
    fn a_bad_wire_does_what_a_good_one_does(
        requests in requests(), faults in faults(), seed: u64, window: bool, depth in 1u8..4, late_recvs: bool, fence: bool
    ) {
        let mut world = World::with(Service::Rc, faults, seed, |attr| {
            attr.max_rd_atomic = depth;
            attr.path_mtu = if window { 256 } else { 512 };
        });
        let pattern = |i: usize, len: u32| (0..len).map(|b| (i as u32 * 31 + b * 7 + 1) as u8).collect::<Vec<_>>();
        let [ours, theirs] = &mut world.ends;
        let rkey = theirs.key;
        let (mut counter, mut sends) = (0u64, Vec::new());
        let mut expected = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            let (own, target) = (OWN + i as u64 * SLOT, FOR + i as u64 * SLOT);
            let remote = Remote { addr: target, rkey };
            let word = Remote { addr: 0, rkey };
            let imm = [i as u8, 1, 2, 3];
            let flags = SendFlags { fence, ..flags() };
            match *request {
                Request::Send(len) | Request::SendImm(len) => {
                    ours.set(own as usize, &pattern(i, len));
                    let with = matches!(request, Request::SendImm(_));
                    ours.send(i as u64, if with { SendOp::SendImm(imm) } else { SendOp::Send }, own, len, flags);
                    sends.push((i, len, with.then_some(imm), WcOpcode::Recv));
                    expected.push((1, target, pattern(i, len)));
                }
                Request::Write(len) | Request::WriteImm(len) => {
                    ours.set(own as usize, &pattern(i, len));
                    let with = matches!(request, Request::WriteImm(_));
                    let op = if with { SendOp::WriteImm(remote, imm) } else { SendOp::Write(remote) };
                    ours.send(i as u64, op, own, len, flags);
                    if with {
                        sends.push((i, len, Some(imm), WcOpcode::RecvWriteImm));
                    }
                    expected.push((1, target, pattern(i, len)));
                }
                Request::Read(len) => {
                    theirs.set(target as usize, &pattern(i, len));
                    ours.send(i as u64, SendOp::Read(remote), own, len, flags);
                    expected.push((0, own, pattern(i, len)));
                }
                Request::Add(add) => {
                    ours.send(i as u64, SendOp::FetchAdd { remote: word, add }, own, 8, flags);
                    expected.push((0, own, counter.to_ne_bytes().to_vec()));
                    counter += add;
                }
                Request::Swap(compare) => {
                    let op = SendOp::CompareSwap { remote: word, compare, swap: 1000 + i as u64 };
                    ours.send(i as u64, op, own, 8, flags);
                    expected.push((0, own, counter.to_ne_bytes().to_vec()));
                    if counter == compare {
                        counter = 1000 + i as u64;
                    }
                }
            }
        }
        expected.push((1, 0, counter.to_ne_bytes().to_vec()));
        if late_recvs {
            world.run(30);
        }
        for &(i, ..) in &sends {
            world.ends[1].recv(i as u64, FOR + i as u64 * SLOT, SLOT as u32);
        }
        let ended = world.run(100_000);
        prop_assert!(ended, "comes to an end: {}", world.describe());
        let done = world.ends[0].completions();
        prop_assert!(done.iter().all(|wc| wc.status == Status::Success), "{:?}", done);
        prop_assert_eq!(done.iter().map(|wc| wc.id).collect::<Vec<_>>(), (0..requests.len() as u64).collect::<Vec<_>>());
        let came = world.ends[1].completions();
        prop_assert_eq!(
            came.iter().map(|wc| (wc.id as usize, wc.byte_len, wc.imm, wc.opcode)).collect::<Vec<_>>(),
            sends
        );
        for (end, at, bytes) in expected {
            prop_assert_eq!(&world.ends[end].bytes()[at as usize..at as usize + bytes.len()], &bytes[..]);
        }
    }

    /// Messages of an unreliable connection come whole and in order, or not at all.
    #[test]
    fn unreliable_messages_come_whole(lens in prop::collection::vec(1u32..1400, 1..20), faults in faults(), seed: u64) {
        let mut world = World::new(Service::Uc, faults, seed);
        for (i, &len) in lens.iter().enumerate() {
            world.ends[1].recv(i as u64, FOR + i as u64 * SLOT, SLOT as u32);
            world.ends[0].set((OWN + i as u64 * SLOT) as usize, &vec![i as u8 + 1; len as usize]);
            world.ends[0].send(i as u64, SendOp::SendImm([i as u8, 0, 0, 0]), OWN + i as u64 * SLOT, len, flags());
        }
        prop_assert!(world.run(10_000));
        prop_assert_eq!(world.ends[0].completions().len(), lens.len());
        for wc in world.ends[1].completions() {
            let i = wc.imm.expect("immediate")[0];
            prop_assert_eq!(wc.byte_len, lens[usize::from(i)]);
            let at = (FOR + wc.id * SLOT) as usize;
            prop_assert!(world.ends[1].bytes()[at..at + wc.byte_len as usize].iter().all(|b| *b == i + 1));
        }
    }

    /// No packet, however built, writes outside what is registered, or is more than refused.
    #[test]
    fn strangers_packets_do_no_harm(
        code in 0u8..32, words in any::<[u64; 4]>(), psn in 0u32..40, payload in prop::collection::vec(any::<u8>(), 0..300)
    ) {
        let mut end = End::new(0x22, Service::Rc, 4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        end.connect(0x11, 0, 10, |_| {});
        let mut bytes = vec![code, 0, 0xff, 0xff, 0, 0, 0, 0x22, 0x80];
        bytes.extend(&psn.to_be_bytes()[1..]);
        for word in words {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(&payload);
        if let Ok(packet) = Packet::parse(&bytes) {
            let route = Route { src: "127.0.0.1:1".parse().expect("a"), dst: "127.0.0.1:2".parse().expect("a") };
            let mut out = Outbox::new(100);
            let mut turn = Turn { now: 0, memory: &end.table, out: &mut out };
            end.machine.receive(&packet, &route, &mut turn);
            end.machine.service(&mut turn);
        }
        prop_assert!(end.memory.iter().all(|b| *b == 0), "the key was not known");
    }
}

/// Statuses of the completions of both ends, and the second end's state, after `change` has posted its requests.
fn outcome(change: impl Fn(&mut World)) -> (Vec<Status>, Vec<Status>, State) {
    let mut world = World::with(Service::Rc, NONE, 1, |attr| {
        attr.retry_cnt = 2;
        attr.rnr_retry = 2;
    });
    change(&mut world);
    assert!(world.run(10_000));
    let statuses = |end: &End| end.completions().iter().map(|wc| wc.status).collect();
    (statuses(&world.ends[0]), statuses(&world.ends[1]), world.ends[1].machine.attr.state)
}

#[test]
fn failures_have_the_statuses_of_the_specification() {
    use Status::*;
    let remote = |world: &World, addr| Remote { addr, rkey: world.ends[1].key };
    let bad_key = outcome(|w| {
        let to = Remote { rkey: 1, ..remote(w, 0) };
        w.ends[0].send(0, SendOp::Write(to), 0, 600, flags());
        w.ends[0].send(1, SendOp::Send, 0, 6, flags());
    });
    assert_eq!(bad_key, (vec![RemoteAccess, Flushed], vec![], State::Err));
    let out_of_bounds = outcome(|w| {
        let to = remote(w, (1 << 16) - 100);
        w.ends[0].send(0, SendOp::Read(to), 0, 101, flags());
    });
    assert_eq!(out_of_bounds, (vec![RemoteAccess], vec![], State::Err));
    let no_receive = outcome(|w| w.ends[0].send(0, SendOp::Send, 0, 600, flags()));
    assert_eq!(no_receive, (vec![RnrRetriesExceeded], vec![], State::Rts));
    let too_long = outcome(|w| {
        w.ends[1].recv(0, 0, 299);
        w.ends[1].recv(1, 0, 299);
        w.ends[0].send(0, SendOp::Send, 0, 300, flags());
    });
    assert_eq!(too_long, (vec![RemoteInvalidRequest], vec![LocalLength, Flushed], State::Err));
    let not_ours = outcome(|w| {
        w.ends[0].send(0, SendOp::Send, 1 << 20, 300, flags());
    });
    assert_eq!(not_ours, (vec![LocalProtection], vec![], State::Rts));
    let receive_not_theirs = outcome(|w| {
        w.ends[1].recv(0, 1 << 20, 299);
        w.ends[0].send(0, SendOp::Send, 0, 200, flags());
    });
    assert_eq!(receive_not_theirs, (vec![RemoteOperation], vec![LocalProtection], State::Err));
    let dead = outcome(|w| {
        w.faults.lose = 100;
        for id in 0..2 {
            w.ends[0].send(id, SendOp::Send, 0, 20, flags());
        }
    });
    assert_eq!(dead, (vec![RetriesExceeded, Flushed], vec![], State::Rts));
    let misaligned = outcome(|w| {
        let word = remote(w, 4);
        w.ends[0].send(0, SendOp::FetchAdd { remote: word, add: 1 }, 0, 8, flags());
    });
    assert_eq!(misaligned, (vec![RemoteInvalidRequest], vec![], State::Err));
}

#[test]
fn errors_wait_for_what_was_posted_before() {
    let mut world = World::new(Service::Rc, NONE, 1);
    world.ends[1].recv(7, 0, 2000);
    world.ends[0].send(0, SendOp::Send, 0, 2000, flags());
    world.ends[0].send(1, SendOp::Send, 1 << 20, 300, flags());
    world.ends[0].send(2, SendOp::Send, 0, 300, flags());
    assert!(world.run(1000));
    let all: Vec<_> = world.ends[0].completions().iter().map(|wc| (wc.id, wc.status)).collect();
    assert_eq!(all, [(0, Status::Success), (1, Status::LocalProtection), (2, Status::Flushed)]);
}

#[test]
fn an_access_error_is_an_event_of_the_responder() {
    let mut world = World::new(Service::Rc, NONE, 1);
    world.ends[0].send(0, SendOp::Write(Remote { addr: 0, rkey: 3 }), 0, 10, flags());
    assert!(world.run(1000));
    let event = world.ends[1].events.pop().expect("an event");
    assert_eq!((event.kind, event.affected), (EventKind::QpAccessError, Affected::Qp(0x22)));
}

#[test]
fn a_drained_queue_says_so_and_goes_on() {
    let mut world = World::new(Service::Rc, NONE, 1);
    world.ends[1].recv(0, 0, 2000);
    world.ends[1].recv(1, 0, 2000);
    world.ends[0].send(0, SendOp::Send, 0, 2000, flags());
    world.serve(0);
    let sqd = QpAttr { state: State::Sqd, sqd_notify: true, ..QpAttr::default() };
    world.ends[0].machine.modify(&sqd, AttrMask::STATE | AttrMask::SQD_NOTIFY).expect("to SQD");
    world.ends[0].send(1, SendOp::Send, 0, 2000, flags());
    assert!(world.run(1000));
    assert_eq!(world.ends[0].events.pop().expect("an event").kind, EventKind::SqDrained);
    assert_eq!(world.ends[0].completions().len(), 1, "what was not begun waits");
    let rts = QpAttr { state: State::Rts, ..QpAttr::default() };
    world.ends[0].machine.modify(&rts, AttrMask::STATE).expect("to RTS");
    assert!(world.run(1000));
    assert_eq!(world.ends[0].completions().len(), 1);
}

#[test]
fn a_nak_asks_for_what_is_lost() {
    // Without a timer, nothing but the responder's NAK of the gap brings the second of three packets again.
    let mut world = World::with(Service::Rc, NONE, 1, |attr| attr.timeout = 0);
    let [ours, theirs] = &mut world.ends;
    theirs.recv(0, 0, 1000);
    ours.send(0, SendOp::Send, 0, 700, flags());
    world.serve(0);
    world.wire.retain(|Reverse((_, number, ..))| *number != 2);
    assert!(world.run(1000));
    assert_eq!(world.ends[0].completions().len(), 1);
}
