//! Packets from the peer's address that the peer did not send, or sent long ago: they end nothing.

use super::*;
use crate::psn::Psn;
use crate::queue::event::AsyncEvent;
use crate::wire::aeth::NO_CREDITS;
use crate::wire::packet::{MAX_HEADERS, padding};
use crate::wire::{Aeth, AtomicAckEth, AtomicEth, Bth, Headers, Nak, Opcode, Operation, Position, Reth, Syndrome};

const WORD: Remote = Remote { addr: 8, rkey: 0 };

fn headers(operation: Operation, position: Position, psn: Psn) -> Headers {
    let opcode = Opcode::code(Service::Rc, operation, position);
    Headers::new(Bth { opcode, solicited: false, pad: 0, pkey: 0xffff, dest_qpn: 0, ack_req: true, psn })
}

fn only(operation: Operation, psn: Psn) -> Headers {
    headers(operation, Position::Only, psn)
}

impl World {
    /// An end takes a packet now.
    fn forge(&mut self, to: usize, mut headers: Headers, payload: &[u8]) {
        headers.bth.pad = padding(payload.len());
        let mut raw = [0; MAX_HEADERS];
        let n = headers.build(&mut raw);
        let mut bytes = raw[..n].to_vec();
        bytes.extend(payload);
        bytes.resize(bytes.len() + usize::from(headers.bth.pad) + 4, 0);
        let packet = Packet::parse(&bytes).expect("a packet");
        let route = Route { src: ([127, 0, 0, 1], 50_000).into(), dst: ([127, 0, 0, 1], 4791).into() };
        let End { machine, table, .. } = &mut self.ends[to];
        let mut none = Outbox::new(0);
        machine.receive(&packet, &route, &mut Turn { now: self.now, memory: table, out: &mut none });
    }

    /// A READ, an atomic operation and a SEND are done, and more can be.
    fn works(&mut self) {
        let rkey = self.ends[1].key;
        self.ends[1].recv(0, 4096, 600);
        let [ours, _] = &mut self.ends;
        ours.send(0, SendOp::Read(Remote { addr: 0, rkey }), 1024, 600, flags());
        ours.send(1, SendOp::FetchAdd { remote: Remote { rkey, ..WORD }, add: 1 }, 2048, 8, flags());
        ours.send(2, SendOp::Send, 1024, 600, flags());
        assert!(self.run(1000), "{}", self.describe());
        let done: Vec<_> = self.ends[0].completions().iter().map(|wc| (wc.id, wc.status)).collect();
        assert_eq!(done, [(0, Status::Success), (1, Status::Success), (2, Status::Success)]);
        assert_eq!(self.ends[1].completions().len(), 1);
    }

    /// Packets that an end sends now: operation and number.
    fn sends(&mut self, i: usize) -> Vec<(Operation, Psn)> {
        self.serve(i);
        let take = |Reverse((.., bytes)): Arrival| {
            let packet = Packet::parse(&bytes).expect("what is sent is parsed");
            (packet.opcode.operation, packet.headers.bth.psn)
        };
        std::mem::take(&mut self.wire).into_sorted_vec().into_iter().rev().map(take).collect()
    }

    fn states(&self) -> [State; 2] {
        [self.ends[0].machine.attr.state, self.ends[1].machine.attr.state]
    }
}

const ALIVE: [State; 2] = [State::Rts; 2];

fn events(end: &End) -> Vec<AsyncEvent> {
    rustix::fs::fcntl_setfl(end.events.fd(), rustix::fs::OFlags::NONBLOCK).expect("set");
    std::iter::from_fn(|| end.events.pop().ok()).collect()
}

#[test]
fn an_old_request_that_was_never_made_is_dropped() {
    let mut world = World::new(Service::Rc, NONE, 1);
    world.works();
    let (expected, key) = (world.ends[1].machine.resp.expected, world.ends[1].key);
    let reth = |va, rkey, len| Some(Reth { va, rkey, len });
    for back in (1..40).chain([1000, 1 << 22, 1 << 23]) {
        let psn = Psn::new(expected.get().wrapping_sub(back));
        for reth in [reth(0, key, 600), reth(0, key ^ 1, 600), reth(1 << 16, key, 1), reth(4, key, 100), reth(0, 0, 0)]
        {
            world.forge(1, Headers { reth, ..only(Operation::ReadRequest, psn) }, &[]);
        }
        for operation in [Operation::CompareSwap, Operation::FetchAdd] {
            let atomic = Some(AtomicEth { va: 9, rkey: key ^ 1, swap_or_add: 1, compare: 0 });
            world.forge(1, Headers { atomic, ..only(operation, psn) }, &[]);
        }
        let reth = Some(Reth { va: 0, rkey: key ^ 1, len: 4 });
        world.forge(1, Headers { reth, ..only(Operation::Write, psn) }, &[9; 4]);
        world.forge(1, only(Operation::Send, psn), &[9; 4]);
        // Each answer repeats what was answered before: the peer does not mind.
        assert!(world.run(1000));
        assert_eq!(world.states(), ALIVE, "{back} back");
    }
    assert!(events(&world.ends[1]).is_empty() && world.ends[1].bytes()[..4] == [0; 4]);
    world.works();
}

#[test]
fn what_was_asked_before_is_answered_again_in_part_or_whole() {
    let mut world = World::new(Service::Rc, NONE, 1);
    let (first, key) = (world.ends[1].machine.resp.expected, world.ends[1].key);
    world.works();
    let read =
        |psn: Psn, va, len| Headers { reth: Some(Reth { va, rkey: key, len }), ..only(Operation::ReadRequest, psn) };
    let answers = |n| (0..n).map(|i| (Operation::ReadResponse, i)).collect::<Vec<_>>();
    let mut ask = |psn: Psn, va, len| {
        world.forge(1, read(psn, va, len), &[]);
        let sent = world.sends(1);
        sent.into_iter().map(|(op, at)| (op, at.since(psn))).collect::<Vec<_>>()
    };
    assert_eq!(ask(first, 0, 600), answers(3));
    assert_eq!(ask(first.plus(1), 256, 344), answers(2));
    assert_eq!(ask(first.plus(2), 512, 88), answers(1));
    assert_eq!(ask(first, 0, 256), answers(1));
    for (psn, va, len) in [(first, 0, 601), (first.plus(1), 0, 600), (first.plus(1), 256, 345), (first.plus(3), 0, 8)] {
        assert_eq!(ask(psn, va, len), [], "{psn} from {va}, {len} bytes");
    }
    // Both at once: the second is within what is due.
    world.forge(1, read(first.plus(1), 256, 344), &[]);
    world.forge(1, read(first.plus(2), 512, 88), &[]);
    world.forge(1, read(first, 0, 600), &[]);
    let sent: Vec<_> = world.sends(1).into_iter().map(|(_, at)| at.since(first)).collect();
    assert_eq!(sent, [0, 1, 2], "each once, in order");
    // The program has deregistered meanwhile.
    world.ends[1].table.remove(key);
    world.forge(1, read(first, 0, 600), &[]);
    assert_eq!((world.sends(1), world.states()), (vec![], ALIVE));
}

/// A request that comes again, from any sender, takes no slot of a new one.
#[test]
fn old_requests_do_not_crowd_out_new_ones() {
    let mut world = World::with(Service::Rc, NONE, 1, |attr| (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (1, 1));
    let (first, key) = (world.ends[1].machine.resp.expected, world.ends[1].key);
    world.ends[0].send(0, SendOp::Read(Remote { addr: 0, rkey: key }), 1024, 600, flags());
    assert!(world.run(100));
    for _ in 0..3 {
        let reth = Some(Reth { va: 0, rkey: key, len: 600 });
        world.forge(1, Headers { reth, ..only(Operation::ReadRequest, first) }, &[]);
    }
    world.ends[0].send(1, SendOp::Read(Remote { addr: 0, rkey: key }), 1024, 600, flags());
    world.serve(0);
    let Some(Reverse((.., bytes))) = world.wire.pop() else { panic!("a request") };
    let packet = Packet::parse(&bytes).expect("a packet");
    world.forge(1, packet.headers, &[]);
    assert!(world.run(1000));
    assert_eq!((world.ends[0].completions().len(), world.states()), (2, ALIVE));
}

#[test]
fn a_gap_is_told_once_however_much_comes_early() {
    let mut world = World::with(Service::Rc, NONE, 1, |attr| attr.retry_cnt = 1);
    world.works();
    let mut dice = Dice(7);
    let mut flood = |world: &mut World| {
        let expected = world.ends[1].machine.resp.expected;
        for _ in 0..500 {
            let psn = expected.plus(1 + dice.roll(1 << 22) as u32);
            world.forge(1, only(Operation::Send, psn), &[1; 4]);
        }
    };
    flood(&mut world);
    let expected = world.ends[1].machine.resp.expected;
    assert_eq!(world.sends(1), [(Operation::Ack, expected)]);
    flood(&mut world);
    assert_eq!(world.sends(1), [], "the same gap");
    // Also while messages are under way.
    for round in 0..20 {
        world.ends[1].recv(round, 4096, 600);
        world.ends[0].send(round, SendOp::Send, 1024, 600, flags());
        world.serve(0);
        flood(&mut world);
        assert!(world.run(1000));
        assert_eq!(world.states(), ALIVE);
    }
    let done = world.ends[0].completions();
    assert!(done.len() == 20 && done.iter().all(|wc| wc.status == Status::Success), "{done:?}");
}

#[test]
fn the_same_refusal_again_uses_up_no_repetition() {
    let mut world = World::with(Service::Rc, NONE, 1, |attr| (attr.retry_cnt, attr.rnr_retry) = (1, 1));
    let psn = world.ends[1].machine.resp.expected;
    world.ends[0].send(0, SendOp::Send, 1024, 600, flags());
    assert_eq!(world.sends(0).len(), 3);
    for syndrome in [Syndrome::Nak(Nak::Sequence), Syndrome::Rnr(1)] {
        for _ in 0..10 {
            let aeth = Some(Aeth { syndrome, msn: 0 });
            world.forge(0, Headers { aeth, ..only(Operation::Ack, psn) }, &[]);
        }
        assert_eq!(world.states(), ALIVE, "{syndrome:?}");
    }
    world.ends[1].recv(0, 4096, 600);
    assert!(world.run(1000));
    assert_eq!(world.ends[0].completions().iter().map(|wc| wc.status).collect::<Vec<_>>(), [Status::Success]);
}

#[test]
fn answers_that_fit_no_request_are_dropped() {
    let mut world = World::new(Service::Rc, NONE, 1);
    let (psn, rkey) = (world.ends[1].machine.resp.expected, world.ends[1].key);
    world.ends[1].set(0, &[5; 600]);
    world.ends[0].send(0, SendOp::Read(Remote { addr: 0, rkey }), 1024, 600, flags());
    world.ends[0].send(1, SendOp::FetchAdd { remote: Remote { addr: 1 << 12, rkey }, add: 1 }, 2048, 8, flags());
    world.ends[0].send(2, SendOp::Write(Remote { addr: 8192, rkey }), 1024, 600, flags());
    world.serve(0);
    let aeth = |syndrome| Some(Aeth { syndrome, msn: 0 });
    let (ack, nak) = (aeth(Syndrome::Ack(NO_CREDITS)), aeth(Syndrome::Nak(Nak::RemoteAccess)));
    let atomic_ack = Some(AtomicAckEth { original: u64::MAX });
    for at in 0..7 {
        let psn = psn.plus(at);
        let answer = |position, aeth| Headers { aeth, ..headers(Operation::ReadResponse, position, psn) };
        if at != 3 {
            world.forge(0, Headers { aeth: ack, atomic_ack, ..only(Operation::AtomicAck, psn) }, &[]);
        }
        world.forge(0, answer(Position::Only, ack), &[9; 255]);
        world.forge(0, answer(Position::Middle, None), &[9; 89]);
        world.forge(0, answer(Position::Only, nak), &[9; 256]);
        world.forge(0, Headers { aeth: nak, atomic_ack, ..only(Operation::AtomicAck, psn) }, &[]);
    }
    assert_eq!(world.states(), ALIVE);
    assert!(world.run(1000));
    let done: Vec<_> = world.ends[0].completions().iter().map(|wc| (wc.id, wc.status)).collect();
    assert_eq!(done, [(0, Status::Success), (1, Status::Success), (2, Status::Success)]);
    assert_eq!((&world.ends[0].bytes()[1024..1624], &world.ends[0].bytes()[2048..2056]), (&[5; 600][..], &[0; 8][..]));
}

/// A peer with another path MTU: no answer of it ever fits.
#[test]
fn a_peer_whose_answers_never_fit_ends_the_connection() {
    let mut world = World::new(Service::Rc, NONE, 1);
    let rkey = world.ends[1].key;
    world.ends[1].machine.attr.path_mtu = 512;
    world.ends[0].send(0, SendOp::Read(Remote { addr: 0, rkey }), 1024, 600, flags());
    assert!(world.run(1000));
    assert_eq!(world.ends[0].completions().iter().map(|wc| wc.status).collect::<Vec<_>>(), [Status::BadResponse]);
}

#[test]
fn packets_of_another_partition_are_dropped_and_counted() {
    for service in [Service::Rc, Service::Uc] {
        let mut world = World::new(service, NONE, 1);
        let psn = world.ends[1].machine.resp.expected;
        world.ends[1].recv(0, 0, 100);
        let mut forge = |pkey| {
            let mut headers = only(Operation::Send, psn);
            headers.bth.opcode = Opcode::code(service, Operation::Send, Position::Only);
            headers.bth.pkey = pkey;
            let before = crate::counters().bad_pkey_cntr;
            world.forge(1, headers, &[1; 4]);
            (world.ends[1].completions().len(), crate::counters().bad_pkey_cntr > before)
        };
        for pkey in [0x1234, 0, 0x8000, 0xfffe] {
            assert_eq!(forge(pkey), (0, true), "{pkey:#x}");
        }
        assert_eq!(forge(0x7fff).0, 1, "a limited member of ours");
    }
}

/// A completion queue without room ends the queue pairs that use it; the program is notified in order.
#[test]
fn an_overrun_ends_the_queue_pair() {
    for (sender, name) in [(0, "the sender's"), (1, "the receiver's")] {
        let mut world = World::with(Service::Rc, NONE, 1, |attr| attr.retry_cnt = 2);
        let end = &mut world.ends[sender];
        let small = Cq::new(4, 77, None, Some(end.events.clone()), None);
        (end.machine.parts.send_cq, end.machine.parts.recv_cq, end.cq) = (small.clone(), small.clone(), small);
        (0..8).for_each(|id| world.ends[1].recv(id, 4096, 8));
        (0..8).for_each(|id| world.ends[0].send(id, SendOp::Send, 0, 8, flags()));
        assert!(world.run(100_000));
        assert_eq!(world.states()[sender], State::Err, "{name}");
        let told: Vec<_> = events(&world.ends[sender]).iter().map(|e| (e.kind, e.affected)).collect();
        let qp = Affected::Qp(world.ends[sender].machine.parts.qpn);
        assert_eq!(told, [(EventKind::CqError, Affected::Cq(77)), (EventKind::QpFatal, qp)], "{name}");
        let kept: Vec<_> = world.ends[sender].completions().iter().map(|wc| (wc.id, wc.status)).collect();
        assert_eq!(kept, (0..4).map(|id| (id, Status::Success)).collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn a_batch_is_posted_as_a_whole_or_not_at_all() {
    let mut world = World::new(Service::Rc, NONE, 1);
    let key = world.ends[0].key;
    let good = [Sge { addr: 0, len: 8, lkey: key }];
    let bad = [Sge { addr: 0, len: 4, lkey: key }];
    let request = |id, sges: &'static [Sge], op| SendRequest { id, op, sges, flags: flags(), to: None };
    let (good, bad): (&'static [Sge], &'static [Sge]) = (Box::leak(Box::new(good)), Box::leak(Box::new(bad)));
    let add = SendOp::FetchAdd { remote: Remote { addr: 8, rkey: world.ends[1].key }, add: 1 };
    let batch = [request(0, good, SendOp::Send), request(1, bad, add), request(2, good, SendOp::Send)];
    let refused = world.ends[0].machine.post_send_all(&batch).expect_err("an atomic takes 8 bytes");
    assert_eq!((refused.0, world.sends(0)), (1, vec![]));
    let batch: Vec<_> = (0..1001).map(|id| request(id, good, SendOp::Send)).collect();
    let refused = world.ends[0].machine.post_send_all(&batch).expect_err("more than the queue holds");
    assert_eq!((refused.0, refused.1.errno(), world.sends(0)), (1000, libc::ENOMEM, vec![]));
    world.ends[0].machine.post_send_all(&batch[..2]).expect("posted");
    assert_eq!(world.sends(0).len(), 2);
    let err = QpAttr { state: State::Err, ..QpAttr::default() };
    world.ends[0].machine.modify(&err, AttrMask::STATE).expect("to ERR");
    world.ends[0].completions();
    assert!(world.ends[0].machine.post_send_all(&[batch[0].clone(), request(1, bad, add)]).is_err());
    assert!(world.ends[0].completions().is_empty());
    world.ends[0].machine.post_send_all(&batch[..2]).expect("flushed");
    assert_eq!(world.ends[0].completions().len(), 2);
}
