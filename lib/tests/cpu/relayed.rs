//! Three ranks on nodes in a line, whose ends have no network in common: their messages to each other go through the
//! middle, over TCP and over rails.

use program_kit::again::{Process, hear, say};
use program_kit::nodes::{cable, makes_nodes, run};
use tinynccl::{Comm, ReduceOp};

use crate::on_nodes;

/// Elements of a call.
const COUNT: usize = 100_000;

/// Calls of all ranks, and of the ends alone, with every element checked.
fn calls(comm: &Comm) {
    let mut buffer: Vec<f32> = (0..COUNT).map(|i| (i % 1000 + comm.rank()) as f32).collect();
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).expect("there is a way");
    let wrong = buffer.iter().enumerate().find(|&(i, x)| *x != (3 * (i % 1000) + 3) as f32);
    assert_eq!(wrong, None);
    if comm.rank() > 0 {
        let other = 3 - comm.rank();
        let (ours, mut theirs) = (vec![comm.rank() as u32; COUNT], vec![0; COUNT]);
        comm.send_recv(&ours, other, &mut theirs, other).expect("there is a way");
        assert!(theirs.iter().all(|x| *x == other as u32));
    }
}

/// Runs a rank; the middle is rank 0, which hosts the rendezvous.
fn rank(_: &str) {
    say("here");
    let kind = hear();
    let comm = Comm::from_env().expect("a communicator");
    let ways: Vec<String> = comm.relayed().iter().map(ToString::to_string).collect();
    assert_eq!(ways, ["rank 1 ↔ rank 2: no common subnet, through rank 0"]);
    while hear() == "calls" {
        calls(&comm);
        let kinds: Vec<&str> = comm.census().links.iter().map(|(kind, _)| *kind).collect();
        assert!(comm.rank() == 0 || kinds.contains(&&*format!("{kind}, relayed")), "{kinds:?}");
        say("done");
    }
    let relayed = comm.census().relayed.bytes;
    assert_eq!(relayed > 0, comm.rank() == 0, "{relayed}");
    comm.close().expect("nothing has failed");
    say("done");
}

/// A line with two NIC pairs between neighbours; `then` may do something to them between two rounds of calls.
fn line(test: &str, kind: &str, rails: &str, then: impl FnOnce(&[Process; 3])) {
    if !makes_nodes(test, rank) {
        return;
    }
    // Each end reaches the middle at a separate address.
    let meet = ["10.0.1.1", "10.0.1.1", "10.0.2.1"];
    let mut ranks = on_nodes::ranks(test, meet, &[("TINYNCCL_TCP_RAILS", rails)]);
    let [middle, one, two] = &ranks;
    cable(("r0", middle), ("r0", one), 1);
    cable(("r1", middle), ("r0", two), 2);
    cable(("r2", middle), ("r1", one), 3);
    cable(("r3", middle), ("r1", two), 4);
    ranks.iter_mut().for_each(|rank| rank.tell(kind));
    let calls = |ranks: &mut [Process; 3]| {
        ranks.iter_mut().for_each(|rank| rank.tell("calls"));
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "done"));
    };
    calls(&mut ranks);
    then(&ranks);
    calls(&mut ranks);
    ranks.iter_mut().for_each(|rank| rank.tell("end"));
    ranks.into_iter().for_each(Process::finish);
    say("done");
}

#[test]
fn the_ends_of_a_line_talk_through_the_middle() {
    line("relayed::the_ends_of_a_line_talk_through_the_middle", "tcp", "0", |_| ());
}

#[test]
fn over_rails_a_cable_of_each_hop_may_be_cut() {
    const TEST: &str = "relayed::over_rails_a_cable_of_each_hop_may_be_cut";
    line(TEST, "rails", "1", |[middle, ..]| {
        run(middle, "ip link set r0 down");
        run(middle, "ip link set r3 down");
    });
}
