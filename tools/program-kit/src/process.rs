//! A command with its output caught and a deadline.

use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// Time for the processes of a group between SIGTERM and SIGKILL, and for output after the end.
const GRACE: Duration = Duration::from_secs(3);

/// The outcome of a command.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Its exit code; `None`: a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// It was ended at the deadline.
    pub late: bool,
    /// Time from start to end.
    pub took: Duration,
}

impl Outcome {
    /// Returns true if the command exited before the deadline, with exit status 0.
    pub fn success(&self) -> bool {
        self.code == Some(0) && !self.late
    }
}

/// Stops ignoring `SIGCHLD` where the process that started this one ignores it: the kernel would discard the exit
/// status of children. Returns true if it was ignored.
pub fn heed_children() -> bool {
    static WAS_IGNORED: OnceLock<bool> = OnceLock::new();
    *WAS_IGNORED.get_or_init(|| {
        let mut old = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: asks only: no new action, and `old` is as large as the call needs; zeros are a valid value if it fails.
        let old = unsafe {
            libc::sigaction(libc::SIGCHLD, std::ptr::null(), old.as_mut_ptr());
            old.assume_init()
        };
        let ignored = old.sa_sigaction == libc::SIG_IGN;
        if ignored {
            // SAFETY: the default needs no function of ours.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        }
        ignored
    })
}

/// Ignores `SIGCHLD` again if [`heed_children`] stopped that, for a program that takes this one's place.
pub fn ignore_children_as_before() {
    if heed_children() {
        // SAFETY: to ignore it needs no function of ours.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    }
}

fn collect(mut from: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut piece) {
            let _ = sender.send(piece[..n].to_vec());
        }
    });
    receiver
}

/// Adds all data until the end or the deadline. True at the end.
fn drain(from: &Receiver<Vec<u8>>, bytes: &mut Vec<u8>, deadline: Instant) -> bool {
    loop {
        match from.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(piece) => bytes.extend(piece),
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
    }
}

/// Runs the command to its end, without input, or ends it after `limit`.
///
/// # Errors
/// It cannot be started.
pub fn run(command: &mut Command, limit: Duration) -> Result<Outcome> {
    supervise(command.stderr(Stdio::piped()), limit, false)
}

/// [`run`], with the standard error on ours: somebody waits, and reads there how far it is.
///
/// # Errors
/// It cannot be started.
pub fn run_shown(command: &mut Command, limit: Duration) -> Result<Outcome> {
    supervise(command.stderr(Stdio::inherit()), limit, false)
}

/// [`run`] without a time limit: at each chunk of standard output, and every `tick`, `go_on` is given all output so
/// far, and ends the program by `false`.
///
/// # Errors
/// It cannot be started.
pub fn run_watched(command: &mut Command, tick: Duration, mut go_on: impl FnMut(&str) -> bool) -> Result<Outcome> {
    let begin = Instant::now();
    let (name, mut child, stdout, stderr) = spawn(command.stderr(Stdio::piped()))?;
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let done = loop {
        match stdout.recv_timeout(tick) {
            Ok(piece) => out.extend(piece),
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if !go_on(&String::from_utf8_lossy(&out)) {
            // As in `supervise`.
            let _ = child.kill();
            break false;
        }
    };
    drain(&stderr, &mut err, Instant::now() + GRACE);
    finish(&name, &mut child, [out, err], !done, begin)
}

/// [`run`] for a program that starts others, in their own process group. After `limit` all of them get SIGTERM, and
/// soon SIGKILL; none is left beside the next program.
///
/// # Errors
/// It cannot be started.
pub fn run_group(command: &mut Command, limit: Duration) -> Result<Outcome> {
    supervise(command.stderr(Stdio::piped()).process_group(0), limit, true)
}

/// A command's name, its process, and what it writes to standard output and standard error.
type Spawned = (String, Child, Receiver<Vec<u8>>, Receiver<Vec<u8>>);

fn spawn(command: &mut Command) -> Result<Spawned> {
    heed_children();
    let name = command.get_program().to_string_lossy().into_owned();
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.with_context(|| format!("starting {name}"))?;
    let stdout = collect(child.stdout.take().context("no pipe")?);
    // Not a pipe where it is shown: then there is nothing to collect.
    let stderr = child.stderr.take().map_or_else(|| collect(std::io::empty()), collect);
    Ok((name, child, stdout, stderr))
}

fn supervise(command: &mut Command, limit: Duration, group: bool) -> Result<Outcome> {
    let begin = Instant::now();
    let (name, mut child, stdout, stderr) = spawn(command)?;
    let deadline = begin + limit;
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut done = drain(&stdout, &mut out, deadline);
    if group {
        end_group(&mut child, done)?;
        drain(&stdout, &mut out, Instant::now() + GRACE);
        drain(&stderr, &mut err, Instant::now() + GRACE);
    } else {
        done = done && drain(&stderr, &mut err, deadline);
        if !done {
            // Ranks that it started end with it: their launcher's pipe and parent are gone.
            let _ = child.kill();
            drain(&stderr, &mut err, Instant::now());
        }
    }
    finish(&name, &mut child, [out, err], !done, begin)
}

/// The outcome of a program that ends now, or was ended.
fn finish(name: &str, child: &mut Child, output: [Vec<u8>; 2], late: bool, begin: Instant) -> Result<Outcome> {
    let code = child.wait().with_context(|| format!("waiting for {name}"))?.code();
    let [stdout, stderr] = output.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok(Outcome { code, stdout, stderr, late, took: begin.elapsed() })
}

/// Waits for a program that is `done`, or sends SIGTERM to its group; then kills all that is left of the group.
fn end_group(child: &mut Child, done: bool) -> Result<()> {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // Gone already is as good.
    let signal = |signal| group.map(|group| kill_process_group(group, signal));
    if !done {
        let _ = signal(Signal::TERM);
    }
    let deadline = Instant::now() + GRACE;
    while child.try_wait().context("waiting for a program")?.is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
    let _ = signal(Signal::KILL);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_status_and_deadline() {
        let sh = |script: &str, limit| run(Command::new("sh").args(["-c", script]), limit).unwrap();
        let long = Duration::from_secs(60);
        let ok = sh("echo out; echo err >&2", long);
        assert!(ok.success() && !ok.late && ok.stdout == "out\n" && ok.stderr == "err\n", "{ok:?}");
        assert_eq!(sh("exit 3", long).code, Some(3));
        assert_eq!(sh("kill -9 $$", long).code, None);
        let late = sh("echo begun; exec sleep 600", Duration::from_millis(300));
        assert!(late.late && !late.success(), "{late:?}");
        assert!(run(&mut Command::new("/nonexistent"), long).is_err());
    }

    #[test]
    fn a_watched_program_goes_on_until_its_watch_says_no() {
        let sh = |script: &str, go_on: &mut dyn FnMut(&str) -> bool| {
            run_watched(Command::new("sh").args(["-c", script]), Duration::from_millis(20), go_on).unwrap()
        };
        let ok = sh("echo one; echo two >&2; exit 3", &mut |_| true);
        assert_eq!((ok.stdout.as_str(), ok.stderr.as_str(), ok.code, ok.late), ("one\n", "two\n", Some(3), false));
        let mut looks = 0;
        let late = sh("echo begun; exec sleep 600", &mut |out| {
            looks += usize::from(out == "begun\n");
            looks < 5
        });
        assert_eq!((late.stdout.as_str(), late.code, late.late), ("begun\n", None, true));
    }

    #[test]
    fn a_group_that_hangs_is_ended_and_what_it_said_stays() {
        let sh = |script: &str, limit| run_group(Command::new("sh").args(["-c", script]), limit).unwrap();
        let ok = sh("echo one; echo two >&2; exit 3", Duration::from_secs(60));
        assert_eq!((ok.stdout.as_str(), ok.stderr.as_str(), ok.code, ok.late), ("one\n", "two\n", Some(3), false));
        let late = sh("trap '' TERM; echo early; sleep 600 & wait; sleep 600", Duration::from_millis(200));
        assert!(late.late && late.took >= Duration::from_millis(200), "{late:?}");
        assert_eq!((late.stdout.as_str(), late.code), ("early\n", None));
    }
}
