//! The thread that answers at the process's socket, one client after the other.
//!
//! A client sends one line, `status` or `status heard`, and gets the report as JSON up to the end of the connection.
//! After `dump FOLDER` the process writes its records there, and the answer lists the files.

use std::io::{self, Read as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::place;
use super::report::Report;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::signal;
use tinynccl_sys::threads::{Thread, deadline_after, left, poll};
use tinynccl_sys::unix;

/// Requests, as a client sends them.
pub(super) const STATUS: &str = "status";
pub(super) const HEARD: &str = "status heard";
pub(super) const DUMP: &str = "dump ";

/// Longest line of a client: a path, and the request before it.
const LINE: usize = 4200;
/// Time that a client has to send its line, and then to take the answer. The next one waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);
/// Sleep between waits when there is nothing to look at, which the doorbell ends.
const LONG: Duration = Duration::from_secs(3600);

/// Questions of the thread to its process.
#[derive(Clone, Copy)]
pub(super) struct Source {
    /// Looks at communicators that no heartbeat looks at; true if there are any.
    pub(super) look: fn() -> bool,
    /// Makes the report, with what the store knows of other ranks if it is asked for.
    pub(super) report: fn(bool) -> Report,
    /// Writes records into a folder, for this reason.
    pub(super) write: fn(&Path, &str) -> io::Result<Vec<PathBuf>>,
    /// Writes the records of what has failed, and those of a signal if there was one.
    pub(super) write_pending: fn(bool),
}

/// Rung by SIGUSR1, if this process takes it.
static SIGNAL: OnceLock<Option<Arc<Doorbell>>> = OnceLock::new();

/// Takes SIGUSR1 from here on, unless the program has its own use for it.
pub(super) fn take_signal() {
    SIGNAL.get_or_init(|| {
        let bell = Doorbell::new().and_then(|bell| signal::ring(&bell).map(|taken| taken.then_some(bell)));
        let unseen = |e| log::warn!("SIGUSR1 will not write the last calls: {e}");
        let bell = bell.unwrap_or_else(|e| {
            unseen(e);
            None
        });
        if bell.is_none() {
            log::debug!("SIGUSR1 stays the program's, which handles it");
        }
        bell
    });
}

/// The socket of this process. Dropping it removes the socket and ends the thread, and waits for neither.
pub(super) struct Server {
    path: PathBuf,
    ended: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
    thread: Thread,
}

impl Server {
    /// Listens in `folder`; looks at communicators that have no heartbeat every `beat`.
    pub(super) fn start(folder: &Path, beat: Duration, source: Source) -> Result<Server> {
        let failed = |e: io::Error| Error::io("status", format!("a socket in {}", folder.display()), &e);
        let path = place::prepare(folder).map_err(failed)?;
        // It has its name once it listens: another process that starts takes one that refuses for a dead one's.
        let unnamed = path.with_extension("new");
        let listener = UnixListener::bind(&unnamed).map_err(failed)?;
        std::fs::rename(&unnamed, &path).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let (ended, bell) = (Arc::new(AtomicBool::new(false)), Doorbell::new()?);
        let (listener, stop, ring, own) = (Kept::new(listener), ended.clone(), bell.clone(), folder.to_owned());
        let run = move || {
            place::sweep(&own);
            listen(&listener, &stop, (&ring, beat), source);
        };
        let thread = Thread::start("status", "tinynccl-status".to_owned(), "the status thread".to_owned(), run);
        let thread = thread.inspect_err(|_| drop(std::fs::remove_file(&path)))?;
        Ok(Server { path, ended, bell, thread })
    }
}

impl Server {
    /// Makes the thread look at communicators that were added.
    pub(super) fn wake(&self) {
        self.bell.ring();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        self.bell.ring();
        // A client may keep it for seconds.
        self.thread.leave();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn listen(listener: &Kept<UnixListener>, ended: &AtomicBool, (bell, beat): (&Doorbell, Duration), source: Source) {
    while !ended.load(Ordering::Acquire) {
        let sleep = if (source.look)() { beat } else { LONG };
        let ready = {
            let signal = SIGNAL.get().and_then(Option::as_deref).unwrap_or(bell);
            let mut fds = [
                PollFd::new(bell, PollFlags::IN),
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(signal, PollFlags::IN),
            ];
            poll(&mut fds, sleep)
        };
        bell.drain();
        let asked = SIGNAL.get().and_then(Option::as_deref).is_some_and(Doorbell::was_rung);
        (source.write_pending)(asked);
        if let Err(error) = ready {
            return log::warn!("tinynccl-cli status does not see this process any more: poll: {error}");
        }
        match listener.accept() {
            Ok((client, _)) => {
                if let Err(error) = answer(&client, source) {
                    log::debug!("a client of the status socket: {error}");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                log::debug!("the status socket: {error}");
                // Out of descriptors, perhaps: not again at once.
                let mut fds = [PollFd::new(bell, PollFlags::IN)];
                let _ = poll(&mut fds, PATIENCE / 10);
            }
        }
    }
}

fn answer(client: &UnixStream, source: Source) -> io::Result<()> {
    // A socket that is accepted from one that does not block may inherit that.
    client.set_nonblocking(false)?;
    let refused = unix::same_user(client).err();
    let line = request(client)?;
    let text = match (refused, line.as_str()) {
        (Some(why), _) => format!("error: {why}\n"),
        (None, STATUS) => json(source, false)?,
        (None, HEARD) => json(source, true)?,
        (None, line) => match line.strip_prefix(DUMP) {
            Some(folder) => match (source.write)(Path::new(folder), "it was asked for") {
                Ok(files) => serde_json::to_string(&files)?,
                Err(error) => format!("error: {error}\n"),
            },
            None => format!("error: unknown request {line:?}: expected {STATUS:?}, {HEARD:?} or \"{DUMP}FOLDER\"\n"),
        },
    };
    send(client, text.as_bytes())
}

fn json(source: Source, heard: bool) -> io::Result<String> {
    serde_json::to_string(&(source.report)(heard)).map_err(io::Error::other)
}

/// A client's line.
fn request(mut client: &UnixStream) -> io::Result<String> {
    let until = deadline_after(PATIENCE);
    let (mut line, mut piece) = (Vec::new(), [0; LINE]);
    while !line.contains(&b'\n') {
        if line.len() > LINE {
            return Err(io::Error::other(format!("its line is longer than {LINE} bytes")));
        }
        client.set_read_timeout(Some(some(until)?))?;
        match client.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => line.extend(&piece[..n]),
        }
    }
    let end = line.iter().position(|&byte| byte == b'\n').unwrap_or(line.len());
    Ok(String::from_utf8_lossy(&line[..end]).trim_end().to_owned())
}

/// Sends all bytes within the time of a client.
pub(super) fn send(to: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = deadline_after(PATIENCE);
    while !bytes.is_empty() {
        to.set_write_timeout(Some(some(until)?))?;
        match rustix::net::send(to, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Time left, which a socket's time-out must have.
pub(super) fn some(until: Instant) -> io::Result<Duration> {
    let left = left(until);
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}
