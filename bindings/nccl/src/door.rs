//! The acceptor of a process: ranks request from it a rendezvous that they know by an id, or only by name.
//!
//! A store has a port that no rank knows beforehand. Ranks find it without: those of an id, which names an acceptor;
//! those that shrink a communicator, whose store may have died with another rank; those of `NCCL_COMM_ID`, which know
//! one address for all communicators. So a process has one listener for all of its stores, which replies with the
//! addresses of the store of a given name, and with no more: the secret of the rendezvous comes from what the ranks
//! know already.
//!
//! Any client that reaches the port can connect. Connections are served concurrently, each has a deadline, and of too
//! many the oldest is closed, of the address that has the most.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tinynccl::bootstrap::interface;
use tinynccl::{Config, Error, Kept};

use crate::directory::{self, Name, Told};
use crate::fault::{Fault, Result};
use crate::place;

/// First bytes of a request; after them the name of a rendezvous, and the number of an id or [`directory::NO_NUMBER`].
pub(crate) const MAGIC: [u8; 8] = *b"tinydoo2";
/// Length of a request in bytes.
pub(crate) const QUESTION: usize = MAGIC.len() + size_of::<Name>() + size_of::<u64>();
/// Reply for an id that was used, in place of the number of addresses; other replies are this number and the addresses.
pub(crate) const USED: u8 = u8::MAX;
/// Most addresses of a store in a reply.
pub(crate) const MOST: usize = 16;

/// Limit from the connection to the last byte of the reply.
const VISIT: Duration = Duration::from_secs(5);
/// Most connections at once, and of one address.
const VISITORS: usize = 192;
const OF_ONE: usize = 128;
/// Connections accepted in one step: between two, the oldest are closed.
const ACCEPTS: usize = 32;
/// Pause when `accept` failed: of descriptors there may be none for a while.
const PAUSE: Duration = Duration::from_millis(50);

/// Returns the addresses of this process's acceptor, which is opened if there is none yet.
pub(crate) fn addresses(config: &Config) -> Result<Vec<SocketAddr>> {
    directory::here()?.own_door(|| {
        let at = listen(place::anywhere(config)?)?;
        let all = interface::with_loopback(config)?;
        let reached = all.iter().filter(|a| at.is_ipv6() || a.ip.is_ipv4());
        Ok(reached.map(|a| SocketAddr::new(a.ip, at.port())).take(MOST).collect())
    })
}

/// Opens an acceptor at `address`, if there is none yet.
pub(crate) fn open_at(address: SocketAddr) -> Result<()> {
    directory::here()?.door_at(address, || listen(address).map(drop))
}

fn listen(at: SocketAddr) -> Result<SocketAddr> {
    let failed = |e: &std::io::Error| Fault::from(Error::io("rendezvous", format!("listening at {at}"), e));
    let listener = TcpListener::bind(at).map_err(|e| failed(&e))?;
    listener.set_nonblocking(true).map_err(|e| failed(&e))?;
    // std sets a backlog of 128; many ranks connect at once. Listening again only lengthens the queue.
    let _ = rustix::net::listen(&listener, 4096);
    let address = listener.local_addr().map_err(|e| failed(&e))?;
    let door = Door { listener: Kept::new(listener), address, visitors: Vec::new(), rests: None };
    let thread = std::thread::Builder::new().name("tinynccl-door".to_owned()).spawn(move || door.run());
    thread.map_err(|e| failed(&e))?;
    Ok(address)
}

struct Door {
    listener: Kept<TcpListener>,
    address: SocketAddr,
    /// Open connections, in the order in which they came.
    visitors: Vec<Visitor>,
    /// End of the pause in which nothing is accepted; `None` while there is none.
    rests: Option<Instant>,
}

impl Door {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            self.visitors.retain(|visitor| visitor.until > now);
            self.rests = self.rests.filter(|until| *until > now);
            let tend = directory::here().ok().and_then(directory::Directory::tend).map(|pause| now + pause);
            let first = self.visitors.iter().map(|visitor| visitor.until).chain(self.rests).chain(tend).min();
            if let Err(e) = self.wait(first) {
                // Poll fails only for want of memory.
                log::debug!("door at {}: poll: {e}", self.address);
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Waits for something to do, at most until `until`, and does it.
    fn wait(&mut self, until: Option<Instant>) -> rustix::io::Result<()> {
        let takes = if self.rests.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut all = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), takes)];
        all.extend(self.visitors.iter().map(|visitor| {
            let wants = if visitor.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            PollFd::from_borrowed_fd(visitor.stream.as_fd(), wants)
        }));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let left = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) });
        match rustix::event::poll(&mut all, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let mut ready: Vec<bool> = all.iter().map(|one| !one.revents().is_empty()).collect();
        let comes = std::mem::take(&mut ready[0]);
        let mut ready = ready.into_iter().skip(1);
        self.visitors.retain_mut(|visitor| !ready.next().unwrap_or(false) || visitor.go_on());
        if comes {
            self.accept();
        }
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        self.visitors.push(Visitor::new(stream, from.ip()));
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    log::debug!("door at {}: accept: {e}", self.address);
                    self.rests = Some(Instant::now() + PAUSE);
                    break;
                }
            }
        }
        while let Some(place) = surplus(self.visitors.iter().map(|visitor| visitor.from)) {
            self.visitors.remove(place);
        }
    }
}

/// Returns the index of the connection to close, if there are too many; `from` in the order in which they came.
fn surplus(from: impl ExactSizeIterator<Item = IpAddr> + Clone) -> Option<usize> {
    if from.len() <= OF_ONE {
        return None;
    }
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    from.clone().for_each(|ip| *counts.entry(ip).or_default() += 1);
    let (most, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    if count > OF_ONE || from.len() > VISITORS { from.clone().position(|ip| ip == most) } else { None }
}

struct Visitor {
    stream: TcpStream,
    from: IpAddr,
    until: Instant,
    asked: [u8; QUESTION],
    got: usize,
    /// The rest of the reply to send; empty until the request is complete.
    answer: Vec<u8>,
}

impl Visitor {
    fn new(stream: TcpStream, from: IpAddr) -> Visitor {
        Visitor { stream, from, until: Instant::now() + VISIT, asked: [0; QUESTION], got: 0, answer: Vec::new() }
    }

    /// Receives and sends what it can; returns true while the connection stays open.
    fn go_on(&mut self) -> bool {
        while self.answer.is_empty() {
            match self.stream.read(&mut self.asked[self.got..]) {
                Ok(0) => return false,
                Ok(n) => self.got += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return e.kind() == ErrorKind::WouldBlock,
            }
            if self.got == QUESTION {
                let Some(answer) = answer(&self.asked) else { return false };
                self.answer = answer;
            }
        }
        match self.stream.write(&self.answer) {
            Ok(n) => {
                self.answer.drain(..n);
                !self.answer.is_empty()
            }
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// Returns the reply to a request, never empty; `None` for bytes that are no request.
fn answer(asked: &[u8; QUESTION]) -> Option<Vec<u8>> {
    let (name, number) = asked.strip_prefix(&MAGIC)?.split_first_chunk()?;
    let told = directory::here().ok()?.told(name, u64::from_le_bytes(number.try_into().ok()?));
    let store = match told {
        Told::Used => return Some(vec![USED]),
        Told::Nothing => Vec::new(),
        Told::At(store) => store,
    };
    let mut answer = vec![store.len().min(MOST) as u8];
    answer.extend(store.iter().take(MOST).flat_map(|address| place::encode(*address)));
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use crate::visit::{Door as Asked, ask};
    use tinynccl::Secret;
    use tinynccl::bootstrap::Server;

    fn question(name: &Name) -> Vec<u8> {
        [&MAGIC[..], name, &directory::NO_NUMBER.to_le_bytes()].concat()
    }

    fn store(config: &Config) -> Server {
        Server::open(place::anywhere(config).unwrap(), Secret::new([5; 32]), config).unwrap()
    }

    #[test]
    fn a_door_tells_what_was_posted_and_nothing_else() {
        let mut config = Config::default();
        config.connect_timeout = Duration::from_millis(100);
        let here = addresses(&config).unwrap();
        assert_eq!(addresses(&config).unwrap(), here, "one door per process");
        let server = store(&config);
        directory::here().unwrap().post([1; 32], &server);
        let door = |name| Asked { addresses: &here, name, number: directory::NO_NUMBER, stays: true };
        assert_eq!(ask(&door([1; 32]), &config, &|| false).unwrap(), server.unique_id().addresses());
        let fault = ask(&door([2; 32]), &config, &|| false).unwrap_err();
        assert!(fault.status == Status::SystemError && fault.text.contains("knows of none yet"), "{fault:?}");
        assert!(ask(&door([2; 32]), &config, &|| true).unwrap_err().text.contains("stopped"));
    }

    #[test]
    fn who_comes_first_waits_for_the_post() {
        let config = Config::default();
        let here = addresses(&config).unwrap();
        let server = store(&config);
        let asked = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let door = Asked { addresses: &here, name: [3; 32], number: directory::NO_NUMBER, stays: true };
                ask(&door, &config, &|| {
                    asked.store(true, std::sync::atomic::Ordering::Release);
                    false
                })
            });
            while !asked.load(std::sync::atomic::Ordering::Acquire) {
                std::thread::yield_now();
            }
            directory::here().unwrap().post([3; 32], &server);
            assert_eq!(first.join().unwrap().unwrap(), server.unique_id().addresses());
        });
    }

    /// Connections that send nothing, or one byte now and then, keep no rank out, and their number is bounded.
    #[test]
    fn visitors_that_say_nothing_are_not_noticed() {
        let config = Config::default();
        let here = *addresses(&config).unwrap().last().unwrap();
        let server = store(&config);
        directory::here().unwrap().post([4; 32], &server);
        let mut silent: Vec<TcpStream> = (0..3 * OF_ONE).map(|_| TcpStream::connect(here).unwrap()).collect();
        for (n, one) in silent.iter_mut().enumerate().filter(|(n, _)| n % 3 > 0) {
            // Of some it ends in the middle.
            let _ = one.write_all(&question(&[4; 32])[..n % QUESTION]);
        }
        // It answers although none of them has gone.
        for _ in 0..20 {
            let mut visitor = TcpStream::connect(here).unwrap();
            visitor.write_all(&question(&[4; 32])).unwrap();
            let mut told = Vec::new();
            visitor.read_to_end(&mut told).unwrap();
            assert_eq!(usize::from(told[0]), server.unique_id().addresses().len());
        }
        let mut gone = 0;
        for one in &mut silent {
            one.set_nonblocking(true).unwrap();
            gone += usize::from(!matches!(one.read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock));
        }
        assert!(gone >= silent.len() - OF_ONE, "{gone} have gone");
    }

    #[test]
    fn the_busiest_address_loses_its_oldest_visitor() {
        let ip = |n: usize| IpAddr::from([10, 0, (n >> 8) as u8, n as u8]);
        let gone = |from: Vec<IpAddr>| surplus(from.into_iter());
        assert_eq!(gone(vec![ip(1); OF_ONE]), None);
        assert_eq!(gone(vec![ip(1); OF_ONE + 1]), Some(0));
        let mut all: Vec<IpAddr> = (10..20).map(ip).chain(vec![ip(1); OF_ONE]).collect();
        assert_eq!(gone(all.clone()), None);
        all.extend((100..100 + VISITORS - OF_ONE).map(ip));
        assert_eq!(gone(all), Some(10));
    }
}
