//! Two nodes with several cables: one that is cut in mid-run costs no message, and is taken back; a slow one gets less.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::again::{Process, hear, hex, say, unhex};
use super::api::*;
use super::nodes::{cable, makes_nodes, makes_nodes_for, node, run, sent_over};

const LEN: usize = 1 << 20;
/// Messages under way at once.
const DEPTH: usize = 4;

/// The sending end: it has the handle of the other node's listener.
struct Sending {
    api: Api,
    /// Messages go over them in turn.
    comms: Vec<Comm>,
    /// Messages by what they begin with.
    next: AtomicU64,
}

impl Sending {
    /// Sends messages, of which the last one is marked, until `enough` of how many were sent.
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
            let comm = self.comms[number as usize % self.comms.len()];
            let post = || Some(self.api.isend(comm, &data, 0).unwrap()).filter(|request| !request.is_null());
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
fn receive(api: Api, comms: &[Comm], next: &mut u64) {
    loop {
        let comm = comms[*next as usize % comms.len()];
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
    log.matches("others carry on").count().saturating_sub(log.matches("is back").count())
}

/// A node of two: `b` receives, `a` sends in phases that the test begins, until it has `enough` of a phase's messages
/// and of its bytes over r1.
pub(crate) fn talk(name: &str, enough: impl Fn(&str, u64, u64) -> bool) {
    talk_over(1, name, enough);
}

/// Runs a node as [`talk`] does, over `connections` connections.
fn talk_over(connections: usize, name: &str, enough: impl Fn(&str, u64, u64) -> bool) {
    say("here");
    assert_eq!(hear(), "cabled");
    let api = Api::init(12);
    let (handle, listen) = api.listen();
    say(&hex(&handle));
    let mut theirs = unhex(&hear());
    if name == "a" {
        let mut connect = || Some(api.try_connect(&mut theirs).unwrap_or_else(failed)).filter(|c| !c.is_null());
        let comms: Vec<Comm> = (0..connections).map(|_| until("a connection", &mut connect)).collect();
        let sending = Sending { api, comms, next: AtomicU64::new(0) };
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
        sending.comms.iter().for_each(|comm| api.close_send(*comm));
    } else {
        let accept = || Some(api.try_accept(listen).unwrap_or_else(failed)).filter(|c| !c.is_null());
        let comms: Vec<Comm> = (0..connections).map(|_| until("a connection", accept)).collect();
        // NCCL closes a listener when it has its connection.
        let mut next = 0;
        while hear() != "end" {
            receive(api, &comms, &mut next);
            say("received");
        }
        comms.iter().for_each(|comm| api.close_recv(*comm));
    }
    api.close_listen(listen);
    api.finalize();
    say("done");
}

/// Two nodes with cables r0 and r1, whose connection stands.
pub(crate) fn two(test: &str, settings: &[(&str, &str)]) -> [Process; 2] {
    two_after(test, settings, 2, |_| ())
}

/// Makes two nodes with `cables` cables, whose connection stands; `first` runs before they connect.
fn two_after(test: &str, settings: &[(&str, &str)], cables: u8, first: impl FnOnce(&[Process; 2])) -> [Process; 2] {
    let mut nodes = ["a", "b"].map(|name| node(test, name, settings));
    let [a, b] = &nodes;
    for (name, number) in ["r0", "r1", "r2"].iter().zip(1..=cables) {
        cable((name, a), (name, b), number);
    }
    nodes.iter_mut().for_each(|node| node.tell("cabled"));
    let [a, b] = &mut nodes;
    let handles = (a.line(), b.line());
    first(&nodes);
    let [a, b] = &mut nodes;
    a.tell(&handles.1);
    b.tell(&handles.0);
    nodes
}

/// Begins a phase; the number of messages, and of bytes over r1, is known when `finish` returns.
pub(crate) fn begin(nodes: &mut [Process; 2], phase: &str) {
    nodes.iter_mut().for_each(|node| node.tell(phase));
}

pub(crate) fn finish([a, b]: &mut [Process; 2]) -> (u64, u64) {
    let line = a.line();
    let mut words = line.split(' ').map(|word| word.parse().unwrap());
    assert_eq!(b.line(), "received");
    (words.next().unwrap(), words.next().unwrap())
}

pub(crate) fn end(nodes: [Process; 2]) {
    end_quietly(nodes);
    say("done");
}

fn end_quietly(mut nodes: [Process; 2]) {
    begin(&mut nodes, "end");
    nodes.into_iter().for_each(Process::finish);
}

/// Commands that cut a cable at one end and mend it, with their cases.
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

/// At both ends: the kernel takes a moment to see that the other one is down.
#[test]
fn a_cable_that_is_cut_when_they_connect_is_taken_when_it_is_mended() {
    const TEST: &str = "rails::a_cable_that_is_cut_when_they_connect_is_taken_when_it_is_mended";
    taken_when_mended(TEST, "ip link set r1 down", "ip link set r1 up");
}

#[test]
fn a_cable_that_is_silent_when_they_connect_is_taken_when_it_is_mended() {
    const TEST: &str = "rails::a_cable_that_is_silent_when_they_connect_is_taken_when_it_is_mended";
    taken_when_mended(TEST, SILENCE, SOUND);
}

fn taken_when_mended(test: &str, cut: &str, mend: &str) {
    let enough = |phase: &str, count, over: u64| count >= 50 && (phase == "without" || over > 1 << 20);
    if !makes_nodes(test, |name| talk(name, enough)) {
        return;
    }
    let mut nodes = two_after(test, &[], 2, |nodes| nodes.iter().for_each(|node| run(node, cut)));
    begin(&mut nodes, "without");
    let (_, over) = finish(&mut nodes);
    assert!(over < 100_000, "{over} bytes over a cable that is cut");
    nodes.iter().for_each(|node| run(node, mend));
    begin(&mut nodes, "whole");
    let (_, over) = finish(&mut nodes);
    assert!(over > 1 << 20, "{over} bytes over r1");
    end(nodes);
}

/// Nothing gets out of an interface that is up.
const SILENCE: &str = "tc qdisc replace dev r1 root bfifo limit 1";
const SOUND: &str = "tc qdisc del dev r1 root";

/// Both interfaces are up, and the receiver's lets nothing out: no acknowledgement either.
#[test]
fn a_cable_that_loses_everything_costs_no_message_and_is_taken_back() {
    const TEST: &str = "rails::a_cable_that_loses_everything_costs_no_message_and_is_taken_back";
    cut_and_mended(TEST, &[], &Cut { cut: SILENCE, mend: SOUND, at: &[(1, true)] });
}

/// The sender's host drops what it is to send, so that nothing ever waits for an acknowledgement.
#[test]
fn a_cable_whose_packets_the_sender_drops_costs_no_message_and_is_taken_back() {
    const TEST: &str = "rails::a_cable_whose_packets_the_sender_drops_costs_no_message_and_is_taken_back";
    cut_and_mended(TEST, &[], &Cut { cut: SILENCE, mend: SOUND, at: &[(0, true)] });
}

/// Commands, each with the number of the node where it is run.
type Commands = &'static [(usize, &'static str)];

/// Faults that leave no cable for a while, or only one, with what begins them and what ends them. The ends see
/// different cables stand still, and the one that works again first is the one that both must be able to use.
const FAULTS: [(&str, Commands, Commands); 5] = [
    (
        "both are cut, and the second one is mended first",
        &[(0, "ip link set r0 down"), (0, "ip link set r1 down")],
        &[(0, "ip link set r1 up"), (0, "ip link set r0 up")],
    ),
    (
        "both are cut at different ends, and the first one is mended first",
        &[(1, "ip link set r1 down"), (0, "ip link set r0 down")],
        &[(0, "ip link set r0 up"), (1, "ip link set r1 up")],
    ),
    (
        "one lets nothing through one way, the other one nothing the other way",
        &[
            (0, "ip neigh replace 10.0.1.2 lladdr 02:00:00:00:00:01 dev r0 nud permanent"),
            (1, "ip neigh replace 10.0.2.1 lladdr 02:00:00:00:00:01 dev r1 nud permanent"),
        ],
        &[(1, "ip neigh del 10.0.2.1 dev r1"), (0, "ip neigh del 10.0.1.2 dev r0")],
    ),
    (
        "both hosts drop, one of them on each cable",
        &[(1, "tc qdisc replace dev r0 root bfifo limit 1"), (0, "tc qdisc replace dev r1 root bfifo limit 1")],
        &[(0, "tc qdisc del dev r1 root"), (1, "tc qdisc del dev r0 root")],
    ),
    (
        "long packets are lost on the way",
        &[(0, "ip link set r1 gso_max_segs 1"), (1, "ip link set r1 mtu 600")],
        &[(1, "ip link set r1 mtu 1500"), (0, "ip link set r1 gso_max_segs 65535")],
    ),
];

#[test]
fn cables_that_fail_together_cost_no_message_in_whatever_order_they_are_mended() {
    const TEST: &str = "rails::cables_that_fail_together_cost_no_message_in_whatever_order_they_are_mended";
    let began = Mutex::new(None);
    let enough = |phase: &str, count, over: u64| {
        if phase == "whole" {
            *began.lock().unwrap() = None;
            return count >= 50 && over > 1 << 20;
        }
        // Longer than the fault takes.
        began.lock().unwrap().get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(5)
    };
    if !makes_nodes(TEST, |name| talk(name, enough)) {
        return;
    }
    for (what, begins, ends) in FAULTS {
        eprintln!("{what}");
        let mut nodes = two(TEST, &[]);
        begin(&mut nodes, "whole");
        finish(&mut nodes);
        begin(&mut nodes, "fault");
        begins.iter().for_each(|(node, words)| run(&nodes[*node], words));
        // Longer than either end waits for a rail.
        std::thread::sleep(Duration::from_millis(1500));
        for (node, words) in ends {
            run(&nodes[*node], words);
            std::thread::sleep(Duration::from_millis(700));
        }
        finish(&mut nodes);
        begin(&mut nodes, "whole");
        finish(&mut nodes);
        end_quietly(nodes);
    }
    say("done");
}

/// It takes seconds to see that nothing answers there.
#[test]
fn a_silent_cable_does_not_hold_up_connections() {
    const TEST: &str = "rails::a_silent_cable_does_not_hold_up_connections";
    // With three seconds for each they would be too late for the test.
    if !makes_nodes(TEST, |name| talk_over(60, name, |_, count, _| count >= 120)) {
        return;
    }
    let mut nodes = two_after(TEST, &[], 2, |nodes| nodes.iter().for_each(|node| run(node, SILENCE)));
    begin(&mut nodes, "without");
    finish(&mut nodes);
    end(nodes);
}

/// The cable is cut more often than a connection has stream positions.
#[test]
fn a_cable_is_taken_back_however_often_it_is_cut() {
    const TEST: &str = "rails::a_cable_is_taken_back_however_often_it_is_cut";
    cut_and_mended(TEST, &[], &Cut { cut: "ip link set r1 down", mend: "ip link set r1 up", at: &[(0, true); 10] });
}

/// Each try to dial the one that stays silent takes seconds; there are eighty connections that would.
#[test]
fn a_silent_cable_does_not_hold_up_those_that_are_mended() {
    const TEST: &str = "rails::a_silent_cable_does_not_hold_up_those_that_are_mended";
    const CONNECTIONS: usize = 80;
    // One of four streams of each is on r1, and one on r2.
    let enough = |phase: &str, _, _| match phase {
        "cut" => lost() == 2 * CONNECTIONS,
        "back" => lost() == CONNECTIONS,
        _ => true,
    };
    if !makes_nodes(TEST, |name| talk_over(CONNECTIONS, name, enough)) {
        return;
    }
    let mut nodes = two_after(TEST, &[], 3, |_| ());
    begin(&mut nodes, "whole");
    finish(&mut nodes);
    ["r1", "r2"].iter().for_each(|cable| run(&nodes[1], &format!("tc qdisc replace dev {cable} root bfifo limit 1")));
    begin(&mut nodes, "cut");
    finish(&mut nodes);
    run(&nodes[1], "tc qdisc del dev r2 root");
    begin(&mut nodes, "back");
    finish(&mut nodes);
    end(nodes);
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
    // Every phase has its own limit.
    if !makes_nodes_for(Duration::from_secs(60) * (1 + cut.at.len() as u32), test, |name| talk(name, enough)) {
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
