//! Two ends in one process, at an RDMA port of this host.

use std::io::Write;

use super::*;
use crate::bootstrap::interface::local_addresses;
use crate::rails::tests::{net, numbers, pair, pattern, until, wait};
use crate::rails::{MAX_GROUP, Memory, Net, Receiver, Sender};
use tinynccl_sys::Config;

/// Opens a network at the first RDMA port; without one returns `None`, and prints that.
fn with_port() -> Option<Net> {
    let config = Config::default().with(|c| c.net_rdma = true);
    let devices = Devices::open(&config).unwrap();
    let found = devices.as_ref().and_then(|d| d.nics.all().first()).map(|nic| nic.port.address.clone());
    let Some(port) = found else {
        assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, and there is no port");
        let _ = writeln!(std::io::stderr().lock(), "SKIPPED: no RDMA port");
        return None;
    };
    let at = local_addresses(&config).unwrap().into_iter().find(|local| local.ip == port.ip()).unwrap();
    Some(net(|c| (c.net_rdma, c.interface) = (true, Some(format!("={}", at.interface)))))
}

/// A connection whose ends have joined their queue pairs.
fn joined(net: &Net) -> (Sender, Receiver) {
    let (sender, receiver) = pair(net, net);
    until("a queue pair", || (sender.connection.rdma.any() && receiver.connection.rdma.any()).then_some(()));
    (sender, receiver)
}

fn register(net: &Net, memory: &mut [u8]) -> Memory {
    // SAFETY: tests keep the memory for longer than what this returns.
    unsafe { net.register(memory.as_mut_ptr(), memory.len()) }
}

/// Sends `data` into `got`, which is longer; true when it went by RDMA.
fn pass((sender, receiver): (&Sender, &Receiver), data: &[u8], got: &mut [u8], early: bool) -> bool {
    let before = receiver.connection.rdma.arrived();
    got.fill(0);
    // SAFETY: both live until their requests are done.
    unsafe {
        let receive = |got: &mut [u8]| receiver.receive(&[(got.as_mut_ptr(), got.len(), 3)]).unwrap().unwrap();
        let send = || sender.send(data.as_ptr(), data.len(), 3).unwrap().unwrap();
        let (first, second) = if early { (send(), receive(got)) } else { (receive(got), send()) };
        assert_eq!(wait(first), [data.len()]);
        assert_eq!(wait(second), [data.len()]);
    }
    assert!(got[..data.len()] == data[..] && got[data.len()..].iter().all(|b| *b == 0), "{} bytes", data.len());
    receiver.connection.rdma.arrived() > before
}

#[test]
fn long_messages_of_registered_memory_go_by_rdma() {
    let Some(net) = with_port() else { return };
    let (sender, receiver) = joined(&net);
    for len in
        [0, 1, 32 << 10, (32 << 10) + 1, RDMA_FRAGMENT, RDMA_FRAGMENT + 1, 5 * RDMA_FRAGMENT - 7, 20 * RDMA_FRAGMENT]
    {
        let (mut data, mut got) = (pattern(len, len), vec![0u8; len + 10]);
        for early in [false, true] {
            let here = register(&net, &mut data);
            assert!(!pass((&sender, &receiver), &data, &mut got, early), "one end knows no memory");
            let there = register(&net, &mut got);
            assert_eq!(pass((&sender, &receiver), &data, &mut got, early), len > 32 << 10, "{len}");
            drop(here);
            assert!(!pass((&sender, &receiver), &data, &mut got, early), "the sender's is not registered any more");
            drop(there);
        }
    }
}

#[test]
fn many_at_once_in_groups_and_under_several_tags_find_their_places() {
    let Some(net) = with_port() else { return };
    let (sender, receiver) = joined(&net);
    let mut random = numbers(7);
    for round in 0..20 {
        let mut sent: Vec<Vec<u8>> =
            (0..MAX_GROUP).map(|i| pattern(random() % (3 * RDMA_FRAGMENT), round + i)).collect();
        let mut got: Vec<Vec<u8>> = sent.iter().map(|d| vec![0; d.len() + random() % 1000]).collect();
        let _here: Vec<Memory> = sent.iter_mut().map(|d| register(&net, d)).collect();
        let _there: Vec<Memory> = got.iter_mut().map(|d| register(&net, d)).collect();
        let group: Vec<(*mut u8, usize, i32)> =
            got.iter_mut().enumerate().map(|(i, d)| (d.as_mut_ptr(), d.len(), i as i32)).collect();
        // SAFETY: all of it lives until the requests are done.
        unsafe {
            let send = |i: usize| sender.send(sent[i].as_ptr(), sent[i].len(), i as i32).unwrap().unwrap();
            let first: Vec<_> = (0..random() % MAX_GROUP).map(send).collect();
            let recv = receiver.receive(&group).unwrap().unwrap();
            let rest: Vec<_> = (first.len()..MAX_GROUP).map(send).collect();
            let lens: Vec<usize> = sent.iter().map(Vec::len).collect();
            assert_eq!(wait(recv), lens);
            let done: Vec<usize> = first.into_iter().chain(rest).flat_map(wait).collect();
            assert_eq!(done, lens);
        }
        assert!(sent.iter().zip(&got).all(|(s, g)| g[..s.len()] == s[..]), "round {round}");
    }
    assert!(receiver.connection.rdma.arrived() > 0);
}

#[test]
fn a_message_that_is_too_long_for_its_receive_is_refused_whoever_comes_first() {
    let Some(net) = with_port() else { return };
    for (room, early) in [(50, false), (50, true), (40_000, false), (40_000, true)] {
        let (sender, receiver) = joined(&net);
        let (mut data, mut got) = (pattern(100_000, 0), vec![0u8; room]);
        let _here = register(&net, &mut data);
        let _there = register(&net, &mut got);
        // SAFETY: both live until the connection is dropped.
        unsafe {
            let send = || sender.send(data.as_ptr(), data.len(), 0).unwrap().is_some();
            let sent = early && send();
            let e = match receiver.receive(&[(got.as_mut_ptr(), room, 0)]) {
                Ok(recv) => {
                    assert!(sent || send());
                    until("an error", || recv.unwrap().test(&mut [0; MAX_GROUP]).err()).to_string()
                }
                Err(e) => e.to_string(),
            };
            assert!(e.contains("100000 bytes") && e.contains(&format!("room for {room}")), "{e}");
        }
        drop((sender, receiver));
    }
}

/// Each fragment arrives once, wherever the queue pair is lost, and by whichever end.
#[test]
fn streams_take_over_what_a_lost_queue_pair_had() {
    let Some(net) = with_port() else { return };
    let mut random = numbers(11);
    for round in 0..30 {
        let (sender, receiver) = joined(&net);
        let mut sent: Vec<Vec<u8>> =
            (0..6).map(|i| pattern(40_000 + random() % (4 * RDMA_FRAGMENT), round + i)).collect();
        let mut got: Vec<Vec<u8>> = sent.iter().map(|d| vec![0; d.len()]).collect();
        let _here: Vec<Memory> = sent.iter_mut().map(|d| register(&net, d)).collect();
        let _there: Vec<Memory> = got.iter_mut().map(|d| register(&net, d)).collect();
        // SAFETY: all of it lives until the requests are done.
        unsafe {
            let receive = |d: &mut Vec<u8>| receiver.receive(&[(d.as_mut_ptr(), d.len(), 0)]).unwrap().unwrap();
            let recvs: Vec<_> = got.iter_mut().map(receive).collect();
            let sends: Vec<_> = sent.iter().map(|d| sender.send(d.as_ptr(), d.len(), 0).unwrap().unwrap()).collect();
            for _ in 0..random() % 2000 {
                std::thread::yield_now();
            }
            let end = if round % 2 == 0 { &sender.connection } else { &receiver.connection };
            end.rdma.fail(&**end, 0, "a test breaks it");
            let lens: Vec<usize> = sent.iter().map(Vec::len).collect();
            assert_eq!(sends.into_iter().flat_map(wait).collect::<Vec<_>>(), lens);
            assert_eq!(recvs.into_iter().flat_map(wait).collect::<Vec<_>>(), lens);
        }
        assert!(sent == got, "round {round}");
        until("both ends to know", || {
            let gone = |connection: &crate::rails::connection::Connection| {
                connection.rdma.get(0).is_some_and(|queue| queue.state.is(State::Retired))
            };
            (gone(&sender.connection) && gone(&receiver.connection)).then_some(())
        });
        // Another one comes, unless nothing had arrived.
        let none = receiver.connection.rdma.get(0).is_some_and(|queue| queue.done() == 0);
        let both = || sender.connection.rdma.any() && receiver.connection.rdma.any();
        until("another queue pair", || (none || both()).then_some(()));
        assert_eq!(pass((&sender, &receiver), &sent[0], &mut got[0], false), !none);
    }
}

#[test]
fn closing_with_much_under_way_touches_no_memory_afterwards() {
    let Some(net) = with_port() else { return };
    let mut random = numbers(3);
    for round in 0..30 {
        let (sender, receiver) = joined(&net);
        let (mut data, mut got) = (pattern(8 * RDMA_FRAGMENT, round), vec![0u8; 8 * RDMA_FRAGMENT]);
        let _memory = [register(&net, &mut data), register(&net, &mut got)];
        // SAFETY: both live until the ends are dropped.
        unsafe {
            assert!(receiver.receive(&[(got.as_mut_ptr(), got.len(), 0)]).unwrap().is_some());
            assert!(sender.send(data.as_ptr(), data.len(), 0).unwrap().is_some());
        }
        for _ in 0..random() % 500 {
            std::thread::yield_now();
        }
        if round % 2 == 0 {
            drop(receiver);
            got.fill(0);
            drop(sender);
        } else {
            drop(sender);
            drop(receiver);
            got.fill(0);
        }
        for _ in 0..200 {
            std::thread::yield_now();
        }
        assert!(got.iter().all(|byte| *byte == 0), "round {round}");
    }
}

#[test]
fn an_end_without_rdma_is_answered_and_streams_carry_all() {
    let Some(ours) = with_port() else { return };
    let interface = ours.inner.config.interface.clone();
    let theirs = net(|c| (c.net_rdma, c.interface) = (false, interface.clone()));
    let (mut data, mut got) = (pattern(1 << 20, 1), vec![0u8; 1 << 20]);
    let _memory = [register(&ours, &mut data), register(&theirs, &mut got)];
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let (sender, receiver) = pair(from, to);
        assert!(!pass((&sender, &receiver), &data, &mut got, false));
        assert!(!sender.connection.rdma.any() && !receiver.connection.rdma.any());
    }
}
