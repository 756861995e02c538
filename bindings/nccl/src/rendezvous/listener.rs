//! The listener of a process: ranks request from it a rendezvous that they know by an id, or only by name.
//!
//! A store has a port that no rank knows beforehand. Ranks find it without: those of an id, which names a listener;
//! those that shrink a communicator, whose store may have died with another rank; those of `NCCL_COMM_ID`, which know
//! one address for all communicators. So a process has one listener for all of its stores, which replies with the
//! addresses of the store of a given name, and with no more: the secret of the rendezvous comes from what the ranks
//! know already.
//!
//! Any client that reaches the port can connect, without proving who it is. Connections are served concurrently, each
//! has a deadline, and of too many the oldest is closed, of the address that has the most.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tinynccl::bootstrap::interface;
use tinynccl::{Config, Kept};

use super::protocol::{self, MOST, REQUEST};
use super::{address, directory};
use crate::abi::error::{Error, Result};

/// Limit from the connection to the last byte of the reply.
const LIMIT: Duration = Duration::from_secs(5);
/// Most connections at once, and of one address.
const MOST_CONNECTIONS: usize = 192;
const MOST_OF_ONE: usize = 128;
/// Connections accepted in one step: between two, the oldest are closed.
const ACCEPTS: usize = 32;
/// Pause when `accept` failed: of descriptors there may be none for a while.
const PAUSE: Duration = Duration::from_millis(50);

/// Returns the addresses of this process's listener, which is opened if there is none yet.
pub(crate) fn addresses(config: &Config) -> Result<Vec<SocketAddr>> {
    directory::here()?.own_listener(|| {
        let at = open(address::anywhere(config)?)?;
        let all = interface::with_loopback(config)?;
        let reached = all.iter().filter(|a| at.is_ipv6() || a.ip.is_ipv4());
        Ok(reached.map(|a| SocketAddr::new(a.ip, at.port())).take(MOST).collect())
    })
}

/// Opens a listener at `address`, if there is none yet.
pub(crate) fn open_at(address: SocketAddr) -> Result<()> {
    directory::here()?.listener_at(address, || open(address).map(drop))
}

/// Opens a listener; returns its address.
fn open(at: SocketAddr) -> Result<SocketAddr> {
    let failed = |e: &std::io::Error| Error::from(tinynccl::Error::io("rendezvous", format!("listening at {at}"), e));
    let socket = TcpListener::bind(at).map_err(|e| failed(&e))?;
    socket.set_nonblocking(true).map_err(|e| failed(&e))?;
    // std sets a backlog of 128; many ranks connect at once. Listening again only lengthens the queue.
    let _ = rustix::net::listen(&socket, 4096);
    let address = socket.local_addr().map_err(|e| failed(&e))?;
    let listener = Listener { socket: Kept::new(socket), address, connections: Vec::new(), paused_until: None };
    let thread = std::thread::Builder::new().name("tinynccl-listen".to_owned()).spawn(move || listener.run());
    thread.map_err(|e| failed(&e))?;
    Ok(address)
}

/// The thread's state of a listener.
struct Listener {
    socket: Kept<TcpListener>,
    address: SocketAddr,
    /// Open connections, in the order in which they came.
    connections: Vec<Connection>,
    /// End of the pause in which nothing is accepted; `None` while there is none.
    paused_until: Option<Instant>,
}

impl Listener {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            self.connections.retain(|connection| connection.until > now);
            self.paused_until = self.paused_until.filter(|until| *until > now);
            let sweep = directory::here().ok().and_then(directory::Directory::maintain).map(|pause| now + pause);
            let first =
                self.connections.iter().map(|connection| connection.until).chain(self.paused_until).chain(sweep).min();
            if let Err(e) = self.wait(first) {
                // Poll fails only for want of memory.
                log::debug!("listener at {}: poll: {e}", self.address);
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Waits for something to do, at most until `until`, and does it.
    fn wait(&mut self, until: Option<Instant>) -> rustix::io::Result<()> {
        let takes = if self.paused_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut all = vec![PollFd::from_borrowed_fd(self.socket.as_fd(), takes)];
        all.extend(self.connections.iter().map(|connection| {
            let wants = if connection.reply.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            PollFd::from_borrowed_fd(connection.stream.as_fd(), wants)
        }));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let left = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) });
        match rustix::event::poll(&mut all, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let mut ready: Vec<bool> = all.iter().map(|one| !one.revents().is_empty()).collect();
        let incoming = std::mem::take(&mut ready[0]);
        let mut ready = ready.into_iter().skip(1);
        self.connections.retain_mut(|connection| !ready.next().unwrap_or(false) || connection.progress());
        if incoming {
            self.accept();
        }
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            match self.socket.accept() {
                Ok((stream, from)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        self.connections.push(Connection::new(stream, from.ip()));
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    log::debug!("listener at {}: accept: {e}", self.address);
                    self.paused_until = Some(Instant::now() + PAUSE);
                    break;
                }
            }
        }
        while let Some(index) = surplus(self.connections.iter().map(|connection| connection.from)) {
            self.connections.remove(index);
        }
    }
}

/// Returns the index of the connection to close, if there are too many; `from` in the order in which they came.
fn surplus(from: impl ExactSizeIterator<Item = IpAddr> + Clone) -> Option<usize> {
    if from.len() <= MOST_OF_ONE {
        return None;
    }
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    from.clone().for_each(|ip| *counts.entry(ip).or_default() += 1);
    let (most, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    if count > MOST_OF_ONE || from.len() > MOST_CONNECTIONS { from.clone().position(|ip| ip == most) } else { None }
}

/// An unauthenticated connection, for one request.
struct Connection {
    stream: TcpStream,
    from: IpAddr,
    until: Instant,
    request: [u8; REQUEST],
    got: usize,
    /// The rest of the reply to send; empty until the request is complete.
    reply: Vec<u8>,
}

impl Connection {
    fn new(stream: TcpStream, from: IpAddr) -> Connection {
        Connection { stream, from, until: Instant::now() + LIMIT, request: [0; REQUEST], got: 0, reply: Vec::new() }
    }

    /// Receives and sends what it can; returns true while the connection stays open.
    fn progress(&mut self) -> bool {
        while self.reply.is_empty() {
            match self.stream.read(&mut self.request[self.got..]) {
                Ok(0) => return false,
                Ok(n) => self.got += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return e.kind() == ErrorKind::WouldBlock,
            }
            if self.got == REQUEST {
                let Some(reply) = reply(&self.request) else { return false };
                self.reply = reply;
            }
        }
        match self.stream.write(&self.reply) {
            Ok(n) => {
                self.reply.drain(..n);
                !self.reply.is_empty()
            }
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// Returns the reply to a request, never empty; `None` for bytes that are no request.
fn reply(request: &[u8; REQUEST]) -> Option<Vec<u8>> {
    let (name, number) = protocol::parse(request)?;
    Some(directory::here().ok()?.lookup(name, number).encode())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use crate::rendezvous::client::{Lookup, find};
    use crate::rendezvous::id::{NO_NUMBER, Name};
    use tinynccl::Secret;
    use tinynccl::bootstrap::Server;

    fn request(name: &Name) -> Vec<u8> {
        protocol::request(name, NO_NUMBER)
    }

    fn store(config: &Config) -> Server {
        Server::open(address::anywhere(config).unwrap(), Secret::new([5; 32]), config).unwrap()
    }

    #[test]
    fn a_listener_replies_with_what_was_published_and_nothing_else() {
        let mut config = Config::default();
        config.connect_timeout = Duration::from_millis(100);
        let here = addresses(&config).unwrap();
        assert_eq!(addresses(&config).unwrap(), here, "one listener per process");
        let server = store(&config);
        directory::here().unwrap().publish([1; 32], &server);
        let lookup = |name| Lookup { addresses: &here, name, number: NO_NUMBER, stays: true };
        assert_eq!(find(&lookup([1; 32]), &config, &|| false).unwrap(), server.unique_id().addresses());
        let error = find(&lookup([2; 32]), &config, &|| false).unwrap_err();
        assert!(error.status == Status::SystemError && error.text.contains("knows of none yet"), "{error:?}");
        assert!(find(&lookup([2; 32]), &config, &|| true).unwrap_err().text.contains("stopped"));
    }

    #[test]
    fn a_request_before_the_store_is_published_waits_for_it() {
        let config = Config::default();
        let here = addresses(&config).unwrap();
        let server = store(&config);
        let requested = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let lookup = Lookup { addresses: &here, name: [3; 32], number: NO_NUMBER, stays: true };
                find(&lookup, &config, &|| {
                    requested.store(true, std::sync::atomic::Ordering::Release);
                    false
                })
            });
            while !requested.load(std::sync::atomic::Ordering::Acquire) {
                std::thread::yield_now();
            }
            directory::here().unwrap().publish([3; 32], &server);
            assert_eq!(first.join().unwrap().unwrap(), server.unique_id().addresses());
        });
    }

    /// Connections that send nothing, or one byte now and then, keep no rank out, and their number is bounded.
    #[test]
    fn connections_that_send_nothing_keep_no_rank_out() {
        let config = Config::default();
        let here = *addresses(&config).unwrap().last().unwrap();
        let server = store(&config);
        directory::here().unwrap().publish([4; 32], &server);
        let mut silent: Vec<TcpStream> = (0..3 * MOST_OF_ONE).map(|_| TcpStream::connect(here).unwrap()).collect();
        for (n, one) in silent.iter_mut().enumerate().filter(|(n, _)| n % 3 > 0) {
            // Of some it ends in the middle.
            let _ = one.write_all(&request(&[4; 32])[..n % REQUEST]);
        }
        // It replies although none of them has gone.
        for _ in 0..20 {
            let mut connection = TcpStream::connect(here).unwrap();
            connection.write_all(&request(&[4; 32])).unwrap();
            let mut reply = Vec::new();
            connection.read_to_end(&mut reply).unwrap();
            assert_eq!(usize::from(reply[0]), server.unique_id().addresses().len());
        }
        let mut gone = 0;
        for one in &mut silent {
            one.set_nonblocking(true).unwrap();
            gone += usize::from(!matches!(one.read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock));
        }
        assert!(gone >= silent.len() - MOST_OF_ONE, "{gone} have gone");
    }

    #[test]
    fn the_busiest_address_loses_its_oldest_connection() {
        let ip = |n: usize| IpAddr::from([10, 0, (n >> 8) as u8, n as u8]);
        let gone = |from: Vec<IpAddr>| surplus(from.into_iter());
        assert_eq!(gone(vec![ip(1); MOST_OF_ONE]), None);
        assert_eq!(gone(vec![ip(1); MOST_OF_ONE + 1]), Some(0));
        let mut all: Vec<IpAddr> = (10..20).map(ip).chain(vec![ip(1); MOST_OF_ONE]).collect();
        assert_eq!(gone(all.clone()), None);
        all.extend((100..100 + MOST_CONNECTIONS - MOST_OF_ONE).map(ip));
        assert_eq!(gone(all), Some(10));
    }
}
