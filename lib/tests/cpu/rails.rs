//! Ranks on two nodes with two NIC pairs between them, over rails: both pairs carry a call, and one that is cut in
//! mid-run costs no call and is taken back.

use program_kit::again::{Process, hear, say};
use program_kit::nodes::{cable, makes_nodes, run, sent_in, sent_over, within};
use tinynccl::{Comm, ReduceOp, Result};

use crate::on_nodes;

/// Elements of a call, 4 MiB of them.
const COUNT: usize = 1 << 20;
/// Calls without a byte over a NIC pair after which it counts as left.
const WITHOUT: usize = 20;
/// Bytes over a NIC pair that a few packets of the kernel's do not add up to.
const SOME: u64 = 8 << 20;

/// One call with every element checked; returns true while rank 0 goes on.
fn call(comm: &Comm, number: usize, go_on: bool) -> Result<bool> {
    let value = |rank: usize, i: usize| (i % 1000 + 3 * rank + number) as f32;
    let mut buffer: Vec<f32> = (0..COUNT).map(|i| value(comm.rank(), i)).collect();
    buffer[0] = f32::from(u8::from(go_on && comm.rank() == 0));
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    let wrong = buffer.iter().enumerate().skip(1).find(|&(i, x)| *x != value(0, i) + value(1, i));
    assert_eq!(wrong, None, "call {number}");
    Ok(buffer[0] != 0.0)
}

/// A rank on a node. It has a phase of calls for each line that it receives: until rank 0 has sent enough over the
/// second NIC pair, or nothing for long.
fn rank(name: &str) {
    say("here");
    assert_eq!(hear(), "cabled");
    let comm = Comm::from_env().expect("a communicator");
    let mut number = 0;
    // Links are opened by the first call.
    call(&comm, number, false).expect("the first call");
    say(comm.census().links.first().expect("a link").0);
    loop {
        let phase = hear();
        if phase == "end" {
            break;
        }
        let before = sent_over("r1");
        let (mut last, mut without) = (before, 0);
        loop {
            number += 1;
            let sent = sent_over("r1");
            without = if sent == last { without + 1 } else { 0 };
            last = sent;
            let enough = if phase == "cut" { without >= WITHOUT } else { sent - before >= SOME };
            if !call(&comm, number, !enough).unwrap_or_else(|e| panic!("rank {name}: {e}")) {
                break;
            }
        }
        say("enough");
    }
    comm.close().expect("nothing has failed");
    say("done");
}

fn phase(ranks: &mut [Process; 2], name: &str, meanwhile: impl FnOnce(&[Process; 2])) {
    ranks.iter_mut().for_each(|rank| rank.tell(name));
    meanwhile(ranks);
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "enough"));
}

fn sent_by(node: &Process) -> u64 {
    sent_in(&String::from_utf8_lossy(&within(node, "cat /proc/net/dev").stdout), "r1")
}

#[test]
fn a_cut_cable_costs_no_call_and_is_taken_back() {
    const TEST: &str = "rails::a_cut_cable_costs_no_call_and_is_taken_back";
    if !makes_nodes(TEST, rank) {
        return;
    }
    let settings = [
        ("TINYNCCL_TCP_RAILS", "1"),
        // The rendezvous is over a network that is not for data.
        ("TINYNCCL_IFNAME", "r"),
        // Nothing but the interface shows that a NIC pair is cut.
        ("TINYNCCL_NET_RAIL_TIMEOUT", "60"),
    ];
    let mut ranks = on_nodes::ranks(TEST, ["10.0.9.1"; 2], &settings);
    let [a, b] = &ranks;
    cable(("r0", a), ("r0", b), 1);
    cable(("r1", a), ("r1", b), 2);
    cable(("meet", a), ("meet", b), 9);
    ranks.iter_mut().for_each(|rank| rank.tell("cabled"));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "rails"));
    // Ends when rank 0 has sent enough over the second one.
    phase(&mut ranks, "both", |_| ());
    phase(&mut ranks, "cut", |ranks| {
        let before = sent_by(&ranks[0]);
        while sent_by(&ranks[0]) - before < SOME / 8 {}
        run(&ranks[0], "ip link set r1 down");
    });
    phase(&mut ranks, "back", |ranks| run(&ranks[0], "ip link set r1 up"));
    ranks.iter_mut().for_each(|rank| rank.tell("end"));
    ranks.into_iter().for_each(Process::finish);
    say("done");
}
