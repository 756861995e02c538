//! Ranks on two nodes with NIC pairs between them, and the connection to the rendezvous store over one of these: it
//! goes on over the other when that one is cut, and over the same when it is back.

use std::time::Duration;

use program_kit::again::{Process, hear, say};
use program_kit::nodes::{cable, makes_nodes, run};
use tinynccl::{Comm, Error, ReduceOp};

use crate::on_nodes;

fn sum(comm: &Comm) -> f32 {
    let mut buffer = vec![comm.rank() as f32 + 1.0; 1000];
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).expect("a cable is there");
    assert!(buffer.iter().all(|x| *x == buffer[0]));
    buffer[0]
}

/// A rank on a node. Each split needs the store.
fn rank(_: &str) {
    say("here");
    assert_eq!(hear(), "cabled");
    let comm = Comm::from_env().expect("a communicator");
    // Links are opened by the first call, over the other NIC pair.
    assert_eq!(sum(&comm), 3.0);
    say("joined");
    while hear() == "split" {
        let half = comm.split(Some(0), 0).expect("there is a way to the store").expect("all have the same color");
        assert_eq!(sum(&half), 3.0);
        say("split");
    }
    // The end of a process shows over the NIC pair that is left, too.
    let lost = comm.split(Some(0), 0).expect_err("rank 1 has ended");
    assert!(matches!(lost, Error::PeerLost { peer: 1, .. }), "{lost}");
    say("done");
}

/// Two ranks on nodes with NIC pairs of these names, of which `cut` carries the connection to the store.
fn meet(test: &str, cables: [&str; 2], cut: &str, rails: &str) {
    if !makes_nodes(test, rank) {
        return;
    }
    let mut ranks = joined(test, &cables, cut, &[("TINYNCCL_IFNAME", "r"), ("TINYNCCL_TCP_RAILS", rails)]);
    split(&mut ranks);
    run(&ranks[1], &format!("ip link set {cut} down"));
    split(&mut ranks);
    // The store has no use for a NIC pair that comes back.
    run(&ranks[1], &format!("ip link set {cut} up"));
    split(&mut ranks);
    end(ranks);
}

/// Two ranks on nodes with these NIC pairs, `meet` of which carries the connection to the store.
fn joined(test: &str, cables: &[&str], meet: &str, settings: &[(&str, &str)]) -> [Process; 2] {
    let mut ranks = on_nodes::ranks(test, ["10.0.9.1"; 2], settings);
    let [a, b] = &ranks;
    for (subnet, name) in (1..).zip(cables) {
        cable((name, a), (name, b), if *name == meet { 9 } else { subnet });
    }
    ranks.iter_mut().for_each(|rank| rank.tell("cabled"));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "joined"));
    ranks
}

fn split(ranks: &mut [Process; 2]) {
    split_during(ranks, |_| {});
}

/// Both ranks need the store while something happens.
fn split_during(ranks: &mut [Process; 2], meanwhile: impl FnOnce(&[Process; 2])) {
    ranks.iter_mut().for_each(|rank| rank.tell("split"));
    meanwhile(ranks);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "split"));
}

fn end([mut zero, one]: [Process; 2]) {
    one.kill();
    zero.tell("end");
    zero.finish();
    say("done");
}

/// Milliseconds for which something is away: fewer and more than it takes until another route is looked for.
const AWAY: [u64; 4] = [400, 700, 2500, 1200];

/// Address by address, of the store's host and of the other one, is away for a while.
fn addresses_go_and_come(test: &str, cables: &[&str], interfaces: &str) {
    if !makes_nodes(test, rank) {
        return;
    }
    let settings = [("TINYNCCL_IFNAME", interfaces), ("TINYNCCL_HEARTBEAT", "0.02")];
    let mut ranks = joined(test, cables, "meet", &settings);
    for away in AWAY {
        for end in [0, 1] {
            let address = format!("10.0.9.{}/30 dev meet", end + 1);
            split_during(&mut ranks, |ranks| {
                run(&ranks[end], &format!("ip addr del {address}"));
                std::thread::sleep(Duration::from_millis(away));
                run(&ranks[end], &format!("ip addr add {address}"));
            });
        }
    }
    end(ranks);
}

#[test]
fn an_address_that_comes_back_ends_no_rank() {
    addresses_go_and_come("meeting::an_address_that_comes_back_ends_no_rank", &["meet"], "meet");
}

#[test]
fn an_address_that_comes_back_ends_no_rank_that_has_another() {
    const TEST: &str = "meeting::an_address_that_comes_back_ends_no_rank_that_has_another";
    addresses_go_and_come(TEST, &["r0", "meet"], "r");
}

/// Loss of all packets that one host sends over a NIC pair, one pair and direction after the other.
#[test]
fn a_cable_that_is_blocked_one_way_ends_no_rank() {
    const TEST: &str = "meeting::a_cable_that_is_blocked_one_way_ends_no_rank";
    if !makes_nodes(TEST, rank) {
        return;
    }
    let settings = [("TINYNCCL_IFNAME", "r"), ("TINYNCCL_HEARTBEAT", "0.02")];
    let mut ranks = joined(TEST, &["r0", "meet"], "meet", &settings);
    for (round, away) in AWAY.into_iter().enumerate() {
        for end in [0, 1] {
            let (subnet, name) = [(9, "meet"), (1, "r0")][round % 2];
            let neighbour = format!("10.0.{subnet}.{} dev {name}", 2 - end);
            split_during(&mut ranks, |ranks| {
                // To an address that no interface has.
                run(&ranks[end], &format!("ip neigh replace {neighbour} lladdr 02:00:00:00:00:77 nud permanent"));
                std::thread::sleep(Duration::from_millis(away));
                run(&ranks[end], &format!("ip neigh del {neighbour}"));
            });
        }
    }
    end(ranks);
}

#[test]
fn the_store_is_reached_over_a_cable_for_data() {
    const TEST: &str = "meeting::the_store_is_reached_over_a_cable_for_data";
    meet(TEST, ["r0", "meet"], "meet", "0");
}

#[test]
fn links_and_the_store_survive_the_cable_that_they_share() {
    const TEST: &str = "meeting::links_and_the_store_survive_the_cable_that_they_share";
    meet(TEST, ["r0", "r1"], "r0", "1");
}
