//! The start of a communicator: settings that must agree, one cost model for all ranks, the cache.

use std::path::{Path, PathBuf};

use crate::common::{Fabric, config, run_ok};
use tinynccl::bootstrap::Server;
use tinynccl::comm::Source;
use tinynccl::config::{TransportChoice, Tune, Verify};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, DType, Error, ReduceOp, Result};

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("tinynccl-tuning-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Settings that measure, with the cache in `folder`.
fn tuned(folder: &Path) -> Config {
    let mut config = config();
    config.tune = Tune::Cached;
    config.tune_cache = Some(folder.to_str().expect("text").to_owned());
    config
}

/// With fewer cores than ranks nothing is measured.
fn cores_for(ranks: usize) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < ranks {
        println!("skipped: {ranks} ranks would share {cores} cores");
    }
    cores >= ranks
}

/// Every rank's outcome of joining with its own settings.
fn join(ranks: usize, config: impl Fn(usize) -> Config) -> Vec<Result<Comm>> {
    let bind = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(bind, ranks, &config(0)).expect("server");
    let id = server.unique_id();
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..ranks)
            .map(|rank| {
                let (id, config) = (id.clone(), config(rank));
                scope.spawn(move || Comm::init(&id, rank, ranks, config))
            })
            .collect();
        handles.into_iter().map(|h| h.join().expect("a rank panicked")).collect()
    })
}

#[test]
fn settings_that_must_agree_are_named_with_both_ranks_and_values() {
    type Case = (&'static str, &'static str, &'static str, fn(&mut Config));
    let cases: [Case; 7] = [
        ("TINYNCCL_ALGO", "auto", "tree", |c| c.algorithm = Some(Algorithm::Tree)),
        ("TINYNCCL_SHM_CHUNK", "128K", "64K", |c| c.shm_chunk = 64 << 10),
        ("TINYNCCL_TCP_CHUNK", "1M", "64K", |c| c.tcp_chunk = 64 << 10),
        ("TINYNCCL_CHANNELS", "1", "2", |c| c.channels = 2),
        ("TINYNCCL_FIFO_DEPTH", "4", "8", |c| c.fifo_depth = 8),
        ("TINYNCCL_VERIFY", "off", "all", |c| c.verify = Verify::All),
        ("TINYNCCL_TRANSPORT", "auto", "tcp", |c| c.transport = TransportChoice::Tcp),
    ];
    for (setting, usual, other, change) in cases {
        for odd in [0, 2] {
            let outcomes = join(3, |rank| {
                let mut config = config();
                if rank == odd {
                    change(&mut config);
                }
                config
            });
            let (first, named, value) = if odd == 0 { (other, 1, usual) } else { (usual, 2, other) };
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                let error = outcome.map(|_| ()).expect_err("settings differ");
                assert!(matches!(&error, Error::Config { name, .. } if name == setting), "rank {rank}: {error}");
                let text = error.to_string();
                for words in [format!("rank 0 has {first}"), format!("rank {named} has {value}")] {
                    assert!(text.contains(&words), "rank {rank}: {text}");
                }
            }
        }
    }
}

#[test]
fn where_the_figures_come_from_is_decided_by_rank_0() {
    let scratch = Scratch::new("rank-0-decides");
    for first in [Tune::Off, Tune::Measure] {
        let outcomes = join(2, |rank| {
            let other = if first == Tune::Off { Tune::Measure } else { Tune::Off };
            let mut config = tuned(&scratch.0);
            config.tune = if rank == 0 { first } else { other };
            config
        });
        let models: Vec<_> = outcomes.into_iter().map(|c| c.map(|c| (c.cost_model(), c.tuning().source))).collect();
        let [Ok(a), Ok(b)] = &models[..] else { panic!("{models:?}") };
        assert_eq!(a, b);
        assert!(first == Tune::Measure || a.1 == Source::BuiltIn);
    }
}

#[test]
fn a_warm_cache_gives_the_same_model_without_a_message() {
    if !cores_for(2) {
        return;
    }
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let scratch = Scratch::new(&format!("warm-{fabric:?}"));
        let config = tuned(&scratch.0);
        let start = || {
            run_ok(fabric, 2, &config, |comm| {
                let links: usize = comm.census().links.iter().map(|(_, n)| n).sum();
                Ok((comm.cost_model(), comm.tuning(), links))
            })
        };
        let cold = start();
        assert_eq!(cold[0].0, cold[1].0);
        for (_, tuning, links) in &cold {
            assert_eq!((tuning.source, *links), (Source::Measured, 1), "{tuning:?}");
            assert!(tuning.messages > 0, "{tuning:?}");
        }
        let Some(file) = cold[0].1.file.clone() else {
            println!("the machine is too busy for figures worth keeping: a model is put in their place");
            continue;
        };
        let text = std::fs::read_to_string(&file).expect("the file was written");
        for (rank, (model, tuning, links)) in start().into_iter().enumerate() {
            assert_eq!(model, cold[rank].0, "rank {rank}");
            assert_eq!((tuning.source, tuning.messages, links), (Source::Cached, 0, 0), "rank {rank}: {tuning:?}");
            assert_eq!(tuning.file.as_ref(), Some(&file));
        }
        assert_eq!(std::fs::read_to_string(&file).expect("the file"), text, "a hit writes nothing");
        // Damage: measured again, and replaced if the machine is quiet.
        std::fs::write(&file, &text[..text.len() / 2]).expect("the file");
        for (_, tuning, _) in start() {
            assert_eq!(tuning.source, Source::Measured);
        }
    }
}

#[test]
fn an_unwritable_cache_is_no_error() {
    let config = tuned(Path::new("/proc/tinynccl"));
    let sums = run_ok(Fabric::Shm, 2, &config, |comm| {
        let mut one = [1u32];
        comm.all_reduce_in_place(&mut one, ReduceOp::Sum)?;
        Ok(one[0])
    });
    assert_eq!(sums, [2, 2]);
}

/// All that a rank would choose, as text.
fn choices(comm: &Comm) -> Result<String> {
    let mut all = String::new();
    for collective in Collective::ALL.into_iter().filter(|&c| c != Collective::SendRecv) {
        let roots = if collective.has_root() { comm.size() } else { 1 };
        for root in 0..roots {
            for bytes in (0..28).map(|k| (1usize << k) - 1) {
                let choice = comm.explain(&Call::new(collective, DType::U8, ReduceOp::Sum, root, bytes))?;
                all += &format!("{collective} {root} {bytes}: {choice:?}\n");
            }
        }
    }
    Ok(all)
}

/// Asserts that all ranks make the same choices, compared over the communicator itself.
fn same_everywhere(comm: &Comm) -> Result<()> {
    let text = choices(comm)?;
    let mut lengths = vec![0u64; comm.size()];
    comm.all_gather(&[text.len() as u64], &mut lengths)?;
    assert!(lengths.iter().all(|&n| n == text.len() as u64), "{lengths:?}");
    let mut texts = vec![0u8; text.len() * comm.size()];
    comm.all_gather(text.as_bytes(), &mut texts)?;
    for (rank, theirs) in texts.chunks(text.len()).enumerate() {
        let theirs = String::from_utf8_lossy(theirs);
        let difference = text.lines().zip(theirs.lines()).find(|(a, b)| a != b);
        assert_eq!(difference, None, "rank {} and rank {rank} choose differently", comm.rank());
    }
    Ok(())
}

#[test]
fn all_ranks_choose_the_same_after_a_split_too() {
    let scratch = Scratch::new("same-choice");
    for fabric in [Fabric::Inproc, Fabric::Shm, Fabric::Tcp] {
        for ranks in [2, 5] {
            for tune in [Tune::Off, Tune::Measure] {
                let mut config = tuned(&scratch.0);
                config.tune = tune;
                run_ok(fabric, ranks, &config, |comm| {
                    same_everywhere(&comm)?;
                    let half = comm.split(Some(comm.rank() as u32 % 2), -(comm.rank() as i32))?;
                    half.as_ref().map_or(Ok(()), same_everywhere)?;
                    comm.set_algorithm(Some(Algorithm::Tree));
                    assert_eq!(
                        comm.explain(&Call::new(Collective::AllReduce, DType::U8, ReduceOp::Sum, 0, 8))?.algorithm,
                        Algorithm::Tree
                    );
                    same_everywhere(&comm)?;
                    comm.set_algorithm(None);
                    same_everywhere(&comm)
                });
            }
        }
    }
}

#[test]
fn a_root_that_is_no_rank_is_refused() {
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        let error = comm
            .explain(&Call::new(Collective::Broadcast, DType::U8, ReduceOp::Sum, 2, 8))
            .map(|_| ())
            .expect_err("no such rank");
        assert!(error.to_string().contains("root is 2"), "{error}");
        Ok(())
    });
}
