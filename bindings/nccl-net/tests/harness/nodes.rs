//! Connections between nodes that are network namespaces: a cable per pair, each with its own subnet, which NCCL's own
//! sockets cannot use.

use nccl_net_tinynccl::abi::Status;
pub(crate) use program_kit::nodes::{
    cable, cable_with, makes_nodes, makes_nodes_for, node, run, sent_in, sent_over, within,
};

use super::again::{Process, hear, hex, say, unhex};
use super::api::*;

/// Runs a node: it listens, connects to the peers that it is given, sends to each and receives from each.
fn talk(name: &str) {
    // More than a thread writes to each stream in one time slice.
    const LEN: usize = 12 << 20;
    say("here");
    assert_eq!(hear(), "cabled");
    let api = Api::init(12);
    let (handle, listen) = api.listen();
    say(&hex(&handle));
    // NAME HANDLE INTERFACES, each of them a peer.
    let peers: Vec<(String, Handle, String)> = hear()
        .split(';')
        .map(|peer| {
            let words: Vec<&str> = peer.split(' ').collect();
            (words[0].to_owned(), unhex(words[1]), words[2].to_owned())
        })
        .collect();
    let mut handles: Vec<Handle> = peers.iter().map(|p| p.1).collect();
    let mut sends: Vec<Comm> = vec![std::ptr::null_mut(); peers.len()];
    let mut recvs: Vec<Comm> = Vec::new();
    until("all peers", || {
        for (send, handle) in sends.iter_mut().zip(&mut handles).filter(|(s, _)| s.is_null()) {
            *send = api.try_connect(handle).unwrap_or_else(failed);
        }
        if recvs.len() < peers.len() {
            recvs.extend(Some(api.try_accept(listen).unwrap_or_else(failed)).filter(|r| !r.is_null()));
        }
        (recvs.len() == peers.len() && sends.iter().all(|s| !s.is_null())).then_some(())
    });
    let seed = name.as_bytes()[0] as usize;
    let data = pattern(LEN, seed);
    let mut got = vec![vec![0u8; LEN]; peers.len()];
    let requests: Vec<Comm> =
        recvs.iter().zip(&mut got).map(|(recv, got)| api.irecv(*recv, &mut [(got, 0)]).unwrap()).collect();
    let sending: Vec<Comm> = sends.iter().map(|send| api.isend(*send, &data, 0).unwrap()).collect();
    requests.into_iter().chain(sending).for_each(|r| drop(api.wait(r, 1)));
    for (peer, ..) in &peers {
        let seed = peer.as_bytes()[0] as usize;
        assert!(got.iter().any(|g| is_pattern(g, seed)), "node {name} got nothing right from {peer}");
    }
    // The cables of a node go with it.
    say("received");
    assert_eq!(hear(), "count");
    for (peer, _, interfaces) in &peers {
        let sent: Vec<u64> = interfaces.split('+').map(sent_over).collect();
        let all = sent.iter().sum::<u64>();
        assert!((LEN as u64..2 * LEN as u64).contains(&all), "{name} to {peer}: {sent:?} bytes over {interfaces}");
        // Beside a few packets that set a connection up.
        assert!(sent.iter().all(|bytes| *bytes > 100_000), "{name} to {peer}: {sent:?} bytes over {interfaces}");
    }
    say("counted");
    assert_eq!(hear(), "end");
    sends.into_iter().for_each(|s| api.close_send(s));
    recvs.into_iter().for_each(|r| api.close_recv(r));
    api.close_listen(listen);
    api.finalize();
    say("done");
}

#[test]
fn a_triangle_with_a_subnet_per_cable() {
    const TEST: &str = "nodes::a_triangle_with_a_subnet_per_cable";
    if !makes_nodes(TEST, talk) {
        return;
    }
    let nodes: Vec<Process> = ["a", "b", "c"].iter().map(|name| node(TEST, name, &[])).collect();
    cable(("ab", &nodes[0]), ("ba", &nodes[1]), 1);
    cable(("bc", &nodes[1]), ("cb", &nodes[2]), 2);
    cable(("ca", &nodes[2]), ("ac", &nodes[0]), 3);
    introduce(
        nodes,
        &[&[("b", 1, "ab"), ("c", 2, "ac")], &[("a", 0, "ba"), ("c", 2, "bc")], &[("a", 0, "ca"), ("b", 1, "cb")]],
    );
}

/// Sends each node its peers, each by its name, its number and our interfaces to it; and waits until all are done.
fn introduce(mut nodes: Vec<Process>, peers: &[&[(&str, usize, &str)]]) {
    nodes.iter_mut().for_each(|node| node.tell("cabled"));
    let handles: Vec<String> = nodes.iter_mut().map(Process::line).collect();
    for (node, peers) in nodes.iter_mut().zip(peers) {
        let told: Vec<String> =
            peers.iter().map(|(name, index, interfaces)| format!("{name} {} {interfaces}", handles[*index])).collect();
        node.tell(&told.join(";"));
    }
    for (said, next) in [("received", "count"), ("counted", "end")] {
        nodes.iter_mut().for_each(|node| assert_eq!(node.line(), said));
        nodes.iter_mut().for_each(|node| node.tell(next));
    }
    nodes.into_iter().for_each(Process::finish);
    say("done");
}

#[test]
fn two_cables_carry_one_connection() {
    const TEST: &str = "nodes::two_cables_carry_one_connection";
    if !makes_nodes(TEST, talk) {
        return;
    }
    let nodes: Vec<Process> = ["a", "b"].iter().map(|name| node(TEST, name, &[])).collect();
    cable(("r0", &nodes[0]), ("r0", &nodes[1]), 1);
    cable(("r1", &nodes[0]), ("r1", &nodes[1]), 2);
    introduce(nodes, &[&[("b", 1, "r0+r1")], &[("a", 0, "r0+r1")]]);
}

#[test]
fn a_cable_of_ipv6_alone() {
    const TEST: &str = "nodes::a_cable_of_ipv6_alone";
    if !makes_nodes(TEST, talk) {
        return;
    }
    let nodes: Vec<Process> = ["a", "b"].iter().map(|name| node(TEST, name, &[])).collect();
    // Without the search for another one with the same address, which takes a second.
    cable_with(("six", &nodes[0]), ("six", &nodes[1]), |end| format!("fd00:1::{end}/64 nodad"));
    introduce(nodes, &[&[("b", 1, "six")], &[("a", 0, "six")]]);
}

/// The ends of a line reach each other over no cable for data. One end receives the error from the other over a network
/// that is not for data; where there is none, at its deadline.
#[test]
fn without_a_way_both_ends_name_all_ports() {
    const TEST: &str = "nodes::without_a_way_both_ends_name_all_ports";
    if !makes_nodes(TEST, apart) {
        return;
    }
    for management in [true, false] {
        let settings =
            [("TINYNCCL_IFNAME", "^management,lo"), ("TINYNCCL_CONNECT_TIMEOUT", if management { "60" } else { "2" })];
        let mut nodes: Vec<Process> = ["a", "b", "c"].iter().map(|name| node(TEST, name, &settings)).collect();
        cable(("ab", &nodes[0]), ("ba", &nodes[1]), 1);
        cable(("bc", &nodes[1]), ("cb", &nodes[2]), 2);
        if management {
            cable(("management", &nodes[0]), ("management", &nodes[2]), 3);
        }
        nodes.iter_mut().for_each(|node| node.tell("cabled"));
        let handle = nodes[2].line();
        nodes[0].tell(&handle);
        let dialed = nodes[0].line();
        assert!(dialed.contains("ab 10.0.1.1/30") && dialed.contains("10.0.2.2/30"), "{dialed}");
        let accepted = nodes[2].line();
        assert!(accepted.contains("cb 10.0.2.2/30"), "{accepted}");
        assert_eq!(accepted.contains("ab 10.0.1.1/30"), management, "{accepted}");
        nodes.iter_mut().for_each(|node| node.tell("end"));
        nodes.into_iter().for_each(Process::finish);
    }
    say("done");
}

fn apart(name: &str) {
    say("here");
    assert_eq!(hear(), "cabled");
    let errors = || LOG.lock().unwrap().lines().filter(|l| l.starts_with("2 ")).collect::<Vec<_>>().join(" ");
    match name {
        "a" => {
            let api = Api::init(12);
            let mut handle = unhex(&hear());
            assert_eq!(until("an error", || api.try_connect(&mut handle).err()), Status::RemoteError);
            say(&errors());
            api.finalize();
        }
        "c" => {
            let api = Api::init(12);
            let (handle, listen) = api.listen();
            say(&hex(&handle));
            assert_eq!(until("an error", || api.try_accept(listen).err()), Status::RemoteError);
            say(&errors());
            api.close_listen(listen);
            api.finalize();
        }
        _ => {}
    }
    // The cables of a node go with it.
    assert_eq!(hear(), "end");
    say("done");
}
