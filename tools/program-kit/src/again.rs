//! This program again, for one test, as another process. Lines that begin with `@` are for its parent.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::testing::LIMIT;

const ROLE: &str = "TINYNCCL_TEST_ROLE";

/// Returns this process's role in its test; `None` in the parent.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A process of a test; ended with this value.
#[derive(Debug)]
pub struct Process {
    child: Child,
    to: ChildStdin,
    from: Option<BufReader<ChildStdout>>,
}

/// The command that runs `test` of this program in a role, in front of which `wrapper` may stand.
pub fn start(wrapper: &[&str], test: &str, role: &str, settings: &[(&str, &str)]) -> Process {
    let program = std::env::current_exe().unwrap();
    let mut words = wrapper.iter().map(|w| std::ffi::OsString::from(*w)).chain([program.into()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).envs(settings.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("this program");
    let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    Process { child, to, from: Some(BufReader::new(from)) }
}

impl Process {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its next line for us, within the limit.
    #[track_caller]
    pub fn line(&mut self) -> String {
        self.line_within(LIMIT)
    }

    #[track_caller]
    fn line_within(&mut self, limit: Duration) -> String {
        let (send, read) = channel();
        let mut from = self.from.take().expect("it was read before");
        std::thread::spawn(move || {
            let mut line = String::new();
            let found = loop {
                line.clear();
                match from.read_line(&mut line) {
                    Ok(0) | Err(_) => break None,
                    Ok(_) => {}
                }
                // The test's name and its first line share one.
                if let Some((_, text)) = line.split_once('@') {
                    break Some(text.trim().to_owned());
                }
            };
            let _ = send.send((found, from));
        });
        match read.recv_timeout(limit) {
            Ok((Some(line), from)) => {
                self.from = Some(from);
                line
            }
            Ok((None, _)) => panic!("process {} ended: {:?}", self.id(), self.child.wait()),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => panic!("process {} hangs", self.id()),
        }
    }

    /// Sends a line to the process.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("a process that listens");
    }

    /// Its end must be a good one.
    #[track_caller]
    pub fn finish(self) {
        self.finish_within(LIMIT);
    }

    /// Waits at most `limit` until the process sends `done`, then until it ends, which it must do with success.
    #[track_caller]
    pub fn finish_within(mut self, limit: Duration) {
        assert_eq!(self.line_within(limit), "done");
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    /// Ends it by force.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a child: a line for the parent.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{line}").and_then(|()| out.flush()).expect("a parent that reads");
}

/// In a child: the next line from the parent.
pub fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a parent");
    assert!(!line.is_empty(), "the parent is gone");
    line.trim().to_owned()
}
