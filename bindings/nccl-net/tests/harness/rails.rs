//! Two nodes with several cables: one that is cut in mid-run costs no message, and is taken back; a slow one gets less.

use std::sync::atomic::{AtomicU64, Ordering};

use super::again::{Process, hear, hex, say, unhex};
use super::api::*;
use super::nodes::{cable, makes_nodes, node, run, sent_over};

const LEN: usize = 1 << 20;
/// Messages under way at once.
const DEPTH: usize = 4;

/// The sending end: it has the handle of the other node's listener.
struct Sending {
    api: Api,
    comm: Comm,
    /// Messages by what they begin with.
    next: AtomicU64,
}

impl Sending {
    /// Sends messages, of which the last one says so, until `enough` of how many were sent.
    fn phase(&self, enough: impl Fn(u64) -> bool) -> u64 {
        let mut open: Vec<(Comm, Vec<u8>)> = Vec::new();
        for count in 1.. {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let last = enough(count);
            // Short ones between, which are acknowledged together.
            let len = if number % 3 == 2 { 100 + number as usize % 1000 } else { LEN };
            let mut data = pattern(len, number as usize);
            data[..8].copy_from_slice(&number.to_le_bytes());
            data[8] = u8::from(last);
            let post = || Some(self.api.isend(self.comm, &data, 0).unwrap()).filter(|request| !request.is_null());
            let request = until("a free request", post);
            open.push((request, data));
            while open.len() > if last { 0 } else { DEPTH } {
                let (request, _data) = open.remove(0);
                self.api.wait(request, 1);
            }
            if last {
                return count;
            }
        }
        unreachable!("messages without an end")
    }
}

/// The receiving end: all messages of a phase, each whole and in its order.
fn receive(api: Api, comm: Comm, next: &mut u64) {
    loop {
        let mut data = vec![0u8; LEN];
        let request = api.irecv(comm, &mut [(&mut data, 0)]).unwrap();
        let len = api.wait(request, 1)[0];
        assert_eq!(data[..8], next.to_le_bytes(), "the message after {}", *next);
        let last = data[8] == 1;
        let mut expected = pattern(len, *next as usize);
        expected[..9].copy_from_slice(&data[..9]);
        assert!(data[..len] == expected, "message {} of {len} bytes", *next);
        *next += 1;
        if last {
            return;
        }
    }
}

/// Streams that are lost now, by the log.
fn lost() -> usize {
    let log = LOG.lock().unwrap();
    log.matches("others carry on").count() - log.matches("is back").count()
}

/// A node of two: `b` receives, `a` sends in phases that the test begins, until it has `enough` of a phase's messages
/// and of its bytes over r1.
pub(crate) fn talk(name: &str, enough: impl Fn(&str, u64, u64) -> bool) {
    say("here");
    assert_eq!(hear(), "cabled");
    let api = Api::init(12);
    let (handle, listen) = api.listen();
    say(&hex(&handle));
    let mut theirs = unhex(&hear());
    if name == "a" {
        let comm = until("a connection", || Some(api.try_connect(&mut theirs).unwrap()).filter(|c| !c.is_null()));
        let sending = Sending { api, comm, next: AtomicU64::new(0) };
        loop {
            let phase = hear();
            if phase == "end" {
                break;
            }
            let before = sent_over("r1");
            let count = sending.phase(|count| enough(&phase, count, sent_over("r1") - before));
            let all = sent_over("r0") + sent_over("r1");
            say(&format!("{count} {} {all}", sent_over("r1") - before));
        }
        api.close_send(comm);
    } else {
        let comm = until("a connection", || Some(api.try_accept(listen).unwrap()).filter(|c| !c.is_null()));
        // NCCL closes a listener when it has its connection.
        let mut next = 0;
        while hear() != "end" {
            receive(api, comm, &mut next);
            say("received");
        }
        api.close_recv(comm);
    }
    api.close_listen(listen);
    api.finalize();
    say("done");
}

/// Two nodes with cables r0 and r1, whose connection stands.
pub(crate) fn two(test: &str, settings: &[(&str, &str)]) -> [Process; 2] {
    two_after(test, settings, |_| ())
}

/// The same; `first` comes before they connect.
fn two_after(test: &str, settings: &[(&str, &str)], first: impl FnOnce(&[Process; 2])) -> [Process; 2] {
    let mut nodes = ["a", "b"].map(|name| node(test, name, settings));
    let [a, b] = &nodes;
    cable(("r0", a), ("r0", b), 1);
    cable(("r1", a), ("r1", b), 2);
    nodes.iter_mut().for_each(|node| node.tell("cabled"));
    let [a, b] = &mut nodes;
    let handles = (a.line(), b.line());
    first(&nodes);
    let [a, b] = &mut nodes;
    a.tell(&handles.1);
    b.tell(&handles.0);
    nodes
}

/// Begins a phase; how many messages there were, and what went over r1, is known when `finish` returns.
pub(crate) fn begin(nodes: &mut [Process; 2], phase: &str) {
    nodes.iter_mut().for_each(|node| node.tell(phase));
}

pub(crate) fn finish([a, b]: &mut [Process; 2]) -> (u64, u64) {
    let line = a.line();
    let mut words = line.split(' ').map(|word| word.parse().unwrap());
    assert_eq!(b.line(), "received");
    (words.next().unwrap(), words.next().unwrap())
}

pub(crate) fn end(mut nodes: [Process; 2]) {
    begin(&mut nodes, "end");
    nodes.into_iter().for_each(Process::finish);
    say("done");
}

/// How a cable is cut at one end, and mended.
struct Cut {
    cut: &'static str,
    mend: &'static str,
    /// The end, and whether messages are under way.
    at: &'static [(usize, bool)],
}

/// Its interfaces are down then, which is known long before an acknowledgement is missed.
#[test]
fn a_cable_that_is_cut_costs_no_message_and_is_taken_back() {
    const TEST: &str = "rails::a_cable_that_is_cut_costs_no_message_and_is_taken_back";
    // At the receiver's end in mid-run, and at the sender's before anything is under way: then the sender's kernel has
    // no route, and sends nothing that could miss its acknowledgement.
    let at = &[(1, true), (0, false), (0, false)];
    let cut = Cut { cut: "ip link set r1 down", mend: "ip link set r1 up", at };
    cut_and_mended(TEST, &[("TINYNCCL_NET_RAIL_TIMEOUT", "60")], &cut);
}

#[test]
fn a_cable_that_is_cut_when_they_connect_is_taken_when_it_is_mended() {
    const TEST: &str = "rails::a_cable_that_is_cut_when_they_connect_is_taken_when_it_is_mended";
    let enough = |phase: &str, count, over: u64| count >= 50 && (phase == "without" || over > 1 << 20);
    if !makes_nodes(TEST, |name| talk(name, enough)) {
        return;
    }
    // At both ends: the kernel takes a moment to see that the other one is down.
    let mut nodes = two_after(TEST, &[], |nodes| nodes.iter().for_each(|node| run(node, "ip link set r1 down")));
    begin(&mut nodes, "without");
    let (_, over) = finish(&mut nodes);
    assert!(over < 100_000, "{over} bytes over a cable that is cut");
    nodes.iter().for_each(|node| run(node, "ip link set r1 up"));
    begin(&mut nodes, "whole");
    let (_, over) = finish(&mut nodes);
    assert!(over > 1 << 20, "{over} bytes over r1");
    end(nodes);
}

/// Both interfaces are up, and the receiver's lets nothing out: no acknowledgement either.
#[test]
fn a_cable_that_loses_everything_costs_no_message_and_is_taken_back() {
    const TEST: &str = "rails::a_cable_that_loses_everything_costs_no_message_and_is_taken_back";
    let cut = "tc qdisc replace dev r1 root bfifo limit 1";
    cut_and_mended(TEST, &[], &Cut { cut, mend: "tc qdisc del dev r1 root", at: &[(1, true)] });
}

fn cut_and_mended(test: &str, settings: &[(&str, &str)], cut: &Cut) {
    // Two of four streams are on each cable.
    // A rail whose rate was measured in a bad moment gets nothing for a while, so a whole phase lasts until it has.
    let enough = |phase: &str, count, over: u64| {
        let done = match phase {
            "cut" => lost() == 2,
            "back" => lost() == 0,
            "whole" => over > 1 << 20,
            _ => true,
        };
        count >= 50 && done
    };
    if !makes_nodes(test, |name| talk(name, enough)) {
        return;
    }
    let mut nodes = two(test, settings);
    begin(&mut nodes, "whole");
    let (_, over) = finish(&mut nodes);
    assert!(over > 1 << 20, "{over} bytes over r1");
    for &(end, busy) in cut.at {
        if busy {
            begin(&mut nodes, "cut");
        }
        run(&nodes[end], cut.cut);
        if !busy {
            begin(&mut nodes, "cut");
        }
        finish(&mut nodes);
        begin(&mut nodes, "without");
        let (_, over) = finish(&mut nodes);
        assert!(over < 100_000, "{over} bytes over a cable that is cut");
        run(&nodes[end], cut.mend);
        begin(&mut nodes, "back");
        finish(&mut nodes);
        begin(&mut nodes, "whole");
        let (_, over) = finish(&mut nodes);
        assert!(over > 1 << 20, "{over} bytes over r1");
    }
    end(nodes);
}
