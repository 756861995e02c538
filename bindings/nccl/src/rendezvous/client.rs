//! Requests to a listener for the store of a name.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tinynccl::Config;
use tinynccl::bootstrap::interface;

use super::id::{self, NO_NUMBER, Name};
use super::protocol::{self, Reply};
use crate::abi::error::{Error, Result};

/// Longest time for a connection, and from there to the end of the reply.
const CONNECT: Duration = Duration::from_millis(500);
const REPLY: Duration = Duration::from_secs(5);
/// The first pause before another request; it doubles up to `LONGEST`.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_millis(160);
/// A process whose host refuses connections for this long has ended.
const GONE: Duration = Duration::from_secs(2);

/// A store that is looked up: addresses of a listener, and the request to it.
pub(crate) struct Lookup<'a> {
    pub(crate) addresses: &'a [SocketAddr],
    pub(crate) name: Name,
    /// Number of an id, or [`NO_NUMBER`].
    pub(crate) number: u64,
    /// True if the listener was open before its address was announced: once it is closed, it stays closed.
    pub(crate) stays: bool,
}

/// Repeats a request until the listener knows the store; returns the store's addresses.
///
/// # Errors
/// `ncclSystemError` without an address within `config.connect_timeout`, or when the listener's process has ended;
/// `ncclInvalidUsage` when the id was used, or `stop` returns true.
pub(crate) fn find(lookup: &Lookup<'_>, config: &Config, stop: &dyn Fn() -> bool) -> Result<Vec<SocketAddr>> {
    let local = interface::with_loopback(config)?;
    let candidates = interface::order_candidates(&local, lookup.addresses, true);
    let begin = Instant::now();
    let (mut refused_since, mut pause) = (None, PAUSE);
    loop {
        let mut last = "it has no address".to_owned();
        let mut refused = 0;
        for (address, _) in &candidates {
            match request(*address, lookup) {
                Ok(Reply::At(store)) => return Ok(store),
                Ok(Reply::Used) => return Err(id::used()),
                // The right one, and too early.
                Ok(Reply::Unknown) => {
                    last = format!("{address} knows of none yet");
                    break;
                }
                Err(e) => {
                    refused += usize::from(e.kind() == std::io::ErrorKind::ConnectionRefused);
                    last = format!("{address}: {e}");
                }
            }
        }
        if stop() {
            return Err(Error::usage("stopped: the communicator was aborted while it was being made"));
        }
        let failed = |detail: String| {
            let list: Vec<String> = lookup.addresses.iter().map(SocketAddr::to_string).collect();
            Err(tinynccl::Error::bootstrap(list.join(", "), detail).into())
        };
        if lookup.stays && refused > 0 && refused == candidates.len() {
            let since = *refused_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= GONE {
                let whose = if lookup.number == NO_NUMBER { "that all ranks ask" } else { "that made the id" };
                return failed(format!("no process listens there any more ({last}): the process {whose} has ended"));
            }
        } else {
            refused_since = None;
        }
        if begin.elapsed() >= config.connect_timeout {
            return failed(format!(
                "no store for {:.1?} ({last}): has the first rank of the new communicator made the same call, and is \
                 its process alive?",
                begin.elapsed()
            ));
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(LONGEST);
    }
}

/// Sends one request; returns the listener's reply.
fn request(address: SocketAddr, lookup: &Lookup<'_>) -> std::io::Result<Reply> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECT)?;
    // The kernel can take a free port of this host for our end, too.
    if stream.local_addr().is_ok_and(|own| own == address) {
        return Err(std::io::ErrorKind::ConnectionRefused.into());
    }
    let until = Instant::now() + REPLY;
    stream.set_write_timeout(Some(CONNECT))?;
    stream.write_all(&protocol::request(&lookup.name, lookup.number))?;
    Reply::receive(|bytes| read(&mut stream, bytes, until))
}

/// Fills `to`; fails at `until`.
fn read(stream: &mut TcpStream, mut to: &mut [u8], until: Instant) -> std::io::Result<()> {
    while !to.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(to) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => to = &mut to[n..],
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use std::net::TcpListener;

    /// Requests to a process that has ended would go on until the deadline, an hour from here.
    #[test]
    fn a_process_that_has_ended_is_not_waited_for() {
        let mut config = Config::default();
        config.connect_timeout = Duration::from_secs(3600);
        let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let addresses = [gone, gone];
        let lookup = |stays| Lookup { addresses: &addresses, name: [6; 32], number: 1, stays };
        let error = find(&lookup(true), &config, &|| false).unwrap_err();
        assert!(error.status == Status::SystemError && error.text.contains("made the id has ended"), "{error:?}");
        // A listener that is opened later is waited for.
        let rounds = std::cell::Cell::new(0);
        let stop = || rounds.replace(rounds.get() + 1) == 20;
        let error = find(&lookup(false), &config, &stop).unwrap_err();
        assert!(error.text.contains("stopped"), "{error:?}");
    }

    /// Bytes received one by one do not prolong a request: all of them would be a reply after half a minute.
    #[test]
    fn a_request_has_one_deadline() {
        let slow = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = slow.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut connection, _) = slow.accept().unwrap();
                let mut sent = connection.write_all(&[16]);
                while sent.is_ok() {
                    std::thread::sleep(Duration::from_millis(100));
                    sent = connection.write_all(&[4]);
                }
            });
            let addresses = [address];
            let lookup = Lookup { addresses: &addresses, name: [6; 32], number: 1, stays: true };
            assert!(request(address, &lookup).is_err());
        });
    }
}
