//! Nodes without a subnet in common: their connections go through others.

use super::again::{Process, hear, hex, say, unhex};
use nccl_net_tinynccl::abi::Status;

use super::api::*;
use super::nodes::{cable_with, makes_nodes, node, run, sent_in, within};

const LEN: usize = 12 << 20;
const LENGTHS: [usize; 4] = [8, LEN, 0, 4097];

/// Cables `x-y` between nodes of these names, from the one with 10.0.N.1 to the one with 10.0.N.2; and their handles.
fn cabled(test: &str, names: &[&str], cables: &[(usize, usize)]) -> (Vec<Process>, Vec<String>) {
    let nodes = names.iter().map(|name| node(test, name, &[])).collect();
    plug(nodes, names, cables, |number, end| format!("10.0.{number}.{end}/30"))
}

/// As [`cabled`], for nodes that are there and with these addresses.
fn plug(
    mut nodes: Vec<Process>,
    names: &[&str],
    cables: &[(usize, usize)],
    address: impl Fn(usize, usize) -> String,
) -> (Vec<Process>, Vec<String>) {
    for (number, (one, two)) in cables.iter().enumerate() {
        let (there, back) = (format!("{}-{}", names[*one], names[*two]), format!("{}-{}", names[*two], names[*one]));
        cable_with((&there, &nodes[*one]), (&back, &nodes[*two]), |end| address(number + 1, end));
    }
    nodes.iter_mut().for_each(|node| node.tell("cabled"));
    let handles = nodes.iter_mut().map(Process::line).collect();
    (nodes, handles)
}

/// Bytes that an interface of a node has sent.
fn sent(node: &Process, interface: &str) -> u64 {
    let shown = within(node, &format!("cat /proc/{}/net/dev", node.id())).stdout;
    sent_in(&String::from_utf8_lossy(&shown), interface)
}

/// Runs a node: it executes the test's commands, and reports when each is done.
fn act() {
    say("here");
    assert_eq!(hear(), "cabled");
    let api = Api::init(12);
    let (handle, listen) = api.listen();
    say(&hex(&handle));
    let (mut sends, mut recvs): (Vec<Comm>, Vec<Comm>) = (Vec::new(), Vec::new());
    loop {
        let line = hear();
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "connect" => {
                let mut theirs = unhex(words[1]);
                let connect = || Some(api.try_connect(&mut theirs).unwrap_or_else(failed)).filter(|c| !c.is_null());
                sends.push(until("a connection", connect));
            }
            "accept" => {
                let accept = || Some(api.try_accept(listen).unwrap_or_else(failed)).filter(|c| !c.is_null());
                recvs.push(until("a connection", accept));
            }
            "send" => {
                for len in LENGTHS {
                    let data = pattern(len, len);
                    let request = api.isend(*sends.last().unwrap(), &data, 3).unwrap();
                    api.wait(request, 1);
                }
            }
            "receive" => {
                for len in LENGTHS {
                    let mut got = vec![0u8; LEN];
                    let request = api.irecv(*recvs.last().unwrap(), &mut [(&mut got, 3)]).unwrap();
                    assert_eq!(api.wait(request, 1), [len]);
                    assert!(is_pattern(&got[..len], len), "a message of {len} bytes");
                }
            }
            // Messages until a path is lost, and `left` more. The last one is shorter.
            "stream" => {
                let mut left: usize = words[1].parse().unwrap();
                while left > 0 {
                    left -= usize::from(LOG.lock().unwrap().contains("others carry on"));
                    let data = pattern(LEN - usize::from(left == 0), left);
                    let request = api.isend(*sends.last().unwrap(), &data, 3).unwrap();
                    api.wait(request, 1);
                }
            }
            "drain" => {
                let mut left: usize = words[1].parse().unwrap();
                let mut len = LEN;
                while len == LEN {
                    let mut got = vec![0u8; LEN];
                    let request = api.irecv(*recvs.last().unwrap(), &mut [(&mut got, 3)]).unwrap();
                    len = api.wait(request, 1)[0];
                    left -= usize::from(!is_pattern(&got[..len], left));
                    assert!(is_pattern(&got[..len], left), "a message with {left} left");
                }
                assert_eq!(left, 0);
            }
            // More than windows and kernels hold, so that it is still under way when a relay dies.
            "break" => {
                let (data, mut got) = (vec![1u8; 128 << 20], vec![0u8; 8]);
                let request = match sends.first() {
                    Some(send) => api.isend(*send, &data, 3).unwrap(),
                    None => api.irecv(recvs[0], &mut [(&mut got, 4)]).unwrap(),
                };
                assert_eq!(api.test(request, 1), Ok(None));
                say("under way");
                api.fails(request);
                // The warning of the failed call to NCCL.
                let log = LOG.lock().unwrap().clone();
                let last = log.lines().rfind(|line| line.starts_with("2 "));
                say(last.expect("a warning"));
                continue;
            }
            "log" => {
                let log = LOG.lock().unwrap().clone();
                say(&log.lines().filter(|line| line.contains(&words[1..].join(" "))).collect::<Vec<_>>().join(" | "));
                continue;
            }
            "exchange" => exchange(api, listen, unhex(words[1])),
            "fail" => {
                let mut theirs = unhex(words[1]);
                assert_eq!(until("an error", || api.try_connect(&mut theirs).err()), Status::RemoteError);
            }
            "end" => break,
            other => panic!("{other}"),
        }
        say("done so");
    }
    say("leaving");
    sends.into_iter().for_each(|s| api.close_send(s));
    recvs.into_iter().for_each(|r| api.close_recv(r));
    api.close_listen(listen);
    api.finalize();
    say("done");
}

/// Makes `CONNECTIONS` connections in each direction, all of them at once, as NCCL's threads do; and sends a message
/// over each.
fn exchange(api: Api, listen: Comm, theirs: Handle) {
    const CONNECTIONS: usize = 40;
    let mut handles = [theirs; CONNECTIONS];
    let mut sends: Vec<Comm> = vec![std::ptr::null_mut(); CONNECTIONS];
    let mut recvs: Vec<Comm> = Vec::new();
    until("all connections", || {
        for (send, handle) in sends.iter_mut().zip(&mut handles).filter(|(send, _)| send.is_null()) {
            *send = api.try_connect(handle).unwrap_or_else(failed);
        }
        recvs.extend(Some(api.try_accept(listen).unwrap_or_else(failed)).filter(|recv| !recv.is_null()));
        (recvs.len() == CONNECTIONS && sends.iter().all(|send| !send.is_null())).then_some(())
    });
    let data = pattern(100_000, 5);
    let sending: Vec<Comm> = sends.iter().map(|send| api.isend(*send, &data, 3).unwrap()).collect();
    for recv in &recvs {
        let mut got = vec![0u8; data.len()];
        let request = api.irecv(*recv, &mut [(&mut got, 3)]).unwrap();
        assert_eq!(api.wait(request, 1), [data.len()]);
        assert!(got == data);
    }
    sending.into_iter().for_each(|request| drop(api.wait(request, 1)));
    sends.into_iter().for_each(|s| api.close_send(s));
    recvs.into_iter().for_each(|r| api.close_recv(r));
}

/// Sends commands to two nodes at once, and waits for both.
fn both(nodes: &mut [Process], (one, first): (usize, &str), (two, second): (usize, &str)) {
    nodes[one].tell(first);
    nodes[two].tell(second);
    assert_eq!(nodes[one].line(), "done so");
    assert_eq!(nodes[two].line(), "done so");
}

fn log(node: &mut Process, part: &str) -> String {
    node.tell(&format!("log {part}"));
    node.line()
}

/// Connects two of the nodes, sends from the first to the second, and looks at the bytes that each interface sent.
fn goes_over(nodes: &mut [Process], from: usize, to: usize, handles: &[String], interfaces: &[(usize, &str)]) {
    both(nodes, (from, &format!("connect {}", handles[to])), (to, "accept"));
    let before: Vec<u64> = interfaces.iter().map(|(at, name)| sent(&nodes[*at], name)).collect();
    both(nodes, (from, "send"), (to, "receive"));
    for ((at, name), before) in interfaces.iter().zip(before) {
        let bytes = sent(&nodes[*at], name) - before;
        assert!((LEN as u64..LEN as u64 * 5 / 4).contains(&bytes), "{bytes} bytes over {name}");
    }
}

fn leave(node: &mut Process) {
    node.tell("end");
    assert_eq!(node.line(), "leaving");
}

fn end(mut nodes: Vec<Process>) {
    nodes.iter_mut().for_each(leave);
    nodes.into_iter().for_each(Process::finish);
    say("done");
}

#[test]
fn the_ends_of_a_line_talk_through_the_middle() {
    const TEST: &str = "relays::the_ends_of_a_line_talk_through_the_middle";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c"], &[(0, 1), (1, 2)]);
    goes_over(&mut nodes, 0, 2, &handles, &[(0, "a-b"), (1, "b-c")]);
    let made = log(&mut nodes[0], "made connection");
    assert!(made.contains("10.0.1.1 -> 10.0.2.2 (no subnet in common, through relay 10.0.1.2)"), "{made}");
    let accepted = log(&mut nodes[2], "accepted connection");
    assert!(accepted.contains("and 10.0.1.1:") && accepted.contains("through relay 10.0.1.2"), "{accepted}");
    let relays = log(&mut nodes[1], "net: relays a stream");
    assert_eq!(relays.matches("from 10.0.1.1:").count(), 4, "{relays}");
    end(nodes);
}

#[test]
fn the_ends_of_a_longer_line_talk_through_two_relays() {
    const TEST: &str = "relays::the_ends_of_a_longer_line_talk_through_two_relays";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c", "d"], &[(0, 1), (1, 2), (2, 3)]);
    goes_over(&mut nodes, 3, 0, &handles, &[(3, "d-c"), (2, "c-b"), (1, "b-a")]);
    let made = log(&mut nodes[3], "made connection");
    assert!(made.contains("through relays 10.0.3.1 and 10.0.2.1"), "{made}");
    end(nodes);
}

#[test]
fn a_ring_of_five_goes_the_short_way_round() {
    const TEST: &str = "relays::a_ring_of_five_goes_the_short_way_round";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c", "d", "e"], &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]);
    // Each node sends to the second next one, and relays for its neighbours.
    goes_over(&mut nodes, 0, 2, &handles, &[(0, "a-b"), (1, "b-c")]);
    goes_over(&mut nodes, 3, 0, &handles, &[(3, "d-e"), (4, "e-a")]);
    goes_over(&mut nodes, 1, 4, &handles, &[(1, "b-a"), (0, "a-e")]);
    goes_over(&mut nodes, 4, 1, &handles, &[(4, "e-a"), (0, "a-b")]);
    goes_over(&mut nodes, 2, 3, &handles, &[(2, "c-d")]);
    end(nodes);
}

/// Connects the first and the third corner of a square over both others.
fn connect_both_ways(nodes: &mut [Process], handles: &[String]) {
    // The second relay's answer may be late for the first connection.
    loop {
        both(nodes, (0, &format!("connect {}", handles[2])), (2, "accept"));
        if log(&mut nodes[0], "made connection").contains("relay 10.0.4.1") {
            break;
        }
    }
}

/// Both paths between the corners of a square are as long, and carry half of it each.
#[test]
fn two_ways_of_one_length_share_a_connection() {
    const TEST: &str = "relays::two_ways_of_one_length_share_a_connection";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c", "d"], &[(0, 1), (1, 2), (2, 3), (3, 0)]);
    connect_both_ways(&mut nodes, &handles);
    both(&mut nodes, (0, "send"), (2, "receive"));
    let bytes: Vec<u64> =
        [(0, "a-b"), (0, "a-d"), (1, "b-c"), (3, "d-c")].map(|(at, name)| sent(&nodes[at], name)).into();
    assert!(bytes.iter().all(|bytes| *bytes > 100_000), "{bytes:?}");
    assert!((LEN as u64..LEN as u64 * 5 / 4).contains(&(bytes[2] + bytes[3])), "{bytes:?}");
    let accepted = log(&mut nodes[2], "accepted connection");
    assert!(accepted.contains("10.0.1.2") && accepted.contains("10.0.4.1"), "{accepted}");
    end(nodes);
}

#[test]
fn a_killed_relay_is_an_error_of_both_ends_that_names_it() {
    const TEST: &str = "relays::a_killed_relay_is_an_error_of_both_ends_that_names_it";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c"], &[(0, 1), (1, 2)]);
    both(&mut nodes, (0, &format!("connect {}", handles[2])), (2, "accept"));
    for end in [0, 2] {
        nodes[end].tell("break");
        assert_eq!(nodes[end].line(), "under way");
    }
    nodes.remove(1).kill();
    for node in &mut nodes {
        let error = node.line();
        assert!(error.contains("through relay 10.0.1.2") && error.contains("of the relays"), "{error}");
    }
    end(nodes);
}

/// A square whose first corner sends messages of [`LEN`] to the third one over both others, until a path is lost, and
/// `more` more. Both paths have some.
fn stream_both_ways(test: &str, more: usize) -> Vec<Process> {
    let (mut nodes, handles) = cabled(test, &["a", "b", "c", "d"], &[(0, 1), (1, 2), (2, 3), (3, 0)]);
    connect_both_ways(&mut nodes, &handles);
    let relayed = |nodes: &[Process]| [(1, "b-c"), (3, "d-c")].map(|(relay, cable)| sent(&nodes[relay], cable));
    let before = relayed(&nodes);
    nodes[0].tell(&format!("stream {more}"));
    nodes[2].tell(&format!("drain {more}"));
    until("bytes over both", || {
        relayed(&nodes).iter().zip(before).all(|(now, before)| *now > before + 100_000).then_some(())
    });
    nodes
}

/// The stream of [`stream_both_ways`] ends well, though the path through the relay b was lost.
fn carries_on(nodes: &mut [Process], receiver: usize) {
    assert_eq!(nodes[0].line(), "done so");
    assert_eq!(nodes[receiver].line(), "done so");
    let lost = log(&mut nodes[0], "others carry on");
    assert!(lost.contains("over 10.0.1.1 -> 10.0.1.2"), "{lost}");
}

/// Waits until the path through the relay b is there again.
fn comes_back(nodes: &mut [Process]) {
    until("the way again", || log(&mut nodes[0], "is back").contains("through relay 10.0.1.2").then_some(()));
}

#[test]
fn of_two_relays_one_may_be_killed() {
    const TEST: &str = "relays::of_two_relays_one_may_be_killed";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let mut nodes = stream_both_ways(TEST, 20);
    // Its cables go with it.
    nodes.remove(1).kill();
    carries_on(&mut nodes, 1);
    both(&mut nodes, (0, "send"), (1, "receive"));
    end(nodes);
}

/// The stopped relay's kernel takes what is sent to it until its buffers are full, and acknowledges it: the ends probe
/// each other.
#[test]
fn of_two_relays_one_may_be_stopped() {
    const TEST: &str = "relays::of_two_relays_one_may_be_stopped";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let mut nodes = stream_both_ways(TEST, 20);
    let signal = |node: &Process, what: &str| {
        let done = std::process::Command::new("kill").args([what, &node.id().to_string()]).status();
        assert!(done.is_ok_and(|status| status.success()));
    };
    signal(&nodes[1], "-STOP");
    carries_on(&mut nodes, 2);
    signal(&nodes[1], "-CONT");
    comes_back(&mut nodes);
    both(&mut nodes, (0, "send"), (2, "receive"));
    end(nodes);
}

/// The sender's kernel sees nothing of that: the relay still acknowledges what it cannot pass on. The receiver's does,
/// if it has something to send; otherwise the two probe each other.
#[test]
fn a_cable_behind_a_relay_is_cut_and_taken_back() {
    const TEST: &str = "relays::a_cable_behind_a_relay_is_cut_and_taken_back";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let mut nodes = stream_both_ways(TEST, 20);
    run(&nodes[1], "ip link set b-c down");
    carries_on(&mut nodes, 2);
    run(&nodes[1], "ip link set b-c up");
    comes_back(&mut nodes);
    let before = sent(&nodes[1], "b-c");
    both(&mut nodes, (0, "send"), (2, "receive"));
    let bytes = sent(&nodes[1], "b-c") - before;
    assert!(bytes > 100_000, "{bytes} bytes over the cable that was cut");
    end(nodes);
}

#[test]
fn a_relay_that_is_done_goes_on_until_the_ends_are() {
    const TEST: &str = "relays::a_relay_that_is_done_goes_on_until_the_ends_are";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c"], &[(0, 1), (1, 2)]);
    both(&mut nodes, (0, &format!("connect {}", handles[2])), (2, "accept"));
    leave(&mut nodes[1]);
    for _ in 0..5 {
        both(&mut nodes, (0, "send"), (2, "receive"));
    }
    let relay = nodes.remove(1);
    nodes.iter_mut().for_each(leave);
    nodes.into_iter().for_each(Process::finish);
    relay.finish();
    say("done");
}

#[test]
fn a_relay_of_ipv6_alone() {
    const TEST: &str = "relays::a_relay_of_ipv6_alone";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let names = ["a", "b", "c"];
    let nodes = names.iter().map(|name| node(TEST, name, &[])).collect();
    // Without the search for another one with the same address, which takes a second.
    let (mut nodes, handles) =
        plug(nodes, &names, &[(0, 1), (1, 2)], |number, end| format!("fd00:{number}::{end}/64 nodad"));
    goes_over(&mut nodes, 0, 2, &handles, &[(0, "a-b"), (1, "b-c")]);
    end(nodes);
}

#[test]
fn a_node_of_another_job_is_no_relay() {
    const TEST: &str = "relays::a_node_of_another_job_is_no_relay";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let names = ["a", "b", "c"];
    let of = |name: &&str| {
        let secret = if *name == "b" { "the secret of another job" } else { "the secret of this job" };
        node(TEST, name, &[("TINYNCCL_SECRET", secret), ("TINYNCCL_CONNECT_TIMEOUT", "2")])
    };
    let nodes = names.iter().map(of).collect();
    let (mut nodes, handles) = plug(nodes, &names, &[(0, 1), (1, 2)], |number, end| format!("10.0.{number}.{end}/30"));
    nodes[0].tell(&format!("fail {}", handles[2]));
    assert_eq!(nodes[0].line(), "done so");
    let error = log(&mut nodes[0], "no relay was found");
    assert!(error.contains("a-b 10.0.1.1/30") && error.contains("10.0.2.2/30"), "{error}");
    assert!(error.contains("nodes that answered: none"), "{error}");
    end(nodes);
}

/// More than the 14 for which a handle has room, and the ones that count last.
#[test]
fn a_node_with_many_addresses_is_a_neighbour_and_a_relay() {
    const TEST: &str = "relays::a_node_with_many_addresses_is_a_neighbour_and_a_relay";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let names = ["a", "b", "c"];
    let nodes: Vec<Process> = names.iter().map(|name| node(TEST, name, &[])).collect();
    run(&nodes[1], "ip link add name many type veth peer name nobody");
    for number in 0..20 {
        run(&nodes[1], &format!("ip addr add 10.8.{number}.1/30 dev many"));
    }
    for end in ["many", "nobody"] {
        run(&nodes[1], &format!("ip link set {end} up"));
    }
    let (mut nodes, handles) = plug(nodes, &names, &[(0, 1), (1, 2)], |number, end| format!("10.0.{number}.{end}/30"));
    goes_over(&mut nodes, 0, 1, &handles, &[(0, "a-b")]);
    let made = log(&mut nodes[0], "made connection");
    assert!(made.contains("10.0.1.1 -> 10.0.1.2 (a-b, same subnet /30)"), "{made}");
    goes_over(&mut nodes, 0, 2, &handles, &[(0, "a-b"), (1, "b-c")]);
    goes_over(&mut nodes, 1, 0, &handles, &[(1, "b-a")]);
    end(nodes);
}

#[test]
fn many_connections_are_made_at_once() {
    const TEST: &str = "relays::many_connections_are_made_at_once";
    if !makes_nodes(TEST, |_| act()) {
        return;
    }
    let (mut nodes, handles) = cabled(TEST, &["a", "b", "c", "d"], &[(0, 1), (1, 2), (2, 3)]);
    let with = |other: usize| format!("exchange {}", handles[other]);
    both(&mut nodes, (0, &with(3)), (3, &with(0)));
    end(nodes);
}
