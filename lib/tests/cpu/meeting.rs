//! Ranks on two nodes with two cables between them, and the connection to the rendezvous store over one of these: it
//! goes on over the other when that one is cut.

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
    // Links are made by the first call, over the other cable.
    assert_eq!(sum(&comm), 3.0);
    say("joined");
    while hear() == "split" {
        let half = comm.split(Some(0), 0).expect("there is a way to the store").expect("all have the same color");
        assert_eq!(sum(&half), 3.0);
        say("split");
    }
    // The end of a process shows over the cable that is left, too.
    let lost = comm.split(Some(0), 0).expect_err("rank 1 has ended");
    assert!(matches!(lost, Error::PeerLost { peer: 1, .. }), "{lost}");
    say("done");
}

/// Two ranks on nodes with cables of these names, of which `cut` carries the connection to the store.
fn meet(test: &str, cables: [&str; 2], cut: &str, rails: &str) {
    if !makes_nodes(test, rank) {
        return;
    }
    let settings = [("TINYNCCL_IFNAME", "r"), ("TINYNCCL_TCP_RAILS", rails)];
    let mut ranks = on_nodes::ranks(test, ["10.0.9.1"; 2], &settings);
    let [a, b] = &ranks;
    for (subnet, name) in (1..).zip(cables) {
        cable((name, a), (name, b), if name == cut { 9 } else { subnet });
    }
    ranks.iter_mut().for_each(|rank| rank.tell("cabled"));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "joined"));
    let split = |ranks: &mut [Process; 2]| {
        ranks.iter_mut().for_each(|rank| rank.tell("split"));
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "split"));
    };
    split(&mut ranks);
    run(&ranks[1], &format!("ip link set {cut} down"));
    split(&mut ranks);
    // The store has no use for a cable that comes back.
    run(&ranks[1], &format!("ip link set {cut} up"));
    split(&mut ranks);
    let [mut zero, one] = ranks;
    one.kill();
    zero.tell("end");
    zero.finish();
    say("done");
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
