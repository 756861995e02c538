//! Calls on a machine that a file describes: trees packed for its links.

use tinynccl::wire::Collective;
use tinynccl::{Call, Config, DType, Error, ReduceOp};

use crate::common::cells::{self, Cell};
use crate::common::{Fabric, config, run, run_ok};

const DUMB_BELL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/topologies/dumb-bell.toml");

fn described(path: &str) -> Config {
    config().with(|c| c.topology = Some(path.to_owned()))
}

/// All forms of all collectives, of sizes below and above that from which trees are packed.
#[test]
fn packed_trees_give_the_same_values() {
    for (fabric, channels) in [(Fabric::Tcp, 1), (Fabric::Tcp, 4), (Fabric::Shm, 2)] {
        let config = described(DUMB_BELL).with(|c| {
            c.channels = channels;
            // Over links, not through the shared region.
            (c.one_shot, c.stage) = (0, 0);
        });
        run_ok(fabric, 4, &config, |comm| {
            for collective in cells::COLLECTIVES {
                for count in [1000, 5000, 50_003] {
                    let cell = Cell { collective, dtype: DType::I32, op: ReduceOp::Sum, root: 3, count };
                    cells::check(&comm, cell, &format_args!("{fabric:?}, {channels} channels"))?;
                }
            }
            comm.close()
        });
    }
}

#[test]
fn they_are_taken_where_they_are_faster_and_allowed() {
    let packed = |config: &Config, collective, count| {
        let call = Call::new(collective, DType::F32, ReduceOp::Sum, 0, count);
        let all = run_ok(Fabric::Tcp, 4, config, |comm| {
            let packed = comm.explain(&call)?.packed;
            comm.close().map(|()| packed)
        });
        assert!(all.iter().all(|packed| *packed == all[0]), "{all:?}");
        all[0]
    };
    let plain = described(DUMB_BELL);
    assert!(packed(&plain, Collective::AllReduce, 1 << 20) && packed(&plain, Collective::Broadcast, 1 << 20));
    // Latency decides; the direct exchange is the fastest; another order, another algorithm.
    assert!(!packed(&plain, Collective::AllReduce, 1 << 10) && !packed(&plain, Collective::AllToAll, 1 << 20));
    let fixed = plain.clone().with(|c| c.fixed_order = true);
    assert!(!packed(&fixed, Collective::AllReduce, 1 << 20) && packed(&fixed, Collective::Broadcast, 1 << 20));
    let ring = plain.with(|c| c.algorithm = Some(tinynccl::wire::Algorithm::Ring));
    assert!(!packed(&ring, Collective::AllReduce, 1 << 20) && !packed(&config(), Collective::AllReduce, 1 << 20));
}

/// Rank 0's file counts, so all ranks get its error.
#[test]
fn a_file_that_does_not_fit_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let broken = folder.path().join("broken.toml");
    std::fs::write(&broken, "[[node]]\nname = 1\n").expect("a file");
    for (path, ranks, detail) in [
        (DUMB_BELL, 3, "it has 4 ranks, the communicator has 3"),
        (broken.to_str().expect("text"), 2, "invalid type: integer"),
        ("/nowhere/at-all.toml", 2, "No such file"),
    ] {
        let config = described(path).with(|c| c.transport = tinynccl::config::TransportChoice::Tcp);
        let server = tinynccl::bootstrap::Server::start("127.0.0.1:0".parse().expect("an address"), ranks, &config);
        let server = server.expect("server");
        let id = server.unique_id();
        std::thread::scope(|scope| {
            let ranks = (0..ranks).map(|rank| {
                let (id, mut config) = (id.clone(), config.clone());
                // The others have none.
                config.topology = config.topology.filter(|_| rank == 0);
                scope.spawn(move || tinynccl::Comm::init(&id, rank, ranks, config).expect_err("it does not fit"))
            });
            for error in ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("a rank panicked")) {
                assert!(matches!(&error, Error::Config { name, .. } if name == "TINYNCCL_TOPOLOGY"), "{error}");
                assert!(error.to_string().contains(detail), "{error}");
            }
        });
    }
    let sizes = run(Fabric::Inproc, 4, &described(DUMB_BELL), |comm| comm.size());
    assert_eq!(sizes, [4; 4]);
}

/// A description of hosts with these ranks, and links of 1 GB/s between nodes.
fn written(folder: &tempfile::TempDir, ranks: &[usize], switches: usize, links: &[(usize, usize)]) -> String {
    let inside = "inside = { latency_us = 0.2, bandwidth_gb_s = 20.0 }";
    let host = |(at, ranks): (usize, &usize)| format!("[[node]]\nname = \"{at}\"\nranks = {ranks}\n{inside}\n");
    let switch = |at: usize| format!("[[node]]\nname = \"{}\"\n", ranks.len() + at);
    let link = |(a, b): &(usize, usize)| {
        format!("[[link]]\nbetween = [\"{a}\", \"{b}\"]\nlatency_us = 5.0\nbandwidth_gb_s = 1.0\n")
    };
    let nodes = ranks.iter().enumerate().map(host).chain((0..switches).map(switch));
    let text: String = nodes.chain(links.iter().map(link)).collect();
    let path = folder.path().join("described.toml");
    std::fs::write(&path, text).expect("a file");
    path.to_str().expect("text").to_owned()
}

/// A group over a ring of six hosts, and one on two of them, both of which call at the same time.
#[test]
fn groups_of_a_split_keep_the_description() {
    let folder = tempfile::tempdir().expect("a folder");
    let ring: Vec<(usize, usize)> = (0..6).map(|at| (at, (at + 1) % 6)).collect();
    let path = written(&folder, &[2, 2, 1, 1, 1, 1], 0, &ring);
    let config = described(&path).with(|c| (c.one_shot, c.stage) = (0, 0));
    let packed = run_ok(Fabric::Tcp, 8, &config, |comm| {
        let group = comm.split(Some(u32::from(matches!(comm.rank(), 1 | 3))), 0)?.expect("a colour");
        let call = Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 1 << 20);
        let packed = group.explain(&call)?.packed;
        for (collective, count) in cells::COLLECTIVES.into_iter().flat_map(|c| [(c, 1000), (c, 50_003)]) {
            let cell = Cell { collective, dtype: DType::I32, op: ReduceOp::Sum, root: 1, count };
            cells::check(&group, cell, &"a group beside another one")?;
        }
        group.close()?;
        comm.close().map(|()| packed)
    });
    let six = [0, 2, 4, 5, 6, 7].map(|rank| packed[rank]);
    assert_eq!((six, packed[1]), ([true; 6], packed[3]), "{packed:?}");
}

/// More ranks than are packed: hosts that alternate between two switches.
#[test]
fn many_ranks_take_the_order_for_rings() {
    const RANKS: usize = 66;
    let folder = tempfile::tempdir().expect("a folder");
    let legs = (0..RANKS).map(|host| (host, RANKS + host % 2)).chain([(RANKS, RANKS + 1)]);
    let path = written(&folder, &[1; RANKS], 2, &legs.collect::<Vec<_>>());
    let config = described(&path).with(|c| (c.one_shot, c.stage) = (0, 0));
    run_ok(Fabric::Inproc, RANKS, &config, |comm| {
        for collective in [Collective::AllReduce, Collective::Broadcast, Collective::Reduce] {
            let cell = Cell { collective, dtype: DType::I32, op: ReduceOp::Sum, root: 7, count: 40_000 };
            cells::check(&comm, cell, &"many ranks")?;
        }
        comm.close()
    });
}
