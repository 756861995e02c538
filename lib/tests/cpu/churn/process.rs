//! A process of the storm, as the driver sees it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use rustix::process::{Pid, Signal, kill_process};

use super::NUMBER;

/// Seconds after which calls give up on a rank that is stopped.
const TIMEOUT: &str = "12";
/// Longest time for a start, which a rank that is stopped meanwhile holds up.
const CONNECT_TIMEOUT: &str = "10";
/// A little less than both, in seconds.
pub(super) const SHORTEST_DEADLINE: f64 = 9.0;
/// Lines of a process that a failure shows.
const WORDS: usize = 40;

/// State of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Runs,
    Stopped,
    Killed,
    /// It has ended, as the others had gone on without it.
    Left,
    /// It has ended at the end of the storm.
    Ended,
}

pub(super) struct Process {
    pub(super) child: Child,
    pub(super) fate: Fate,
    /// It was stopped for a time after which it may be left out.
    pub(super) may_leave: bool,
    /// Its group and its step by its last report, and what it had open then.
    pub(super) group: u64,
    pub(super) step: u64,
    pub(super) possessions: [usize; 3],
    pub(super) ticket: String,
    pub(super) words: VecDeque<String>,
}

/// A line of a process by its number; none: the end of its output.
pub(super) type Line = (usize, Option<String>);

impl Process {
    /// Starts process `number` with the settings of `set`; its lines go to `lines`.
    pub(super) fn start(
        number: usize,
        transport: &str,
        lines: &Sender<Line>,
        set: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Process {
        let mut command = program_kit::testing::program(std::env::current_exe().expect("this program"));
        command
            .args(["--exact", "churn::rank::a_process", "--nocapture", "--test-threads=1"])
            .env(NUMBER, number.to_string())
            .env("TINYNCCL_TRANSPORT", if transport == "rails" { "tcp" } else { transport })
            .env("TINYNCCL_TCP_RAILS", if transport == "rails" { "1" } else { "0" })
            .env("TINYNCCL_TIMEOUT", TIMEOUT)
            .env("TINYNCCL_CONNECT_TIMEOUT", CONNECT_TIMEOUT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = set(&mut command).spawn().expect("a process");
        let (errors, output) = (child.stderr.take().expect("piped"), child.stdout.take().expect("piped"));
        let (theirs, lines) = (lines.clone(), lines.clone());
        let errors = std::thread::spawn(move || pass(number, errors, &theirs));
        std::thread::spawn(move || {
            pass(number, output, &lines);
            errors.join().expect("it reads to the end");
            drop(lines.send((number, None)));
        });
        Process {
            child,
            fate: Fate::Runs,
            may_leave: false,
            group: 0,
            step: 0,
            possessions: [0; 3],
            ticket: String::new(),
            words: VecDeque::new(),
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is ours");
    }

    /// Keeps a line for a failure.
    pub(super) fn keep(&mut self, line: String) {
        if self.words.len() == WORDS {
            self.words.pop_front();
        }
        self.words.push_back(line);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop((self.child.kill(), self.child.wait()));
    }
}

/// Passes lines on until their end.
fn pass(number: usize, from: impl Read, lines: &Sender<Line>) {
    let mut all = BufReader::new(from).lines().map_while(Result::ok);
    drop(all.try_for_each(|line| lines.send((number, Some(line)))));
}
