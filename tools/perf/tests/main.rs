//! The program as its user starts it, where no GPU and no other library is.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Write as _, read_to_string};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};

use program_kit::UNAVAILABLE;
use program_kit::testing::{self, output, refused, skipped};

fn perf(words: &str) -> Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_perf"));
    command.args(words.split(' '));
    command
}

#[test]
fn full_fences_and_links_lose_nothing() {
    let outcome = testing::run(&mut perf("wakeups --runs 1 --rounds 5000 --fence full,link"));
    if outcome.stderr.contains("expected two cores") {
        return skipped("wakeups", &outcome.stderr);
    }
    assert!(outcome.success(), "{outcome:?}");
    let rows = outcome.stdout.lines().filter(|line| line.starts_with("full") || line.starts_with("link"));
    assert_eq!(rows.count(), 6, "{outcome:?}");
}

#[cfg(feature = "cuda")]
#[test]
fn without_a_driver_the_program_says_so_once() {
    let said = refused(perf("gpu --explain").env("CUDA_VISIBLE_DEVICES", ""), UNAVAILABLE.into(), &["CUDA"]);
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[cfg(feature = "cuda")]
#[test]
fn stages_of_the_hosted_path_over_the_stand_in() {
    let mut gpu =
        perf("gpu --begin 8 --end 1024 --factor 128 --iters 2 --rounds 2 --operation all-reduce,send-recv,gather");
    gpu.env("LD_LIBRARY_PATH", cuda_standin::folder().unwrap()).env_remove("CUDA_VISIBLE_DEVICES");
    let text = output(&mut gpu);
    assert!(text.contains("| bytes | hosted us | busbw GB/s | down us | up us | host us | bound / hosted |"), "{text}");
    let rows = text.lines().filter(|line| line.starts_with("| 8 |") || line.starts_with("| 1024 |")).count();
    assert_eq!(rows, 6, "{text}");
    let explained = output(gpu.arg("--explain"));
    assert_eq!(explained.matches("through the hosts' memory").count(), 6, "{explained}");
}

#[test]
fn a_line_for_each_level() {
    for level in ["in-place", "link", "comm", "registered", "registering", "tcp", "udp"] {
        for what in ["lat", "bw"].iter().filter(|&&what| (level, what) != ("udp", "bw")) {
            let wait = if ["link", "tcp"].contains(&level) { "events" } else { "yield" };
            let outcome = testing::run(&mut perf(&format!("verbs {level} {what} -s 3000 -n 20 -w {wait}")));
            // With the feature `verbs` a device of the system's is needed.
            if outcome.code == Some(UNAVAILABLE.into()) {
                skipped(level, &outcome.stderr);
                continue;
            }
            let value = outcome.stdout.trim().strip_prefix(&format!("{level},{what},3000,20,"));
            let value = value.and_then(|value| value.parse::<f64>().ok());
            assert!(value.is_some_and(|value| value > 0.0), "{outcome:?}");
        }
    }
    refused(&mut perf("verbs udp bw"), 2, &["a stream loses datagrams"]);
}

/// A process whose output is read line by line.
struct Ended(Child);

impl Ended {
    fn start(words: &str) -> Ended {
        Ended(perf(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// The handle, its first line; and the rest, which comes at its end.
    fn handle(&mut self) -> (String, BufReader<ChildStdout>) {
        let mut out = BufReader::new(self.0.stdout.take().unwrap());
        let mut handle = String::new();
        out.read_line(&mut handle).unwrap();
        (handle, out)
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn connections_give_a_rate_and_a_time() {
    let mut receiver = Ended::start("net receive");
    let (handle, out) = receiver.handle();
    output(perf("net send").args([handle.trim(), "0.1", "64K"]));
    let last = read_to_string(out).unwrap();
    assert!(last.contains(" MB/s, longest pause ") && !last.starts_with("0.0 "), "{last}");

    let (mut one, mut other) = (Ended::start("net ping 100"), Ended::start("net ping 100"));
    let ((first, out), (second, _hold)) = (one.handle(), other.handle());
    for (end, handle) in [(&one, &second), (&other, &first)] {
        end.0.stdin.as_ref().unwrap().write_all(handle.as_bytes()).unwrap();
    }
    assert!(read_to_string(out).unwrap().ends_with(" us\n"));
    refused(&mut perf("net send 00ff"), 1, &["expected a handle"]);
}

#[test]
fn a_comparison_of_our_programs_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // In place of milestone 10's program.
    let rows = "op,dtype,place,bytes,us,us_min,us_max,calls,repetitions,clean,wrong\nall_reduce,f32,out,8,1.5,1,2,10,7,7,0\n\
        all_reduce,f32,out,4096,2.5,1,2,10,7,7,0\n";
    std::fs::write(path("stress"), format!("#!/bin/sh\ncat <<'EOF'\n{rows}EOF\n")).unwrap();
    std::fs::set_permissions(path("stress"), Permissions::from_mode(0o755)).unwrap();
    let mut peers = perf("peers --quick --peers none --ops all_reduce --ranks 2 --transports shm --programs");
    output(peers.arg(folder.path()).arg("--stress").arg(path("stress")).arg("--output").arg(path("out/peers")));
    let page = std::fs::read_to_string(path("out/peers.md")).unwrap();
    assert!(page.contains("| 4K | 2.50 | 2.50 | 2.50 | - | - | 1.64 | - | 1.64 |"), "{page}");
    output(perf("peers --plot").arg(path("out/peers.csv")).arg("--output").arg(path("again")));
    let plot = |name: &str| std::fs::read(path(name)).unwrap();
    assert_eq!(plot("again-shm-2-4k-reused.svg"), plot("out/peers-shm-2-4k-reused.svg"));
    refused(&mut perf("peers --stress /nowhere/stress"), 1, &["scripts/compare-peers builds it"]);
    refused(&mut perf("peers --ops every"), 2, &["expected all_reduce"]);
}
