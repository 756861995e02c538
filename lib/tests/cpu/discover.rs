//! The graph of the machines that ranks are on: threads, processes, and nodes that are network namespaces.

use program_kit::again::{self, Process, hear, say};
use program_kit::nodes::{cable, makes_nodes, run as run_on};
use tinynccl::simulate::machine::description::Description;
use tinynccl::simulate::machine::{Graph, Machine as _};
use tinynccl::wire::Collective;
use tinynccl::{Call, Comm, DType, ReduceOp};

use crate::common::{FABRICS, Fabric, config, run_ok};
use crate::on_nodes;

fn of_kind<'a>(description: &'a Description, kind: &str) -> Vec<&'a str> {
    let nodes = description.node.iter().filter(|node| node.kind.as_deref() == Some(kind));
    nodes.map(|node| node.name.as_str()).collect()
}

/// All ranks get the same, before and after calls, and what they get is a machine of their number.
#[test]
fn ranks_of_this_host_get_the_same_graph() {
    for fabric in FABRICS {
        let all = run_ok(fabric, 4, &config(), |comm| {
            let mut sum = [comm.rank() as u32];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            let found = comm.discover()?;
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            assert_eq!((sum, comm.discover()?), ([24], found.clone()));
            let half = comm.split(Some(comm.rank() as u32 % 2), 0)?.expect("all have a colour");
            assert_eq!(Graph::new(&half.discover()?)?.ranks(), 2);
            half.close()?;
            comm.close().map(|()| found)
        });
        assert!(all.iter().all(|found| *found == all[0]), "{fabric:?}: {all:?}");
        let found = &all[0];
        let graph = Graph::new(found).expect("a machine");
        assert_eq!(graph.ranks(), 4);
        let homes = found.node.iter().filter(|node| node.ranks > 0);
        assert!(homes.clone().all(|node| matches!(node.kind.as_deref(), Some("host" | "numa"))), "{found:?}");
        // Measured, and not built in: no two ranks pass 10 GB/s and 0.1 us to three digits.
        let inside = homes.filter_map(|node| node.inside).next().expect("two of four ranks share a NUMA node");
        assert!(inside.latency_us > 0.0 && inside.bandwidth_gb_s > 0.0, "{inside:?}");
        assert!(of_kind(found, "network").is_empty(), "one host: {found:?}");
    }
}

#[test]
fn a_rank_alone_has_a_graph() {
    let comm = Comm::threads(1, config()).expect("a rank").remove(0);
    let found = comm.discover().expect("it needs no other");
    assert_eq!(Graph::new(&found).expect("a machine").ranks(), 1);
}

/// On one host the choice stays: there is nothing to pack for.
#[test]
fn on_one_host_auto_packs_nothing() {
    let auto = config().with(|c| c.topology = Some("auto".to_owned()));
    let call = Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 1 << 20);
    for fabric in FABRICS {
        let packed = run_ok(fabric, 3, &auto, |comm| {
            let packed = comm.explain(&call)?.packed;
            comm.barrier()?;
            comm.close().map(|()| packed)
        });
        assert_eq!(packed, [false; 3], "{fabric:?}");
    }
}

/// A rank on a node: what it finds goes to the parent as text.
fn rank(_: &str) {
    say("here");
    assert_eq!(hear(), "go");
    let comm = Comm::from_env().expect("a communicator");
    let found = comm.discover().expect("the others do the same");
    say(&serde_json::to_string(&found).expect("text"));
    let mut sum: Vec<u32> = vec![comm.rank() as u32; 1 << 16];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).expect("links are as they were");
    assert!(sum.iter().all(|&x| x as usize == comm.size() * (comm.size() - 1) / 2));
    comm.close().expect("nothing has failed");
    say("done");
}

/// The graph that all ranks have found.
fn found<const N: usize>(ranks: &mut [Process; N]) -> Description {
    ranks.iter_mut().for_each(|rank| rank.tell("go"));
    let texts: Vec<String> = ranks.iter_mut().map(Process::line).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    Description::parse(&texts[0]).expect("a description")
}

#[test]
fn two_hosts_on_a_cable() {
    if !makes_nodes("discover::two_hosts_on_a_cable", rank) {
        return;
    }
    let mut ranks =
        on_nodes::ranks("discover::two_hosts_on_a_cable", ["10.0.1.1"; 2], &[("TINYNCCL_TOPOLOGY", "auto")]);
    let [a, b] = &ranks;
    cable(("eth7", a), ("eth8", b), 1);
    let found = found(&mut ranks);
    assert_eq!(of_kind(&found, "network"), ["10.0.1.0/30"]);
    let ports = of_kind(&found, "port");
    assert!(ports.len() == 2 && ports[0].ends_with("/eth7") && ports[1].ends_with("/eth8"), "{found:?}");
    let note = found.node.iter().find(|node| node.name == ports[0]).and_then(|node| node.note.clone());
    assert!(note.is_some_and(|note| note.starts_with("10.0.1.1/30, ") && note.ends_with(" measured")), "{found:?}");
    ranks.into_iter().for_each(Process::finish);
    say("done");
}

/// Bits per second of the slow cable.
const SLOW: &str = "200mbit";

#[test]
fn a_line_with_a_slow_cable() {
    const TEST: &str = "discover::a_line_with_a_slow_cable";
    if !makes_nodes(TEST, rank) {
        return;
    }
    let mut ranks = on_nodes::ranks(TEST, ["10.0.1.1", "10.0.1.1", "10.0.2.1"], &[]);
    let [middle, one, two] = &ranks;
    cable(("r0", middle), ("r0", one), 1);
    cable(("r1", middle), ("r0", two), 2);
    for (node, port) in [(middle, "r1"), (two, "r0")] {
        run_on(node, &format!("tc qdisc add dev {port} root tbf rate {SLOW} burst 64kb latency 30ms"));
    }
    let found = found(&mut ranks);
    assert_eq!(of_kind(&found, "network"), ["10.0.1.0/30", "10.0.2.0/30"]);
    let graph = Graph::new(&found).expect("a machine");
    let narrowest = |from, to| {
        let mut way = Vec::new();
        graph.route(from, to, &mut way);
        way.iter().map(|&link| graph.bandwidth(link)).fold(f64::INFINITY, f64::min) / 1e9
    };
    // Never more than the cable carries, but for a burst; less where other programs have the cores.
    assert!(narrowest(0, 2) < 0.05, "{found:?}");
    assert!(narrowest(1, 2) <= narrowest(0, 2), "through the middle: {found:?}");
    ranks.into_iter().for_each(Process::finish);
    say("done");
}

/// GPUs over the stand-in for NVIDIA's management library, in a process that has it in front.
#[test]
fn gpus_and_nvlinks_over_the_stand_in() {
    const TEST: &str = "discover::gpus_and_nvlinks_over_the_stand_in";
    if again::role().is_some() {
        let found = run_ok(Fabric::Inproc, 2, &config(), |comm| comm.discover());
        assert_eq!(found[0], found[1]);
        say(&serde_json::to_string(&found[0]).expect("text"));
        return say("done");
    }
    let folder = cuda_standin::folder().expect("the stand-in was built");
    let folder = folder.to_str().expect("text");
    for (links, nvswitches, gb_s) in [("18", 1, Some(371.0)), ("4gpu", 0, Some(82.4)), ("0", 0, None)] {
        let settings = [("LD_LIBRARY_PATH", folder), ("TINYNCCL_STANDIN_NVLINKS", links)];
        let mut process = again::start(&[], TEST, "with GPUs", &settings);
        let found = Description::parse(&process.line()).expect("a description");
        process.finish();
        assert_eq!((of_kind(&found, "gpu").len(), of_kind(&found, "nvswitch").len()), (2, nvswitches), "{found:?}");
        let nvlink = found.link.iter().find(|link| link.kind.as_deref() == Some("nvlink"));
        assert_eq!(nvlink.map(|link| link.bandwidth_gb_s), gb_s, "{links}: {found:?}");
    }
}
