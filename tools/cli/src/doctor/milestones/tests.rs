use std::path::Path;

use super::super::gpu::{Cuda, Gpu};
use super::super::host::Host;
use super::super::network::Interface;
use super::super::rdma::{Device, Gid, Port, Rdma};
use super::super::software::Software;
use super::super::{Roots, report};
use super::*;

/// A machine with a loopback and nothing else.
fn bare() -> Facts {
    let nowhere = || Path::new("/nowhere").to_path_buf();
    Facts {
        host: Host::read(&Roots { proc: nowhere(), sys: nowhere(), dev: nowhere() }),
        interfaces: vec![Interface {
            name: "lo".into(),
            state: "unknown".into(),
            loopback: true,
            mtu: Some(65536),
            speed: None,
            addresses: vec!["127.0.0.1/8".into()],
        }],
        rdma: Rdma { devices: Vec::new(), uverbs: false },
        cuda: Cuda { driver: Err("x".into()), gpus: Vec::new(), nvrtc: Err("x".into()) },
        nccl_libraries: Vec::new(),
        software: Software {
            python: Err("no Python with numpy; tried much".into()),
            torch: Err("no Python with torch; tried more".into()),
            mpirun: None,
            mpicc: None,
            qemu: None,
            mdbook: None,
            verbs_lacks: vec!["cmake"],
        },
    }
}

fn gpu(peers: &[usize]) -> Gpu {
    Gpu { name: "H200".into(), capability: (9, 0), memory: 1 << 37, peers: peers.to_vec() }
}

fn with_rdma(mut facts: Facts) -> Facts {
    let gid = Gid { index: 1, gid: "::ffff:10.1.1.1".parse().unwrap(), kind: "RoCE v2".into(), interface: None };
    let port =
        Port { number: 1, state: "ACTIVE".into(), link_layer: "Ethernet".into(), rate: "x".into(), gids: vec![gid] };
    facts.rdma = Rdma { devices: vec![Device { name: "rxe0".into(), ports: vec![port] }], uverbs: true };
    facts.software.verbs_lacks.clear();
    facts
}

fn verdicts(facts: &Facts) -> Vec<(u8, Verdict)> {
    all(facts).iter().map(|m| (m.number, m.verdict)).collect()
}

fn of(facts: &Facts, number: u8) -> Milestone {
    all(facts).into_iter().find(|m| m.number == number).unwrap()
}

#[test]
fn the_milestones_are_those_of_the_workspace() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../milestones");
    for (number, name) in (1..).zip(NAMES) {
        assert!(folder.join(format!("{number:02}-{name}/README.md")).exists(), "{number} {name}");
    }
}

#[test]
fn what_is_missing_has_a_step_that_mends_it() {
    let facts = bare();
    use Verdict::{Cannot, Fallback, Runs};
    let expected =
        [Runs, Runs, Cannot, Fallback, Runs, Runs, Runs, Runs, Cannot, Runs, Cannot, Cannot, Runs, Cannot, Runs, Runs];
    assert_eq!(verdicts(&facts), (1..).zip(expected).collect::<Vec<_>>());
    for milestone in all(&facts).iter().filter(|m| m.verdict == Cannot) {
        assert!(milestone.mend.is_some(), "{milestone:?}");
    }
    assert_eq!(of(&facts, 12).mend, Some(PYTHON));
    assert!(of(&facts, 12).how.ends_with("with torch"), "without the list of places");
    assert_eq!((of(&facts, 13).mend, of(&facts, 2).mend), (Some(MPI), None));
    let mut cut_off = bare();
    cut_off.interfaces.clear();
    assert_eq!((of(&cut_off, 1).verdict, of(&cut_off, 16).verdict), (Cannot, Cannot));
    assert_eq!(of(&cut_off, 7).mend, Some(LOOPBACK));
}

#[test]
fn rdma_on_the_card_in_user_space_or_on_a_device() {
    let mut facts = bare();
    assert_eq!([2, 5, 8].map(|n| of(&facts, n).how), [CARD; 3]);
    assert!(of(&facts, 4).how.starts_with("host memory on the card"), "{}", of(&facts, 4).how);
    facts = with_rdma(facts);
    assert_eq!((of(&facts, 8).verdict, of(&facts, 8).mend), (Verdict::Runs, None));
    assert!(of(&facts, 8).how.ends_with("with --features verbs"));
    facts.software.verbs_lacks = vec!["cmake"];
    assert_eq!((of(&facts, 8).verdict, of(&facts, 8).mend), (Verdict::Runs, Some(VERBS)));
    facts.interfaces.clear();
    assert_eq!([4, 8].map(|n| of(&facts, n).verdict), [Verdict::Cannot; 2]);
}

#[test]
fn gpus_by_how_many_and_what_they_reach() {
    let with = |gpus: Vec<Gpu>| {
        let mut facts = bare();
        facts.cuda = Cuda { driver: Ok("x".into()), gpus, nvrtc: Ok("x".into()) };
        facts
    };
    let two = with(vec![gpu(&[1]), gpu(&[0])]);
    assert_eq!([3, 9, 14].map(|n| of(&two, n).verdict), [Verdict::Runs; 3]);
    assert!(of(&two, 16).how.contains("GPUs"));
    let one = with(vec![gpu(&[])]);
    assert_eq!((of(&one, 3).verdict, of(&one, 9).verdict), (Verdict::Runs, Verdict::Fallback));
    let apart = with(vec![gpu(&[]), gpu(&[])]);
    assert!(of(&apart, 9).how.contains("without peer access"));
    let hidden = with(Vec::new());
    assert_eq!(of(&hidden, 3).mend, Some("unset CUDA_VISIBLE_DEVICES"));
    let mut no_compiler = two;
    no_compiler.cuda.nvrtc = Err("x".into());
    assert_eq!((of(&no_compiler, 3).mend, of(&no_compiler, 9).mend), (Some(NVRTC), Some(NVRTC)));
    let both = with_rdma(with(vec![gpu(&[])]));
    assert_eq!((of(&both, 4).verdict, of(&bare(), 4).verdict), (Verdict::Runs, Verdict::Fallback));
}

#[test]
fn the_report_has_a_line_for_each_milestone_and_device() {
    let mut facts = with_rdma(bare());
    facts.cuda.gpus = vec![gpu(&[])];
    facts.software.python = Ok(Interpreter {
        program: "/usr/bin/python3".into(),
        version: "3.11.2".into(),
        torch: None,
        numpy: Some("1".into()),
    });
    let text = report::text(&facts, &all(&facts), false);
    for name in NAMES {
        assert!(text.contains(name), "{name} in\n{text}");
    }
    for words in ["rxe0", "GID 1: 10.1.1.1, RoCE v2", "GPU 0", "127.0.0.1/8", "3.11.2", "-> scripts/setup.sh --python"]
    {
        assert!(text.contains(words), "{words} in\n{text}");
    }
}

#[test]
fn the_report_ends_with_a_count_and_what_would_add_to_it() {
    let mut facts = bare();
    facts.cuda.driver = Err("libcuda.so.1 was not found; it comes with NVIDIA's driver".into());
    let text = report::text(&facts, &all(&facts), false);
    for words in [
        "\n10 milestones run here, 1 with a fallback, 5 not.\n",
        "\n  scripts/setup.sh --python, as root: what is missing for 11, 12\n",
        "\n  scripts/setup.sh --mpi, as root: mpirun for 13\n",
        "\n  scripts/setup.sh --book: ",
        "\nNext: `cargo xtask next`",
        "no: libcuda.so.1 was not found\n",
    ] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    let verbose = report::text(&facts, &all(&facts), true);
    assert!(verbose.contains("no: libcuda.so.1 was not found; it comes with"), "{verbose}");
    facts.software.mdbook = Some("/usr/bin/mdbook".into());
    assert!(!report::text(&facts, &all(&facts), false).contains("--book"));
}
