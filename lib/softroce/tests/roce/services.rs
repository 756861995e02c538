//! The other services, shared receive queues, completion channels, and IPv6.

use std::sync::Arc;

use softroce::{
    Access, AttrMask, Capacity, CompChannel, Datagram, Gid, QpAttr, QpInit, Remote, SendFlags, SendOp, SendRequest,
    Service, State, Status, WcOpcode,
};

use crate::end::{End, loopback, pattern};

#[test]
fn an_unreliable_connection_sends_and_writes() {
    let (a, b) = (End::new(&loopback(), Service::Uc), End::new(&loopback(), Service::Uc));
    a.connect(&b.card());
    b.connect(&a.card());
    // Small ones: nothing is lost between two sockets with free space.
    for len in [0usize, 1, 4097, 20_000] {
        let bytes = pattern(len, 9);
        a.write(0, &bytes);
        b.recv(1, 0, 1 << 20);
        a.send(1, SendOp::SendImm([7; 4]), 0, len);
        let wc = b.wait();
        assert_eq!((wc.status, wc.byte_len, wc.imm), (Status::Success, len as u32, Some([7; 4])));
        assert_eq!(b.read(0, len), bytes);
        assert_eq!(a.wait().status, Status::Success);
        b.recv(2, 0, 0);
        let to = Remote { addr: b.card().remote.addr + (1 << 20), ..b.card().remote };
        a.send(2, SendOp::WriteImm(to, [8; 4]), 0, len);
        assert_eq!((b.wait().opcode, a.wait().status), (WcOpcode::RecvWriteImm, Status::Success));
        assert_eq!(b.read(1 << 20, len), bytes);
    }
}

// More than a thread sends in one time slice: the engine's goes on, however close behind.
#[test]
fn an_unreliable_connection_sends_all_of_many_long_messages() {
    let (a, b) = (End::new(&loopback(), Service::Uc), End::new(&loopback(), Service::Uc));
    a.connect_with(&b.card(), |attr| attr.path_mtu = 256);
    b.connect_with(&a.card(), |attr| attr.path_mtu = 256);
    for round in 0..100 {
        // 2048 packets each. Some are lost, and no thread waits for them.
        for id in 0..2 {
            a.send(id, SendOp::Write(b.card().remote), 0, 512 << 10);
        }
        for id in 0..2 {
            let wc = a.wait();
            assert_eq!((wc.id, wc.status), (id, Status::Success), "round {round}");
        }
    }
}

pub(crate) fn datagram_end(gid_index: u8) -> End {
    use AttrMask as M;
    let end = End::at(&loopback(), Service::Ud, gid_index);
    let mut attr = QpAttr { port: 1, qkey: 0x1111, sq_psn: 5, ..QpAttr::default() };
    for (state, mask) in [
        (State::Init, M::STATE | M::PKEY_INDEX | M::PORT | M::QKEY),
        (State::Rtr, M::STATE),
        (State::Rts, M::STATE | M::SQ_PSN),
    ] {
        attr.state = state;
        end.qp.modify(&attr, mask).expect("a way to RTS");
    }
    end
}

pub(crate) fn send_datagram(from: &End, to: &End, qkey: u32, gid_index: u8) {
    let path = Arc::new(from.pd.context().path(to.card().gid, gid_index).expect("a way"));
    let sges = [from.sge(0, 300)];
    let flags = SendFlags { signaled: true, ..SendFlags::default() };
    let to = Some(Datagram { path, qpn: to.qp.number(), qkey });
    let request = SendRequest { id: 3, op: SendOp::SendImm([4; 4]), sges: &sges, flags, to };
    // SAFETY: the memory is never freed.
    unsafe { from.qp.post_send(&[request]) }.expect("posted");
    assert_eq!(from.wait().status, Status::Success);
}

fn datagrams(gid_index: u8) {
    let (a, b) = (datagram_end(gid_index), datagram_end(gid_index));
    a.write(0, &pattern(300, 2));
    b.recv(1, 0, 1000);
    send_datagram(&a, &b, 0x2222, gid_index);
    send_datagram(&a, &b, 0x1111, gid_index);
    let wc = b.wait();
    assert_eq!((wc.status, wc.byte_len, wc.src_qpn, wc.grh), (Status::Success, 340, a.qp.number(), true));
    assert_eq!((wc.imm, b.read(40, 300)), (Some([4; 4]), pattern(300, 2)), "the one with the wrong key was dropped");
    assert_eq!(wc.ipv4, a.card().gid.ip().is_ipv4());
    let grh: [u8; 40] = b.read(0, 40).try_into().expect("40");
    let (from, to) = softroce::wire::grh::addresses(&grh).expect("a header");
    assert_eq!((Gid::from(from), Gid::from(to)), (a.card().gid, b.card().gid));
}

#[test]
fn datagrams_bring_their_sender() {
    datagrams(loopback().device().default_gid_index());
}

/// Index of an IPv6 address of the loopback interface.
fn v6() -> Option<u8> {
    let gids = loopback().device().gids();
    gids.iter().position(|gid| gid.ip().is_ipv6()).map(|i| i as u8)
}

#[test]
fn ipv6_works_between_processes_of_one_host() {
    let Some(index) = v6() else { return };
    datagrams(index);
    let (a, b) = (End::at(&loopback(), Service::Rc, index), End::at(&loopback(), Service::Rc, index));
    a.connect(&b.card());
    b.connect(&a.card());
    a.write(0, &pattern(1 << 20, 2));
    a.send(1, SendOp::Write(b.card().remote), 0, 1 << 20);
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(b.read(0, 1 << 20), pattern(1 << 20, 2));
}

#[test]
fn queue_pairs_share_receives() {
    let context = loopback();
    let sender = [End::new(&context, Service::Rc), End::new(&context, Service::Rc)];
    let receiver = End::new(&context, Service::Rc);
    let srq = receiver.pd.create_srq(16, 1, 5).expect("a queue");
    srq.set_limit(3).expect("a limit");
    for i in 0..4 {
        let sges = [receiver.sge(i * 1000, 1000)];
        // SAFETY: the memory is never freed.
        unsafe { srq.post_recv(&softroce::RecvRequest { id: i as u64, sges: &sges }) }.expect("posted");
    }
    let qps: Vec<_> = sender
        .iter()
        .map(|from| {
            let capacity = Capacity { sends: 4, recvs: 0, send_sges: 1, recv_sges: 0, inline: 0 };
            let init = QpInit {
                service: Service::Rc,
                capacity,
                signal_all: true,
                send_cq: receiver.cq.clone(),
                recv_cq: receiver.cq.clone(),
                srq: Some(srq.clone()),
            };
            let qp = receiver.pd.create_qp(&init).expect("a queue pair");
            let end = End { qp: qp.clone(), ..End::new(&context, Service::Rc) };
            end.connect(&from.card());
            from.connect(&end.card());
            qp
        })
        .collect();
    for (i, from) in sender.iter().cycle().take(4).enumerate() {
        from.send(0, SendOp::Send, 0, 100 + i);
        assert_eq!(from.wait().status, Status::Success);
        let wc = receiver.wait();
        assert_eq!((wc.id, wc.byte_len, wc.qpn), (i as u64, 100 + i as u32, qps[i % 2].number()));
    }
    let event = context.get_async_event().expect("an event");
    let event =
        if event.kind == softroce::EventKind::CommEstablished { context.get_async_event().expect("e") } else { event };
    assert_eq!((event.kind, event.affected), (softroce::EventKind::SrqLimitReached, softroce::Affected::Srq(5)));
}

#[test]
fn a_channel_wakes_who_sleeps() {
    let context = loopback();
    let (a, b) = (End::new(&context, Service::Rc), End::new(&context, Service::Rc));
    let channel = CompChannel::new().expect("a channel");
    let cq = context.create_cq(16, 42, Some(channel.clone())).expect("a queue");
    let init = QpInit { recv_cq: cq.clone(), ..b.qp.init().clone() };
    let b = End { qp: b.pd.create_qp(&init).expect("a queue pair"), ..b };
    a.connect(&b.card());
    b.connect(&a.card());
    for solicited in [true, false] {
        cq.req_notify(solicited);
        b.recv(1, 0, 100);
        let sges = [a.sge(0, 10)];
        let flags = SendFlags { signaled: true, solicited, ..SendFlags::default() };
        let request = SendRequest { id: 1, op: SendOp::Send, sges: &sges, flags, to: None };
        // SAFETY: the memory is never freed.
        unsafe { a.qp.post_send(&[request]) }.expect("posted");
        assert_eq!(channel.get_event(), Ok(42));
        assert_eq!(cq.poll_one().map(|wc| wc.status), Some(Status::Success));
        assert_eq!(a.wait().status, Status::Success);
    }
}

#[test]
fn deregistered_memory_is_refused() {
    let (a, b) = (End::new(&loopback(), Service::Rc), End::new(&loopback(), Service::Rc));
    a.connect(&b.card());
    b.connect(&a.card());
    let mut bytes = vec![0u8; 4096];
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    // SAFETY: the memory outlives the registration.
    let mr = unsafe { b.pd.reg_mr(bytes.as_mut_ptr(), 4096, 0x1000, access) }.expect("registered");
    let to = Remote { addr: 0x1000, rkey: mr.rkey() };
    a.send(1, SendOp::Write(to), 0, 4096);
    assert_eq!(a.wait().status, Status::Success);
    drop(mr);
    a.send(2, SendOp::Write(to), 0, 4096);
    assert_eq!(a.wait().status, Status::RemoteAccess);
}
