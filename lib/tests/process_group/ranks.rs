//! Ranks as processes: started here as a launcher would, or by mpirun.

use std::process::{Child, Command, Stdio};

use tinynccl::process_group::{BackendType, Device, InitOptions, init_process_group};

use super::common::config;
use super::place::Site;
use super::{failures, random, suite};
use program_kit::port::Port;

/// Task of a rank: a backend, or `mpi-alone`.
const TASK: &str = "TINYNCCL_TEST_TASK";

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// One rank among processes. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let Some(task) = variable(TASK) else { return };
    let options = InitOptions::from_env().config(config());
    if task == "mpi-alone" {
        let error = init_process_group(BackendType::Mpi, &options).expect_err("mpirun did not start us").to_string();
        assert!(error.contains("start the ranks by mpirun"), "{error}");
        return;
    }
    let backend: BackendType = task.parse().expect("a backend");
    let device = if backend == BackendType::Nccl { Device::LocalRank } else { Device::None };
    let options = options.device(device);
    let group = init_process_group(backend, &options).expect("a group");
    assert_eq!(group.backend(), backend);
    let site = if backend == BackendType::Nccl { Site::gpu(&group) } else { Site::Host };
    suite::all(&group, &site);
    if backend == BackendType::Mpi {
        println!("{}", group.why());
        let ours = init_process_group(BackendType::Tinynccl, &options).expect("a second group");
        suite::ok(&group, "random values", random::compare(&ours, &group));
        ours.close().expect("nothing has failed");
    }
    if backend != BackendType::Nccl {
        let all: Vec<usize> = (0..group.size()).collect();
        let part = group.new_group(&all).expect("a part").expect("with us");
        failures::mismatch(&part);
        let part = group.new_group(&all).expect("a part").expect("with us");
        failures::message_mismatch(&part);
        // The parent is not harmed by the end of its part.
        group.barrier().expect("the parent works on");
    }
    group.close().expect("nothing has failed");
}

fn this_program(task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(ARGUMENTS).env(TASK, task);
    command
}

const ARGUMENTS: [&str; 4] = ["--exact", "ranks::a_rank", "--nocapture", "--test-threads=1"];

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a process")
}

fn finish(child: Child, who: &str) {
    let output = child.wait_with_output().expect("its end");
    assert!(output.status.success(), "{who}: {}", String::from_utf8_lossy(&output.stderr));
}

/// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
pub(crate) fn by_environment(task: &str, world: usize) {
    let port = Port::loopback();
    let start = |rank: usize| start(this_program(task).envs(port.environment(rank, world)));
    let ranks: Vec<Child> = (0..world).map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        finish(child, &format!("{task}: rank {rank} of {world}"));
    }
}

/// mpirun, allowed to run as root and more ranks than cores by the variables that Open MPI 4 and 5 read; MPICH needs
/// neither.
pub(crate) fn by_mpirun(world: usize) {
    let child = Command::new("mpirun")
        .args(["-n", &world.to_string()])
        .arg(std::env::current_exe().expect("this binary"))
        .args(ARGUMENTS)
        .env(TASK, "mpi")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun");
    finish(child, &format!("mpirun -n {world}"));
}

/// Two ranks that no mpirun started: each is a separate world to MPI.
pub(crate) fn mpi_without_mpirun() {
    by_environment("mpi-alone", 2);
}
