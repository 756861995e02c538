//! Rendezvous of the ranks of one host when the launcher gives no address: rank 0 hands its unique id out over an
//! abstract Unix socket.
//!
//! The name consists of the user, the launcher's process id and its start time, so that two jobs never share one. An
//! abstract socket leaves no file behind and disappears with its owner. Both sides check that the other belongs to the
//! same user.

use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType};

use crate::bootstrap::UniqueId;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::threads::{Thread, deadline_after, left, poll};
use tinynccl_sys::unix;

const OP: &str = "rendezvous on this host";
const LONGEST_ID: u64 = 8 << 10;
/// Limit for rank 0's reply.
const READ_LIMIT: Duration = Duration::from_secs(1);
/// Pause after `accept` failed, for instance for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The name of the socket of the ranks with this launcher. `use_number`: number of such rendezvous of this process
/// before.
pub(crate) fn name(rank_variable: &str, use_number: u32) -> String {
    let (pid, started) = launcher(rank_variable);
    format!("tinynccl-{}-{pid}-{started}-{use_number}", rustix::process::getuid().as_raw())
}

/// The launcher: the nearest ancestor that is not itself inside the job. A shell between the launcher and us has the
/// launcher's variables in its environment, the launcher has not.
fn launcher(rank_variable: &str) -> (u32, u64) {
    let mut pid = std::os::unix::process::parent_id();
    let needle = format!("{rank_variable}=");
    // Chains are short; the bound only guards against nonsense in /proc.
    for _ in 0..64 {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let inside = environment.split(|b| *b == 0).any(|v| v.starts_with(needle.as_bytes()));
        match parent_and_start(pid) {
            Some((parent, _)) if inside && parent > 1 => pid = parent,
            Some((_, started)) => return (pid, started),
            None => break,
        }
    }
    (pid, 0)
}

/// Fields 4 and 22 of `/proc/PID/stat`. The second field is a name in parentheses that may hold anything.
fn parent_and_start(pid: u32) -> Option<(u32, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some((parent, started))
}

fn address(name: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|e| Error::errno(OP, format!("name {name}"), e))
}

fn listen(address: &SocketAddrUnix) -> Result<UnixListener, Errno> {
    let socket = unix::socket(SocketType::STREAM)?;
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, 4096)?;
    Ok(UnixListener::from(socket))
}

/// Rank 0's side: a thread that gives the id to any process of the same user that connects. Ends when dropped.
#[derive(Debug)]
pub(crate) struct HandOut {
    stop: Arc<(AtomicBool, Arc<Doorbell>)>,
    thread: Thread,
}

impl HandOut {
    pub(crate) fn start(name: &str, id: &UniqueId) -> Result<HandOut> {
        let failed = |e| format!("rank 0 cannot listen: {e}; is there another process with rank 0?");
        let listener = listen(&address(name)?).map_err(|e| Error::bootstrap(format!("@{name}"), failed(e)))?;
        let listener = Kept::new(listener);
        let stop = Arc::new((AtomicBool::new(false), Doorbell::new()?));
        let (for_thread, text) = (Arc::clone(&stop), id.to_string());
        let what = "the thread that hands the unique id out".to_owned();
        let run = move || hand_out(&listener, &text, &for_thread);
        Ok(HandOut { stop, thread: Thread::start(OP, "tinynccl-meet".to_owned(), what, run)? })
    }
}

impl Drop for HandOut {
    fn drop(&mut self) {
        self.stop.0.store(true, Ordering::Release);
        self.stop.1.ring();
        self.thread.join();
    }
}

fn hand_out(listener: &UnixListener, text: &str, stop: &(AtomicBool, Arc<Doorbell>)) {
    while !stop.0.load(Ordering::Acquire) {
        let mut fds = [PollFd::new(&stop.1, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        if poll(&mut fds, Duration::from_secs(60)).is_err() {
            return;
        }
        match listener.accept() {
            Ok((mut stream, _)) if unix::same_user(&stream).is_ok() => {
                // The id fits any socket buffer, so this does not block.
                let _ = stream.set_nonblocking(true).and_then(|()| stream.write_all(text.as_bytes()));
            }
            Ok(_) => {}
            Err(e) if matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted) => {}
            Err(e) => {
                log::warn!("{OP}: accept: {e}");
                if poll(&mut fds[..1], ACCEPT_PAUSE).is_err() {
                    return;
                }
            }
        }
    }
}

/// The other ranks' side: the id of rank 0's store, within `limit`.
pub(crate) fn fetch(name: &str, rank: usize, limit: Duration) -> Result<UniqueId> {
    let deadline = deadline_after(limit);
    let address = address(name)?;
    let mut pause = Duration::from_millis(5);
    loop {
        let detail = match ask(&address) {
            Ok(id) => return Ok(id),
            Err(detail) => detail,
        };
        if left(deadline) <= pause {
            let detail = format!(
                "rank {rank} did not meet rank 0 on this host within {limit:.1?} ({detail}); did rank 0 start, in the same \
                 network and process namespaces? Otherwise set MASTER_ADDR and MASTER_PORT for all ranks"
            );
            return Err(Error::bootstrap(format!("@{name}"), detail));
        }
        if asked_to_stop() {
            return Err(Error::Aborted { op: OP.to_owned(), rank, reason: format!("rank {rank}: interrupted") });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

fn ask(address: &SocketAddrUnix) -> Result<UniqueId, String> {
    let failed = |e: std::io::Error| e.to_string();
    // A blocking one would wait without an end where rank 0 is stopped and its backlog full.
    let socket = unix::socket(SocketType::STREAM).map_err(|e| failed(e.into()))?;
    rustix::net::connect(&socket, address).map_err(|e| failed(e.into()))?;
    unix::same_user(&socket)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(READ_LIMIT))).map_err(failed)?;
    let mut text = String::new();
    (&stream).take(LONGEST_ID).read_to_string(&mut text).map_err(failed)?;
    text.parse().map_err(|e: Error| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_handed_out_under_a_name() {
        let id = UniqueId::new(tinynccl_sys::Secret::new([3; 32]), vec!["127.0.0.1:7".parse().unwrap()]);
        let name = format!("tinynccl-test-{}", std::process::id());
        let out = HandOut::start(&name, &id).unwrap();
        assert_eq!(fetch(&name, 1, Duration::from_secs(10)).unwrap(), id);
        let e = HandOut::start(&name, &id).unwrap_err().to_string();
        assert!(e.contains("another process with rank 0"), "{e}");
        drop(out);
        let e = fetch(&name, 1, Duration::from_millis(1)).unwrap_err().to_string();
        assert!(e.contains("rank 1 did not meet rank 0") && e.contains("MASTER_ADDR"), "{e}");
    }

    #[test]
    fn the_launcher_is_an_ancestor_with_a_start_time() {
        let (pid, started) = launcher("TINYNCCL_NO_SUCH_VARIABLE");
        assert_eq!(pid, std::os::unix::process::parent_id());
        assert!(started > 0);
        assert_eq!(parent_and_start(std::process::id()).unwrap().0, pid);
    }
}
