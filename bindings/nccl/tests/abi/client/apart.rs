//! Tests in separate processes: each has the library and the environment for itself, ends when it hangs, and takes no
//! other test with it when it crashes. Ranks as processes are started in the same way.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Set for a process that is to run this test's body.
const APART: &str = "TINYNCCL_TEST_APART";

/// After which a test hangs, beside the time that `driver` was given. Calls give up long before.
const LIMIT: Duration = Duration::from_secs(240);

/// The deadline of calls, in seconds.
const TIMEOUT: &str = "60";

/// Declares tests whose bodies run apart, with settings: `fn name() with [("NAME", "value")] { ... }`.
macro_rules! apart {
    ($($(#[$meta:meta])* fn $name:ident() $(with [$($setting:expr),* $(,)?])? $body:block)*) => {$(
        $(#[$meta])*
        #[test]
        fn $name() {
            let name = concat!(module_path!(), "::", stringify!($name));
            $crate::client::apart::run(name, &[$($($setting),*)?], || $body);
        }
    )*};
}

/// The folder with the library under the name that programs look for.
pub(super) fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let built = program.with_file_name("libnccl.so");
    assert!(built.is_file(), "{} is not there: cargo builds it for these tests", built.display());
    let folder = program.with_file_name("nccl-links");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libnccl.so", "libnccl.so.2"] {
        // Relative, as build folders are moved; other tests may be at the same.
        if let Err(error) = std::os::unix::fs::symlink("../libnccl.so", folder.join(name)) {
            assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        }
    }
    folder
}

/// Value of `LD_LIBRARY_PATH` for a test's process.
pub(super) fn folders() -> OsString {
    let standin = cuda_standin::folder().expect("the stand-in was built");
    std::env::join_paths([standin, library()]).unwrap()
}

/// This program again, for the test `name` alone.
fn again(name: &str, settings: &[(&str, &str)]) -> Command {
    // Names of tests begin behind the crate's.
    let (_, test) = name.split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(APART, name)
        .env("LD_LIBRARY_PATH", folders())
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs([("TINYNCCL_TIMEOUT", TIMEOUT), ("TINYNCCL_TUNE", "off"), ("TINYNCCL_STANDIN_DEVICES", "8")])
        .envs(settings.iter().copied());
    command
}

/// Waits for a process, with a limit: one that is killed then has no status of success.
pub(super) fn wait(mut child: Child) -> Output {
    let (send, ended) = channel();
    let pid = rustix::process::Pid::from_child(&child);
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(LIMIT + super::driver::duration()) == Err(RecvTimeoutError::Timeout) {
            eprintln!("process {pid:?} hangs: it is ended");
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::ABORT);
        }
    });
    let read = |stream: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stream.map(|mut stream| stream.read_to_end(&mut bytes));
            bytes
        })
    };
    let (out, err) = (read(out.map(|out| Box::new(out) as _)), read(err.map(|err| Box::new(err) as _)));
    let output = Output { stdout: out.join().unwrap(), stderr: err.join().unwrap(), status: child.wait().unwrap() };
    let _ = send.send(());
    watch.join().unwrap();
    output
}

/// Runs a test's body in a separate process; called there, it runs the body itself.
pub(super) fn run(name: &str, settings: &[(&str, &str)], body: fn()) {
    if std::env::var_os(APART).is_some_and(|apart| *apart == *name) {
        return body();
    }
    if std::env::var_os(APART).is_some() {
        return;
    }
    let output = wait(again(name, settings).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{out}\n{err}", output.status);
    assert!(out.contains("1 passed"), "{name} did not run: {out}");
    // For --nocapture.
    print!("{out}");
    eprint!("{err}");
}

/// Set for a process that is a rank: number, ranks, and the test's text for it.
const RANK: &str = "TINYNCCL_TEST_RANK";
const WORLD: &str = "TINYNCCL_TEST_WORLD";
const TOLD: &str = "TINYNCCL_TEST_TOLD";

/// Returns the rank of this process, the number of ranks and the test's text for it; `None` if it is no rank.
pub(super) fn role() -> Option<(usize, usize, String)> {
    let number = |name| std::env::var(name).ok()?.parse().ok();
    Some((number(RANK)?, number(WORLD)?, std::env::var(TOLD).unwrap_or_default()))
}

/// Starts the process of a rank: the test `name` again, where [`role`] says so. It inherits this process's settings.
pub(super) fn rank(name: &str, rank: usize, world: usize, told: &str, settings: &[(&str, &str)]) -> Child {
    let here: Vec<(String, String)> =
        std::env::vars().filter(|(name, _)| name.starts_with("TINYNCCL_") || name.starts_with("NCCL_")).collect();
    let mut command = again(name, &[]);
    command
        .envs(here)
        .env(APART, name)
        .envs([(RANK, rank.to_string()), (WORLD, world.to_string()), (TOLD, told.to_owned())])
        .envs(settings.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
