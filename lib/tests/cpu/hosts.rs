//! Ranks on several hosts: hierarchical calls, and algorithms that take the ranks of a host one after the other. The
//! hosts are assumed, or network namespaces.

use program_kit::again::{self, Process, hear, say};
use program_kit::nodes::{cable, makes_nodes, node, run as run_in};

use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Config, DType, ReduceOp};

use crate::common::cells::{self, Cell};
use crate::common::{FABRICS, Fabric, config, run_ok};

/// Over links, not through a shared region.
fn over_links(channels: usize) -> Config {
    config().with(|c| {
        (c.one_shot, c.stage, c.channels) = (0, 0, channels);
        (c.shm_chunk, c.tcp_chunk) = (4 << 10, 4 << 10);
    })
}

/// Blocks, round robin, hosts of different sizes, a host that comes twice.
const PLACES: [&[usize]; 5] =
    [&[0, 0, 1, 1], &[0, 1, 0, 1, 0, 1], &[0, 0, 0, 1, 1], &[0, 1, 1, 2, 0, 1, 2], &[0, 1, 1]];

#[test]
fn values_are_right_on_any_hosts_over_every_transport() {
    for (fabric, (at, labels)) in
        FABRICS.into_iter().flat_map(|fabric| PLACES.into_iter().enumerate().map(move |place| (fabric, place)))
    {
        let config = over_links(1 + at % 3);
        let others = [Algorithm::Ring, Algorithm::DoubleTree, Algorithm::HalvingDoubling];
        run_ok(fabric, labels.len(), &config, |comm| {
            comm.assume_hosts(labels);
            for algorithm in [Algorithm::Hierarchical, others[at % 3]] {
                comm.set_algorithm(Some(algorithm));
                for (root, collective) in cells::COLLECTIVES.into_iter().enumerate() {
                    for (count, op, dtype) in [(1, ReduceOp::Sum, DType::I32), (7001, ReduceOp::Avg, DType::F64)] {
                        let cell = Cell { collective, dtype, op, root: root % labels.len(), count };
                        cells::check(&comm, cell, &format_args!("{fabric:?}, {labels:?}, {algorithm}"))?;
                    }
                }
            }
            comm.close()
        });
    }
}

#[test]
fn the_hierarchy_is_chosen_between_hosts_and_not_on_one() {
    let chosen = |labels: &'static [usize], config: &Config, collective, count| {
        let call = Call::new(collective, DType::F32, ReduceOp::Sum, 0, count);
        let all = run_ok(Fabric::Tcp, labels.len(), config, |comm| {
            comm.assume_hosts(labels);
            let choice = comm.explain(&call)?;
            comm.close().map(|()| choice.algorithm)
        });
        assert!(all.iter().all(|algorithm| *algorithm == all[0]), "{all:?}");
        all[0]
    };
    let plain = config();
    let two: &[usize] = &[0, 0, 0, 0, 1, 1, 1, 1];
    for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
        assert_eq!(chosen(two, &plain, collective, 1 << 18), Algorithm::Hierarchical, "{collective}");
    }
    assert_eq!(chosen(&[0, 1, 0, 1], &plain, Collective::AllReduce, 1 << 20), Algorithm::Hierarchical);
    assert_ne!(chosen(&[0; 4], &plain, Collective::AllReduce, 1 << 20), Algorithm::Hierarchical);
    // Sums in rank order, and rounded once, are made elsewhere.
    let fixed = plain.clone().with(|c| c.fixed_order = true);
    assert_ne!(chosen(two, &fixed, Collective::AllReduce, 1 << 18), Algorithm::Hierarchical);
    assert_eq!(chosen(two, &fixed, Collective::AllGather, 1 << 18), Algorithm::Hierarchical);
    let exact = plain.with(|c| (c.sum, c.algorithm) = (tinynccl::config::Sums::Exact, Some(Algorithm::Hierarchical)));
    assert_ne!(chosen(two, &exact, Collective::AllReduce, 1 << 18), Algorithm::Hierarchical);
}

const TEST: &str = "hosts::two_namespaces_of_two_ranks";

/// A namespace shares no memory with another: two hosts, whose ranks are numbered in turn.
#[test]
fn two_namespaces_of_two_ranks() {
    if !makes_nodes(TEST, |_| a_rank()) {
        return;
    }
    let start = |rank: &str, beside: Option<&Process>| {
        let settings = [
            ("RANK", rank),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "10.0.9.1"),
            ("MASTER_PORT", "29513"),
            ("TINYNCCL_TUNE", "off"),
        ];
        let Some(beside) = beside else { return node(TEST, rank, &settings) };
        let mut process = again::start(&["nsenter", "-t", &beside.id().to_string(), "-n"], TEST, rank, &settings);
        assert_eq!(process.line(), "here");
        process
    };
    let (a, b) = (start("0", None), start("1", None));
    cable(("r0", &a), ("r0", &b), 9);
    for node in [&a, &b] {
        run_in(node, "ip link set lo up");
    }
    let (c, d) = (start("2", Some(&a)), start("3", Some(&b)));
    let mut ranks = [a, b, c, d];
    ranks.iter_mut().for_each(|rank| rank.tell("go"));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "hierarchical"));
    ranks.into_iter().for_each(Process::finish);
    say("done");
}

/// A rank says that it is here, waits until the cable is there, and makes its calls.
fn a_rank() {
    say("here");
    assert_eq!(hear(), "go");
    let comm = tinynccl::Comm::from_env().expect("a communicator");
    let call = Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 1 << 18);
    let choice = comm.explain(&call).expect("a choice");
    for collective in cells::COLLECTIVES {
        let cell = Cell { collective, dtype: DType::I32, op: ReduceOp::Sum, root: 3, count: 100_003 };
        cells::check(&comm, cell, &"two namespaces").expect("equal");
    }
    say(&choice.algorithm.to_string());
    comm.close().expect("nothing has failed");
    say("done");
}
