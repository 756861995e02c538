//! Each launcher's variables, and what is wrong with half a set.

use std::collections::HashMap;

use super::source::first_host;
use super::*;

fn env(text: &str) -> Result<Plan> {
    let map: HashMap<&str, &str> = text.split_whitespace().map(|kv| kv.split_once('=').unwrap()).collect();
    plan(&|name| map.get(name).map(|v| (*v).to_owned()))
}

fn is_rank(text: &str) -> bool {
    let map: HashMap<&str, &str> = text.split_whitespace().map(|kv| kv.split_once('=').unwrap()).collect();
    started_as_rank(&|name| map.get(name).map(|v| (*v).to_owned()))
}

fn numbers(text: &str) -> (&'static str, usize, usize, usize) {
    let plan = env(text).unwrap();
    (plan.launcher.name(), plan.rank, plan.world_size, plan.local_rank)
}

const MASTER: &str = "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500";
const ID: &str =
    "TINYNCCL_UNIQUE_ID=tinynccl-4-0000000000000000000000000000000000000000000000000000000000000007@127.0.0.1:99";
const SRUN: &str = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=2 SLURM_JOB_ID=70000 SLURM_STEP_NODELIST=n[07-08]";

#[test]
fn each_launcher_is_read() {
    for (text, expected) in [
        (format!("{ID} RANK=1 WORLD_SIZE=4 LOCAL_RANK=1"), ("tinynccl", 1, 4, 1)),
        (format!("{MASTER} RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4"), ("torchrun", 5, 8, 1)),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4"
                .into(),
            ("Open MPI", 3, 4, 3),
        ),
        ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4".into(), ("Hydra (MPICH, Intel MPI)", 3, 4, 3)),
        (SRUN.into(), ("Slurm", 5, 8, 1)),
        // srun --mpi=pmi2
        (format!("{SRUN} PMI_RANK=5 PMI_SIZE=8"), ("Slurm", 5, 8, 1)),
        // mpirun inside an allocation: Slurm's variables are those of the proxy.
        (
            format!("{SRUN} PMI_RANK=6 PMI_SIZE=8 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=8"),
            ("Hydra (MPICH, Intel MPI)", 6, 8, 2),
        ),
        // A batch script that sets torch's variables for srun, but for the rank.
        (format!("{SRUN} {MASTER} WORLD_SIZE=8"), ("Slurm", 5, 8, 1)),
        // By hand on one host.
        ("MASTER_ADDR=localhost MASTER_PORT=1 RANK=2 WORLD_SIZE=3".into(), ("torchrun", 2, 3, 2)),
    ] {
        assert_eq!(numbers(&text), expected, "{text}");
        assert!(is_rank(&text), "{text}");
    }
}

#[test]
fn ours_goes_before_torchrun_before_mpi_before_slurm() {
    let mpi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMI_RANK=0 PMI_SIZE=3";
    assert_eq!(numbers(&format!("{SRUN} {mpi} {MASTER} RANK=1 WORLD_SIZE=9")).0, "torchrun");
    assert_eq!(numbers(&format!("{SRUN} {mpi} {MASTER} {ID} RANK=1 WORLD_SIZE=9")).0, "tinynccl");
    assert_eq!(numbers(&format!("{SRUN} {mpi}")).0, "Open MPI");
}

/// The outer launcher's variables, the inner one's, and the one that counts. Each world is checked at all of its ranks,
/// since each detects by itself.
#[test]
fn the_innermost_launcher_counts() {
    let step = |task: usize, tasks: usize| {
        format!(
            "SLURM_PROCID={task} SLURM_STEP_NUM_TASKS={tasks} SLURM_NTASKS=8 SLURM_LOCALID={task} SLURM_STEP_ID=1 SLURM_JOB_ID=7 \
             SLURM_STEP_NODELIST=n1 "
        )
    };
    let batch = "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=4294967291 SLURM_JOB_ID=7 ".to_owned();
    let open_mpi = |rank: usize, size: usize| {
        format!(
            "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} OMPI_COMM_WORLD_LOCAL_RANK={rank} \
             OMPI_COMM_WORLD_LOCAL_SIZE={size} "
        )
    };
    let pmi = |rank: usize, size: usize| format!("PMI_RANK={rank} PMI_SIZE={size} ");
    let hydra = |rank: usize, size: usize| format!("{}MPI_LOCALRANKID={rank} MPI_LOCALNRANKS={size} ", pmi(rank, size));
    let plain = |rank: usize, size: usize| format!("RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank} ");
    let torchrun = |rank, size| format!("{MASTER} TORCHELASTIC_RUN_ID=a {}", plain(rank, size));
    let ours = |rank, size| format!("{ID} {}", plain(rank, size));
    let none = String::new();
    let hydra_name = "Hydra (MPICH, Intel MPI)";
    type World<'a> = &'a dyn Fn(usize, usize) -> String;
    for (outside, inside, sizes, launcher) in [
        // Each in a step of one task, as `srun --pty` or a batch script's `srun -n 1` makes it, and in a batch script.
        (&step(0, 1), &open_mpi as World<'_>, &[1, 2, 4][..], "Open MPI"),
        (&step(0, 1), &hydra, &[1, 2, 4], hydra_name),
        (&step(0, 1), &pmi, &[2, 4], hydra_name),
        (&step(0, 1), &torchrun, &[1, 2, 4], "torchrun"),
        (&step(0, 1), &ours, &[1, 2, 4], "tinynccl"),
        (&batch, &open_mpi, &[1, 2], "Open MPI"),
        (&batch, &hydra, &[1, 2], hydra_name),
        (&batch, &pmi, &[1, 2], hydra_name),
        (&batch, &torchrun, &[1, 2], "torchrun"),
        // In a step that has started their daemons, one per host: this host is the first or the second one.
        (&step(0, 2), &open_mpi, &[1, 2, 4], "Open MPI"),
        (&step(1, 2), &open_mpi, &[1, 2, 4], "Open MPI"),
        (&step(0, 2), &hydra, &[1, 2, 4], hydra_name),
        (&step(1, 2), &hydra, &[1, 2, 4], hydra_name),
        (&step(1, 2), &torchrun, &[4], "torchrun"),
        (&step(0, 2), &ours, &[2], "tinynccl"),
        // A launcher per host, or one that starts another.
        (&open_mpi(1, 2), &torchrun, &[1, 4], "torchrun"),
        (&hydra(1, 2), &torchrun, &[1, 4], "torchrun"),
        (&open_mpi(0, 2), &ours, &[2], "tinynccl"),
        (&open_mpi(0, 1), &hydra, &[2, 3], hydra_name),
        (&open_mpi(0, 1), &pmi, &[2, 3], hydra_name),
        (&hydra(0, 1), &open_mpi, &[2, 3], "Open MPI"),
        (&ours(0, 2), &torchrun, &[2, 4], "torchrun"),
        // A shell in which someone has set the variables of a single process, with no rendezvous.
        (&plain(0, 1), &open_mpi, &[2], "Open MPI"),
        (&plain(0, 1), &hydra, &[2], hydra_name),
        (&plain(0, 1), &|rank, size| step(rank, size), &[2], "Slurm"),
        // srun --mpi=pmi2
        (&none, &|rank, size| step(rank, size) + &pmi(rank, size), &[1, 2, 4], "Slurm"),
    ] {
        for &size in sizes {
            for rank in 0..size {
                // The last one that sets a variable counts.
                let text = format!("{outside} {}", inside(rank, size));
                let plan = env(&text).unwrap();
                assert_eq!((plan.launcher.name(), plan.rank, plan.world_size), (launcher, rank, size), "{text}");
            }
        }
    }
}

#[test]
fn sources() {
    let one_host = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2";
    assert_eq!(env(one_host).unwrap().source, Source::ThisHost);
    assert_eq!(env("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2").unwrap().source, Source::ThisHost);
    assert_eq!(env("PMI_RANK=0 PMI_SIZE=1").unwrap().source, Source::Alone);
    // No variable has the number of ranks here.
    assert_eq!(env("PMI_RANK=1 PMI_SIZE=2").unwrap().source, Source::ThisHost);
    let in_step = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=0";
    assert_eq!(env(&format!("{in_step} PMI_RANK=0 PMI_SIZE=2")).unwrap().source, Source::ThisHost);
    let several = env(&format!("{in_step} PMI_RANK=0 PMI_SIZE=2 SLURM_JOB_NUM_NODES=2")).unwrap_err().to_string();
    assert!(several.contains("MASTER_ADDR=\"\""), "{several}");
    assert_eq!(env("RANK=0 WORLD_SIZE=1").unwrap().source, Source::Alone);
    assert!(matches!(env(&format!("{ID} {one_host}")).unwrap().source, Source::Id(_)));
    let address = |text: &str| match env(text).unwrap().source {
        Source::Address { hosts, port, .. } => (hosts, port),
        other => panic!("{other:?}"),
    };
    let master = vec![("MASTER_ADDR", "10.0.0.1".to_owned())];
    assert_eq!(address(&format!("{MASTER} {one_host}")), (master.clone(), 29500));
    assert_eq!(address(&format!("{MASTER} RANK=0 WORLD_SIZE=2")), (master.clone(), 29500));
    assert_eq!(address(&format!("{MASTER} RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=False")).1, 29500);
    assert_eq!(address(&format!("{MASTER} RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True")).1, 29501);
    let (hosts, port) = address(&format!("{SRUN} SLURM_LAUNCH_NODE_IPADDR=10.9.9.9"));
    assert_eq!(hosts[0], ("SLURM_STEP_NODELIST", "n07".to_owned()));
    assert_eq!(hosts[1].1, "10.9.9.9");
    assert_eq!(port, 61440 + (70002 % 4096) as u16);
}

#[test]
fn jobs_of_launchers_are_told_apart() {
    let job = |text: &str| match env(text).unwrap().source {
        Source::Address { job, .. } => job,
        other => panic!("{other:?}"),
    };
    let by_hand = format!("{MASTER} RANK=0 WORLD_SIZE=2");
    let same = format!("{MASTER} RANK=1 WORLD_SIZE=2");
    assert_eq!(job(&by_hand), job(&same));
    let all = [
        by_hand.clone(),
        format!("{by_hand} TORCHELASTIC_RUN_ID=a"),
        format!("{by_hand} TORCHELASTIC_RUN_ID=b"),
        SRUN.to_owned(),
        SRUN.replace("STEP_ID=2", "STEP_ID=3"),
    ];
    let jobs: std::collections::HashSet<_> = all.iter().map(|t| job(t)).collect();
    assert_eq!(jobs.len(), all.len());
    // An agent of torchrun's counts its own restarts: hosts of one world may differ in that.
    let torchrun = |count: &str| job(&format!("{by_hand} TORCHELASTIC_RUN_ID=a {count}"));
    assert_eq!(torchrun("TORCHELASTIC_RESTART_COUNT=0"), torchrun("TORCHELASTIC_RESTART_COUNT=1"));
    assert_eq!(torchrun(""), torchrun("TORCHELASTIC_RESTART_COUNT=1"));
    assert_eq!(job(SRUN), job(&format!("{SRUN} SLURM_RESTART_COUNT=1")));
}

#[test]
fn what_is_wrong_is_named() {
    let id = format!("{ID} RANK=0");
    for (text, words) in [
        ("", vec!["RANK=\"\"", "missing", "torchrun, mpirun or srun"]),
        ("WORLD_SIZE=2", vec!["RANK=\"\"", "WORLD_SIZE is set"]),
        ("RANK=1", vec!["WORLD_SIZE=\"\"", "RANK is set"]),
        (id.as_str(), vec!["WORLD_SIZE=\"\"", "missing"]),
        ("RANK=one WORLD_SIZE=2", vec!["RANK=\"one\"", "whole number"]),
        ("RANK=-1 WORLD_SIZE=2", vec!["RANK=\"-1\"", "whole number"]),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_LAUNCH_NODE_IPADDR=", vec!["too"]),
        (
            "RANK=2 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
            vec!["RANK=\"2\"", "out of range", "WORLD_SIZE=2 allows 0 to 1"],
        ),
        ("RANK=0 WORLD_SIZE=0", vec!["WORLD_SIZE=\"0\"", "at least one"]),
        ("RANK=0 WORLD_SIZE=2", vec!["MASTER_ADDR=\"\"", "missing"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h", vec!["MASTER_PORT=\"\"", "MASTER_ADDR is set"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", vec!["MASTER_ADDR=\"\"", "MASTER_PORT is set"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=http", vec!["MASTER_PORT=\"http\"", "1 to 65535"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=0", vec!["MASTER_PORT=\"0\"", "1 to 65535"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000", vec!["MASTER_PORT=\"70000\"", "1 to 65535"]),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True",
            vec!["MASTER_PORT=\"65535\"", "no next port"],
        ),
        ("RANK=0 WORLD_SIZE=2 TINYNCCL_UNIQUE_ID=x", vec!["TINYNCCL_UNIQUE_ID=\"x\"", "expected tinynccl-4-"]),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x MASTER_ADDR=h MASTER_PORT=1", vec!["LOCAL_RANK=\"x\"", "whole number"]),
        ("OMPI_COMM_WORLD_RANK=0", vec!["OMPI_COMM_WORLD_SIZE=\"\"", "OMPI_COMM_WORLD_RANK is set"]),
        ("OMPI_COMM_WORLD_SIZE=2", vec!["OMPI_COMM_WORLD_RANK=\"\"", "OMPI_COMM_WORLD_SIZE is set"]),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            vec!["MASTER_ADDR=\"\"", "Open MPI", "-x"],
        ),
        ("PMI_RANK=0", vec!["PMI_SIZE=\"\"", "PMI_RANK is set"]),
        ("PMI_RANK=4 PMI_SIZE=4", vec!["PMI_RANK=\"4\"", "out of range"]),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_JOB_ID=3", vec!["SLURM_NTASKS=\"\"", "SLURM_PROCID is set"]),
        (
            "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_JOB_ID=3",
            vec!["SLURM_STEP_NODELIST=\"\"", "MASTER_ADDR"],
        ),
    ] {
        let e = env(text).unwrap_err().to_string();
        for word in words {
            assert!(e.contains(word), "{text}: {word:?} not in: {e}");
        }
    }
}

#[test]
fn a_batch_script_or_an_interactive_step_is_not_a_rank() {
    assert!(!is_rank(""));
    assert!(!is_rank("SLURM_PROCID=0 SLURM_NTASKS=4"));
    assert!(!is_rank("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291"));
    // `srun --pty bash`, in which our launcher starts ranks.
    assert!(!is_rank("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1"));
    assert!(is_rank("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 PMI_RANK=0 PMI_SIZE=2"));
    assert!(is_rank("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2"));
    assert!(is_rank("SLURM_PROCID=0 SLURM_STEP_ID=0"), "how many there are is missing");
    assert_eq!(numbers(&SRUN.replace("=5", "=0").replace("=8", "=1")), ("Slurm", 0, 1, 1), "on request");
    assert!(is_rank("WORLD_SIZE=2"), "half a set is an error to be told, not a reason to launch");
}

#[test]
fn first_hosts_of_node_lists() {
    for (list, first) in [
        ("n1", Some("n1")),
        ("n1,n2", Some("n1")),
        ("node[003-005,9],gpu1", Some("node003")),
        ("rack[0-1]n[2,5].x", Some("rack0n2.x")),
        ("a[7]b,c", Some("a7b")),
        ("", None),
        ("n[1", None),
    ] {
        assert_eq!(first_host(list).as_deref(), first, "{list}");
    }
}
