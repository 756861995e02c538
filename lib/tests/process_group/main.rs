//! Process groups: one suite over every backend, as threads, as processes, under mpirun (feature `mpi`) and on GPUs.
//!
//! This test program runs itself again, once per rank. A backend that is not here says that it is skipped, and why.

#[path = "../common/mod.rs"]
mod common;
mod failures;
mod init;
mod place;
mod random;
mod ranks;
mod standin;
mod suite;
mod survive;

use std::io::Write;

use common::config;
use place::Site;
use tinynccl::process_group::{BackendType, Device, ProcessGroup};
use tinynccl::{Comm, cuda};

/// Says it loudly: libtest keeps the output of tests that pass.
fn skip(what: &str, why: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {what}: {why}");
}

/// Runs `f` once per rank, each a thread with a separate group.
fn threads<R: Send>(
    ranks: usize,
    backend: BackendType,
    device: Device,
    f: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let f = &f;
    let comms = Comm::threads(ranks, config()).expect("threads");
    std::thread::scope(|scope| {
        let handles: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || f(ProcessGroup::new(comm, backend, device).expect("a group"))))
            .collect();
        handles.into_iter().map(|h| h.join().expect("a rank panicked")).collect()
    })
}

#[test]
fn tinynccl_as_threads() {
    for ranks in 1..=4 {
        threads(ranks, BackendType::Tinynccl, Device::None, |group| suite::all(&group, &Site::Host));
    }
}

#[test]
fn tinynccl_as_processes() {
    ranks::by_environment("tinynccl", 3);
}

#[test]
fn mpi_under_mpirun() {
    if !cfg!(feature = "mpi") {
        skip("backend mpi", &"built without the feature mpi (scripts/mpi-tests.sh has it)");
        return;
    }
    for ranks in [2, 3, 4] {
        ranks::by_mpirun(ranks);
    }
}

/// Returns true if there are GPUs for `ranks` ranks; prints that the test is skipped if not.
fn gpus(ranks: usize) -> bool {
    match cuda::device_count() {
        Ok(count) if count >= ranks => true,
        Ok(count) => {
            skip("backends on GPUs", &format!("{ranks} ranks, this machine has {count} GPU(s)"));
            false
        }
        Err(error) => {
            skip("backends on GPUs", &format!("no GPU: {error}"));
            false
        }
    }
}

#[test]
fn tinynccl_on_gpus() {
    if gpus(2) {
        threads(2, BackendType::Tinynccl, Device::LocalRank, |group| {
            suite::all(&group, &Site::gpu(&group));
            suite::all(&group, &Site::Host);
        });
    }
}

#[test]
fn nccl_on_gpus() {
    if gpus(2) {
        threads(2, BackendType::Nccl, Device::LocalRank, |group| {
            println!("{}", group.why());
            suite::all(&group, &Site::gpu(&group));
        });
        threads(1, BackendType::Nccl, Device::None, |group| suite::all(&group, &Site::gpu(&group)));
    }
}

#[test]
fn nccl_as_processes() {
    if gpus(2) {
        ranks::by_environment("nccl", 2);
    }
}
