//! Runs a program with a limit of time, and ends all of it at the limit.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// For a program that was asked to end, until it is made to.
const GRACE: Duration = Duration::from_secs(3);

/// The outcome of a program.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// `None`: killed by a signal.
    pub(crate) code: Option<i32>,
    /// It was ended at the limit.
    pub(crate) cut_off: bool,
    pub(crate) took: Duration,
}

impl Outcome {
    /// The last line that says something, for a note.
    pub(crate) fn last_words(&self) -> String {
        let line = |text: &str| {
            let said = |l: &&str| l.chars().any(char::is_alphabetic);
            text.lines().rev().map(str::trim).find(said).map(str::to_owned)
        };
        line(&self.stderr).or_else(|| line(&self.stdout)).unwrap_or_else(|| "it said nothing".to_owned())
    }
}

/// Runs `command` for at most `limit`. While it runs, this process wakes up only to read its output.
pub(crate) fn run(command: &mut Command, limit: Duration) -> Result<Outcome> {
    let start = Instant::now();
    let mut child = command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let (closed, ended) = mpsc::channel::<()>();
    let gone = closed.clone();
    let out = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.as_mut().map(|pipe| pipe.read_to_end(&mut bytes));
        let _ = gone.send(());
        bytes
    });
    let err = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stderr.as_mut().map(|pipe| pipe.read_to_end(&mut bytes));
        drop(closed);
        bytes
    });
    let cut_off = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
    if cut_off {
        end(&child, Signal::TERM);
    }
    let status = wait(&mut child)?;
    // Processes left over from its group would spin beside the next program.
    end(&child, Signal::KILL);
    let text = |thread: std::thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&thread.join().unwrap_or_default()).into_owned()
    };
    Ok(Outcome { stdout: text(out), stderr: text(err), code: status, cut_off, took: start.elapsed() })
}

/// Its exit code, after the grace at the latest.
fn wait(child: &mut Child) -> Result<Option<i32>> {
    let deadline = Instant::now() + GRACE;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a program")? {
            return Ok(status.code());
        }
        if Instant::now() > deadline {
            end(child, Signal::KILL);
            return Ok(child.wait().context("cannot wait for a program")?.code());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn end(child: &Child, signal: Signal) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // Gone already is as good.
    let _ = group.map(|group| kill_process_group(group, signal));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn what_a_program_prints_and_how_it_ends() {
        let outcome = run(&mut shell("echo one; echo two >&2; exit 3"), Duration::from_secs(30)).unwrap();
        assert_eq!((outcome.stdout.as_str(), outcome.code, outcome.cut_off), ("one\n", Some(3), false));
        assert_eq!(outcome.last_words(), "two");
        assert!(run(&mut Command::new("/none/such"), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children_and_what_it_said_stays() {
        let outcome =
            run(&mut shell("trap '' TERM; echo early; sleep 600 & wait; sleep 600"), Duration::from_millis(200))
                .unwrap();
        assert!(outcome.cut_off);
        assert_eq!((outcome.stdout.as_str(), outcome.code), ("early\n", None));
    }
}
