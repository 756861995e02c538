//! Groups that go on without a rank that is lost: the old group's communicator shrinks, and a new group is made of it.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use program_kit::port::Port;
use rustix::process::{Signal, getpid, kill_process};
use tinynccl::process_group::{BackendType, Device, InitOptions, ProcessGroup, init_process_group};
use tinynccl::{ReduceOp, cuda};

use super::common::config;
use super::place::Site;
use super::suite;

/// Set for a process that is a rank: the rank that dies.
const VICTIM: &str = "TINYNCCL_TEST_VICTIM";

/// One rank. It does nothing unless it is started for that.
#[test]
fn rank() {
    let Ok(victim) = std::env::var(VICTIM) else { return };
    let device = if cuda::device_count().is_ok() { Device::LocalRank } else { Device::None };
    let site = |group: &ProcessGroup| group.device().map_or(Site::Host, |_| Site::gpu(group));
    let options = InitOptions::from_env().config(config()).device(device);
    let group = init_process_group(BackendType::Tinynccl, &options).expect("a group");
    suite::all(&group, &site(&group));
    if group.rank().to_string() == victim {
        kill_process(getpid(), Signal::KILL).expect("it is ours");
    }
    let error = loop {
        let input = site(&group).put(vec![1f32; 1000]);
        let work = group.all_reduce_in_place_async(input, ReduceOp::Sum);
        if let Err(error) = work.and_then(|work| work.wait().map(drop)) {
            break error;
        }
    };
    group.comm().revoke().expect("revoked");
    let comm = group.comm().shrink().unwrap_or_else(|e| panic!("after {error}: {e}"));
    let (backend, size) = (group.backend(), group.size());
    drop(group);
    let group = ProcessGroup::new(comm, backend, device).expect("a group of those that live");
    assert_eq!(group.size(), size - 1);
    suite::all(&group, &site(&group));
    group.close().expect("nothing has failed");
}

#[test]
fn a_group_goes_on_without_a_killed_rank() {
    for victim in [0, 2] {
        let port = Port::loopback();
        let start = |rank: usize| {
            Command::new(std::env::current_exe().expect("this binary"))
                .args(["--exact", "survive::rank", "--nocapture", "--test-threads=1"])
                .env(VICTIM, victim.to_string())
                .envs(port.environment(rank, 3))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("a process")
        };
        let ranks: Vec<Child> = (0..3).map(start).collect();
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = child.wait_with_output().expect("its end");
            let killed = output.status.signal() == Some(Signal::KILL.as_raw());
            let log = String::from_utf8_lossy(&output.stderr);
            assert!(if rank == victim { killed } else { output.status.success() }, "rank {rank} of 3: {log}");
        }
    }
}
