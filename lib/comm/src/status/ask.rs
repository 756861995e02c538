//! Asks the processes of this user on this host for their reports.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::place;
use super::report::{Report, VERSION};
use super::serve::{DUMP, HEARD, STATUS, send, some};
use tinynccl_sys::threads::deadline_after;
use tinynccl_sys::unix;

/// Longest report that is read.
const LONGEST: u64 = 64 << 20;
/// Processes that are asked at the same time.
const TOGETHER: usize = 64;
/// Interval at which the state of a process that has not answered is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A process that has a socket and gave no report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Silent {
    /// Its process id.
    pub pid: u32,
    /// True if the system says that it is stopped (SIGSTOP, or a debugger).
    pub stopped: bool,
    /// Reason for which there is no report.
    pub why: String,
}

/// Answers of the processes of a user.
#[derive(Debug, Clone, Default)]
pub struct Answers {
    /// Reports, by process id.
    pub reports: Vec<Report>,
    /// Processes that gave none.
    pub silent: Vec<Silent>,
    /// Folders that were not read, and why.
    pub unread: Vec<String>,
}

/// Asks every process with a socket in one of the folders, each for at most `limit`. Where a rank of one of them gave no
/// report, also what the rendezvous store knows of it. A folder that other users can write to is left out.
pub fn all(folders: &[PathBuf], limit: Duration) -> Answers {
    let mut answers = Answers::default();
    let mut sockets = Vec::new();
    for folder in folders {
        match place::sockets(folder) {
            Ok(found) => sockets.extend(found),
            Err(error) => answers.unread.push(error.to_string()),
        }
    }
    for some in sockets.chunks(TOGETHER) {
        for (pid, answer) in together(some, STATUS, limit) {
            match answer {
                Ok(report) => answers.reports.push(report),
                // It has ended since, or was killed. What it was part of names it.
                Err(error) if is_gone(&error) => {}
                Err(error) => answers.silent.push(silent(pid, &error)),
            }
        }
    }
    // One process of each job that has others without a report.
    let mut again: Vec<(u32, PathBuf)> = Vec::new();
    let mut jobs: Vec<&str> = Vec::new();
    for report in &answers.reports {
        for member in report.comms.iter().filter(|member| !is_whole(&answers.reports, &member.job)) {
            if !jobs.contains(&member.job.as_str()) {
                jobs.push(&member.job);
                again.extend(sockets.iter().filter(|(pid, _)| *pid == report.pid).cloned());
            }
        }
    }
    again.dedup();
    for some in again.chunks(TOGETHER) {
        for (pid, answer) in together(some, HEARD, limit) {
            if let (Ok(report), Some(former)) = (answer, answers.reports.iter_mut().find(|report| report.pid == pid)) {
                *former = report;
            }
        }
    }
    answers
}

/// True if the reports have all ranks of a job.
fn is_whole(reports: &[Report], job: &str) -> bool {
    let jobs = || reports.iter().flat_map(|report| &report.jobs).filter(|known| known.job == job);
    let Some(first) = jobs().next() else { return false };
    first.ranks.iter().all(|place| reports.iter().any(|report| (report.pid, &report.host) == (place.pid, &place.host)))
}

/// Returns true if no process listens at the socket any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

fn together(sockets: &[(u32, PathBuf)], request: &str, limit: Duration) -> Vec<(u32, io::Result<Report>)> {
    each(sockets, limit, request).into_iter().map(|(pid, text)| (pid, text.and_then(|text| read(&text)))).collect()
}

/// Makes every process with a socket in one of the folders write its records into `into`, which must be absolute.
/// Returns the files of each, or why there are none.
///
/// # Errors
/// No folder of sockets can be read.
pub fn dump(
    folders: &[PathBuf],
    into: &Path,
    pid: Option<u32>,
    limit: Duration,
) -> io::Result<Vec<(u32, io::Result<Vec<PathBuf>>)>> {
    let (mut sockets, mut unread) = (Vec::new(), None);
    for folder in folders {
        match place::sockets(folder) {
            Ok(found) => sockets.extend(found),
            Err(error) => unread = Some(error),
        }
    }
    if let (true, Some(error)) = (sockets.is_empty(), unread) {
        return Err(error);
    }
    sockets.retain(|(one, _)| pid.is_none_or(|pid| pid == *one));
    let request = format!("{DUMP}{}", into.display());
    let files = |text: Vec<u8>| {
        refusal(&text)?;
        serde_json::from_slice(&text).map_err(|e| io::Error::other(format!("its answer does not parse: {e}")))
    };
    let answers = sockets.chunks(TOGETHER).flat_map(|some| each(some, limit, &request));
    let answers = answers.filter(|(_, answer)| !answer.as_ref().is_err_and(is_gone));
    Ok(answers.map(|(pid, text)| (pid, text.and_then(files))).collect())
}

/// The answer of each process.
fn each(sockets: &[(u32, PathBuf)], limit: Duration, request: &str) -> Vec<(u32, io::Result<Vec<u8>>)> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            sockets.iter().map(|(pid, path)| (*pid, scope.spawn(move || one((*pid, path), request, limit)))).collect();
        let lost = || Err(io::Error::other("the thread that asked it panicked"));
        threads.into_iter().map(|(pid, thread)| (pid, thread.join().unwrap_or_else(|_| lost()))).collect()
    })
}

/// Asks the process at one socket.
fn one((pid, path): (u32, &Path), request: &str, limit: Duration) -> io::Result<Vec<u8>> {
    let until = deadline_after(limit);
    // Does not wait where the backlog is full, unlike a stream's connect.
    let socket = unix::socket(rustix::net::SocketType::STREAM)?;
    let address = rustix::net::SocketAddrUnix::new(path)?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    unix::same_user(&stream).map_err(io::Error::other)?;
    send(&stream, format!("{request}\n").as_bytes())?;
    let (mut text, mut piece) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        stream.set_read_timeout(Some(some(until)?.min(LOOK)))?;
        match (&stream).read(&mut piece) {
            Ok(0) => break,
            // One that is stopped need not be waited for.
            Err(error) if is_late(&error) && !is_stopped(pid) => {}
            Ok(n) if (text.len() + n) as u64 > LONGEST => return Err(io::Error::other("its report is too long")),
            Ok(n) => text.extend(&piece[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(text)
}

/// Fails with the words of a process that refuses.
fn refusal(text: &[u8]) -> io::Result<()> {
    match text.strip_prefix(b"error: ") {
        Some(why) => Err(io::Error::other(String::from_utf8_lossy(why).trim().to_owned())),
        None => Ok(()),
    }
}

/// Reads a report.
pub(super) fn read(text: &[u8]) -> io::Result<Report> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    refusal(text)?;
    let unreadable = |e: serde_json::Error| io::Error::other(format!("its report does not parse: {e}"));
    let Version { version } = serde_json::from_slice(text).map_err(unreadable)?;
    if version != VERSION {
        let text = format!("its report has version {version}, expected {VERSION}: another release of the library");
        return Err(io::Error::other(text));
    }
    serde_json::from_slice(text).map_err(unreadable)
}

fn silent(pid: u32, error: &io::Error) -> Silent {
    let (stopped, late) = (is_stopped(pid), is_late(error));
    let why = match (stopped, late) {
        (true, _) => "stopped".to_owned(),
        (false, true) => "no answer in time".to_owned(),
        (false, false) => error.to_string(),
    };
    Silent { pid, stopped, why }
}

/// Returns true if the time for the answer is over.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Returns true if the system has stopped the process (SIGSTOP, or a debugger).
fn is_stopped(pid: u32) -> bool {
    matches!(process_state(pid), Some('T' | 't'))
}

/// State of a process as `ps` shows it, in our namespace of process ids.
fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn reports_of_other_versions_and_texts_that_are_none_are_refused() {
        let text = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        let report = serde_json::to_vec(&Report { version: VERSION, pid: 7, ..Report::default() }).unwrap();
        assert_eq!(read(&report).unwrap().pid, 7);
        assert!(text(br#"{"version": 99, "and": "more"}"#).contains("version 99, expected 2"));
        assert!(text(b"error: expected a process of user 0\n").contains("of user 0"));
        for cut in 0..report.len() {
            assert!(read(&report[..cut]).is_err());
        }
    }

    #[test]
    fn a_process_that_does_not_answer_ends_no_later_than_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("{}-0.sock", std::process::id()));
        let _listener = UnixListener::bind(&path).unwrap();
        let answers = all(&[folder.path().to_owned()], Duration::from_millis(50));
        assert_eq!(answers.reports, []);
        let expected = Silent { pid: std::process::id(), stopped: false, why: "no answer in time".to_owned() };
        assert_eq!(answers.silent, [expected]);
    }
}
