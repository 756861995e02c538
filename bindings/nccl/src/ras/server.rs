//! The thread that listens for clients, and a thread for each of them.

use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tinynccl::Kept;

use super::commands::{Client, Groups, Next};
use super::look::{Look, look};
use super::{json, monitor, text};
use crate::env::variables;

/// The address of NCCL's server.
const ADDRESS: &str = "localhost:28028";
/// Longest line of a client.
const LINE: usize = 1024;
/// Most clients at once.
const MOST: usize = 16;
/// Time that a client has for its next line, and to take an answer.
const PATIENCE: Duration = Duration::from_secs(60);
const TAKE: Duration = Duration::from_secs(10);
/// Time between two looks of a client that monitors.
const PERIOD: Duration = Duration::from_secs(1);
/// Pause when a connection cannot be accepted: of descriptors there may be none for a while.
const PAUSE: Duration = Duration::from_millis(100);

/// Process that listens, by its id: a forked child has none of its parent's threads.
static SERVES: Mutex<Option<u32>> = Mutex::new(None);

/// Starts the server of this process, once, unless `NCCL_RAS_ENABLE` is 0. Without one the job runs all the same.
pub(crate) fn start() {
    let mut serves = SERVES.lock().unwrap_or_else(PoisonError::into_inner);
    if *serves == Some(std::process::id()) {
        return;
    }
    *serves = Some(std::process::id());
    drop(serves);
    if variables::get("NCCL_RAS_ENABLE").is_some_and(|value| value.trim() == "0") {
        return;
    }
    let address = variables::get("NCCL_RAS_ADDR").filter(|address| !address.trim().is_empty());
    let address = address.as_deref().map_or(ADDRESS, str::trim);
    let started = open(address).and_then(|(listener, at)| {
        let thread = std::thread::Builder::new().name("tinynccl-ras".to_owned());
        thread.spawn(move || serve(&listener)).map(|_| at)
    });
    match started {
        Ok(at) => log::info!("RAS client listening socket at {at}"),
        Err(error) => log::info!("RAS failed to establish a client listening socket at {address}: {error}"),
    }
}

/// Listens at the first address that a text stands for. The processes of a user share it, as NCCL's do.
fn open(address: &str) -> io::Result<(Kept<TcpListener>, SocketAddr)> {
    let mut all: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    all.sort_by_key(SocketAddr::is_ipv6);
    let at = *all.first().ok_or_else(|| io::Error::other("it stands for no address"))?;
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &at)?;
    rustix::net::listen(&socket, 128)?;
    Ok((Kept::new(TcpListener::from(socket)), at))
}

fn serve(listener: &TcpListener) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                log::debug!("RAS: accept: {error}");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        // One too many is closed: it is not known by whom the others are.
        let place = Place::take(&clients);
        if let Some(place) = place {
            let run = move || {
                let _place = place;
                if let Err(error) = talk(&stream) {
                    log::debug!("RAS: a client: {error}");
                }
            };
            drop(std::thread::Builder::new().name("tinynccl-ras-cl".to_owned()).spawn(run));
        }
    }
}

/// A place among the clients.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(clients: &Arc<AtomicUsize>) -> Option<Place> {
        let taken = Place(clients.clone());
        (clients.fetch_add(1, Ordering::AcqRel) < MOST).then_some(taken)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Serves one client to its end.
fn talk(stream: &TcpStream) -> io::Result<()> {
    let mut client = Client::default();
    let mut buffer = Vec::new();
    while let Some(line) = next_line(stream, &mut buffer, PATIENCE)? {
        match client.take(&line) {
            Next::Answer(text) => send(stream, &text)?,
            Next::Status { verbose } => {
                let look = look(client.timeout);
                let report = if client.json { json::document(&look) } else { text::page(&look, verbose) };
                return send(stream, &report);
            }
            Next::Monitor(groups) => {
                // A client that has its answer misses nothing from then on.
                let before = look(client.timeout);
                send(stream, "OK\n")?;
                return watch(stream, &client, groups, before);
            }
        }
    }
    Ok(())
}

/// Reads to the end of a line; `None` at the end of the connection.
fn next_line(mut stream: impl Stream, buffer: &mut Vec<u8>, patience: Duration) -> io::Result<Option<String>> {
    let until = Instant::now() + patience;
    loop {
        if let Some(end) = buffer.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            return Ok(Some(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned()));
        }
        if buffer.len() >= LINE {
            return Err(io::Error::other(format!("its line is longer than {LINE} bytes")));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.limit(left)?;
        let mut piece = [0; LINE];
        match stream.read(&mut piece[..LINE - buffer.len()]) {
            Ok(0) => return Ok(None),
            Ok(n) => buffer.extend(&piece[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// A connection whose reads have a limit.
trait Stream: Read {
    fn limit(&self, limit: Duration) -> io::Result<()>;
}

impl Stream for &TcpStream {
    fn limit(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }
}

fn send(mut stream: &TcpStream, text: &str) -> io::Result<()> {
    // Each write; a client that takes a byte now and then does not hold up others.
    stream.set_write_timeout(Some(TAKE))?;
    stream.write_all(text.as_bytes())
}

/// Sends events until the client closes.
fn watch(mut stream: &TcpStream, client: &Client, groups: Groups, mut before: Look) -> io::Result<()> {
    loop {
        let until = Instant::now() + PERIOD;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut [0; LINE]) {
                Ok(0) => return Ok(()),
                // It has nothing to say any more.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) => return Err(error),
            }
        }
        let after = look(client.timeout);
        for event in monitor::events(&before, &after) {
            if let Some(text) = event.show(groups, client.json, &after) {
                send(stream, &text)?;
            }
        }
        before = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(mut bytes: &[u8]) -> io::Result<Vec<String>> {
        let (mut buffer, mut lines) = (Vec::new(), Vec::new());
        while let Some(line) = next_line(Piece(&mut bytes), &mut buffer, PATIENCE)? {
            lines.push(line);
        }
        Ok(lines)
    }

    /// Gives a few bytes at a time.
    struct Piece<'a, 'b>(&'a mut &'b [u8]);

    impl Read for Piece<'_, '_> {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let most = to.len().min(3);
            self.0.read(&mut to[..most])
        }
    }

    impl Stream for Piece<'_, '_> {
        fn limit(&self, _: Duration) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_come_in_pieces_and_several_at_once() {
        assert_eq!(lines(b"CLIENT PROTOCOL 2\r\nSTATUS\nrest").unwrap(), ["CLIENT PROTOCOL 2", "STATUS"]);
        assert_eq!(lines(b"\n\n").unwrap(), ["", ""]);
        assert_eq!(lines(b"\xff\n").unwrap(), ["\u{fffd}"]);
        let long = [&[b'x'; LINE - 1][..], b"\n"].concat();
        assert_eq!(lines(&long).unwrap()[0].len(), LINE - 1);
        assert!(lines(&[b'x'; 2 * LINE]).unwrap_err().to_string().contains("longer than"));
    }

    #[test]
    fn a_port_is_shared_with_other_processes_of_the_user() {
        let (_first, at) =
            open("127.0.0.1:0").and_then(|(one, _)| Ok((one.local_addr()?, one))).map(|(at, one)| (one, at)).unwrap();
        let (_second, same) = open(&at.to_string()).unwrap();
        assert_eq!(same, at);
        assert!(open("no such name:1").is_err() && open("28028").is_err());
    }
}
