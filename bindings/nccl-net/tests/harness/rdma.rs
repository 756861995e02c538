//! Tests over RDMA ports, by default those of the RDMA device in user space: queue pairs carry long messages.

use std::process::Command;

use super::api::LOG;
use super::nodes::{makes_nodes, run};
use super::rails::{begin, end, finish, talk, two};

/// Returns the number of ends of queue pairs that were joined, by the log.
pub(crate) fn joined() -> usize {
    LOG.lock().unwrap().matches("long messages by RDMA").count()
}

/// Returns the number of ends of queue pairs that were lost, by the log.
fn lost() -> usize {
    LOG.lock().unwrap().matches("other queue pairs and TCP carry on").count()
}

/// Returns the number of ends of queue pairs that carry fragments now.
fn alive() -> usize {
    joined() - lost()
}

/// Datagrams that this node has sent.
fn datagrams() -> u64 {
    let text = std::fs::read_to_string("/proc/self/net/snmp").unwrap();
    let [names, numbers] = [0, 1].map(|line| text.lines().filter(|l| l.starts_with("Udp:")).nth(line).unwrap());
    let at = names.split(' ').position(|name| name == "OutDatagrams").unwrap();
    numbers.split(' ').nth(at).unwrap().parse().unwrap()
}

/// All of that again, in a process in which connections have queue pairs.
#[test]
fn what_holds_within_a_process_holds_by_rdma() {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["transfers::", "ring::", "failures::"]).env("TINYNCCL_NET_RDMA", "1");
    let run = again.output().unwrap();
    let [out, err] = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(run.status.success(), "{out}\n{err}");
}

#[test]
fn a_cable_that_is_cut_costs_no_message_and_its_queue_pair_is_replaced() {
    const TEST: &str = "rdma::a_cable_that_is_cut_costs_no_message_and_its_queue_pair_is_replaced";
    let enough = |phase: &str, count, over: u64| {
        let done = match phase {
            "cut" => alive() == 1,
            "whole" => alive() == 2 && over > 1 << 20 && datagrams() > 100,
            _ => true,
        };
        count >= 50 && done
    };
    if !makes_nodes(TEST, |name| talk(name, enough)) {
        return;
    }
    let mut nodes = two(TEST, &[("TINYNCCL_NET_RDMA", "1")]);
    begin(&mut nodes, "whole");
    finish(&mut nodes);
    for at in [1, 0] {
        begin(&mut nodes, "cut");
        run(&nodes[at], "ip link set r1 down");
        finish(&mut nodes);
        begin(&mut nodes, "without");
        let (_, over) = finish(&mut nodes);
        assert!(over < 100_000, "{over} bytes over a cable that is cut");
        run(&nodes[at], "ip link set r1 up");
        begin(&mut nodes, "whole");
        finish(&mut nodes);
    }
    end(nodes);
}

/// A queue pair would wait for its peer for seconds, and then go on.
#[test]
fn a_port_that_is_down_for_a_moment_loses_its_queue_pair_and_gets_another() {
    const TEST: &str = "rdma::a_port_that_is_down_for_a_moment_loses_its_queue_pair_and_gets_another";
    let enough = |phase: &str, count, over: u64| {
        let done = match phase {
            "whole" => over > 1 << 20,
            "first" => joined() > 2,
            _ => joined() > 3,
        };
        count >= 50 && done && alive() == 2
    };
    if !makes_nodes(TEST, |name| talk(name, enough)) {
        return;
    }
    let mut nodes = two(TEST, &[("TINYNCCL_NET_RDMA", "1"), ("TINYNCCL_NET_RAIL_TIMEOUT", "5")]);
    begin(&mut nodes, "whole");
    finish(&mut nodes);
    for (at, phase) in [(1, "first"), (0, "second")] {
        begin(&mut nodes, phase);
        run(&nodes[at], "ip link set r1 down");
        run(&nodes[at], "ip link set r1 up");
        finish(&mut nodes);
    }
    end(nodes);
}
