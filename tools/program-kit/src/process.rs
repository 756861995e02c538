//! A command with its output caught and a deadline.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

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
}

impl Outcome {
    /// Whether it exited before the deadline, with exit status 0.
    pub fn success(&self) -> bool {
        self.code == Some(0) && !self.late
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
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {name}"))?;
    let deadline = Instant::now() + limit;
    let stdout = collect(child.stdout.take().context("no pipe")?);
    let stderr = collect(child.stderr.take().context("no pipe")?);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let done = drain(&stdout, &mut out, deadline) && drain(&stderr, &mut err, deadline);
    if !done {
        // Ranks that it started end with it: their launcher's pipe and parent are gone.
        let _ = child.kill();
        drain(&stderr, &mut err, Instant::now());
    }
    let code = child.wait().with_context(|| format!("waiting for {name}"))?.code();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Outcome { code, stdout: text(out), stderr: text(err), late: !done })
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
}
