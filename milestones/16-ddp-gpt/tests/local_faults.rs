//! A rank is killed while all take local steps, or while they wait in the call of an outer step: the others go on with
//! the round that they have done, and a spare joins.

use std::fs;
use std::path::Path;

use ddp_gpt::checkpoint;
use program_kit::testing;

use crate::faults::{Job, RANKS, train_on_without};

const STEPS: [&str; 10] =
    ["--steps", "400", "--batch", "12", "--lr", "0.003", "--sample-chars", "0", "--local-steps", "10"];

/// Returns true if every thread of the process sleeps: it waits for others.
fn sleeps(process: u32) -> bool {
    let state = |stat: &str| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'));
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().map(|thread| thread.unwrap().path());
    // A thread that has just ended waits for no one.
    threads.into_iter().all(|thread| fs::read_to_string(thread.join("stat")).map_or(true, |stat| state(&stat)))
}

/// Kills `victim`: while it computes, or `in_call`, in which all wait for another rank.
fn kill(job: &Job, victim: usize, in_call: bool) {
    let sleeps = |rank: usize| sleeps(job.0[rank].id());
    if in_call {
        let late = (victim + 1) % RANKS;
        job.signal(late, libc::SIGSTOP);
        while !(0..RANKS).filter(|&rank| rank != late).all(sleeps) {
            std::thread::yield_now();
        }
        job.signal(victim, libc::SIGKILL);
        job.signal(late, libc::SIGCONT);
    } else {
        while sleeps(victim) {
            std::thread::yield_now();
        }
        job.signal(victim, libc::SIGKILL);
    }
}

fn lose(victim: usize, transport: &str, spares: usize, in_call: bool) {
    let folder = tempfile::tempdir().unwrap();
    train_on_without(folder.path(), &STEPS, victim, transport, spares, |job| kill(job, victim, in_call));

    let (calm, got) = (undisturbed(folder.path()), losses(folder.path(), "o"));
    // Each round was done once, but from the death on with other batches: losses are near, not equal.
    let end = |losses: &[f64]| losses[300..].iter().sum::<f64>() / 100.0;
    let (calm, end) = (end(&calm), end(&got));
    assert!((calm - end).abs() < 0.1, "the last losses have mean {end}, without a death {calm}");
}

/// Losses by step.
fn losses(folder: &Path, out: &str) -> Vec<f64> {
    let history = checkpoint::load(&folder.join(out).join("checkpoint.bin")).unwrap().header.history;
    assert!(history.iter().map(|point| point.step).eq(0..400), "{history:?}");
    history.iter().map(|point| point.train.unwrap()).collect()
}

fn undisturbed(folder: &Path) -> Vec<f64> {
    let mut program = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
    program.current_dir(folder).args(["--preset", "tiny", "--data", "text.txt", "--threads", "1", "--ranks", "4"]);
    testing::output(program.args(STEPS).args(["--eval-every", "10000000", "--out", "calm"]));
    losses(folder, "calm")
}

#[test]
fn a_rank_is_lost_in_its_local_steps() {
    lose(2, "tcp", 0, false);
}

#[test]
fn a_spare_joins_after_rank_0_is_lost_in_its_local_steps() {
    lose(0, "shm", 1, false);
}

#[test]
fn a_spare_joins_after_a_rank_is_lost_in_the_call_of_the_outer_step() {
    lose(2, "shm", 1, true);
}

#[test]
fn rank_0_is_lost_in_the_call_of_the_outer_step() {
    lose(0, "tcp", 0, true);
}
