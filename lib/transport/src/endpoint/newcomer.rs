//! Connections of processes that want to become ranks: a newcomer sends a request, and receives the
//! group's answers for as long as it keeps the connection.
//!
//! Newcomers prove a secret of their own, which a ticket holds: it opens no link and brings no message to a rank. The
//! end of the connection is the proof that the other process, or its communicator, is gone.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::{Endpoint, Inner};
use crate::accept::acceptor::{Incoming, Rejected};
use crate::accept::conn::Conn;
use crate::accept::handshake::{Caller, MAX_ATTACHED, Purpose, Reply};
use crate::accept::stream::{self, Failure};
use crate::bootstrap::interface::{LocalAddress, local_addresses, order_candidates};
use crate::bootstrap::job_secret;
use crate::seal::Socket;
use crate::tcp;
use crate::wait::Wait;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::poll;

/// Takes a newcomer: its number, its request, and the connection. It runs in the acceptor's thread and must not block.
pub(crate) type Handler = Box<dyn Fn(u64, &[u8], Newcomer) + Send + Sync>;

/// Admission of newcomers at an endpoint.
pub(super) struct Admission {
    pub(super) secret: Secret,
    handler: Handler,
}

/// Purpose of a newcomer's connection; its request is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct JoinHello {
    newcomer: u64,
}

impl Purpose for JoinHello {
    const NUMBER: u32 = 6;
}

/// Hands an authenticated connection of this purpose on.
pub(super) fn take(
    endpoint: Option<&Inner>,
    hello: JoinHello,
    mut incoming: Incoming,
    request: &[u8],
) -> Result<(), Rejected> {
    let Some(admission) = endpoint.and_then(|inner| inner.admission.get()) else {
        return Err(("this rank takes no newcomers".to_owned(), incoming.conn));
    };
    if let Err(e) = incoming.conn.reply(&Reply::Welcome) {
        log::debug!("a newcomer at {} went away: {e}", incoming.conn.address());
        return Ok(());
    }
    (admission.handler)(hello.newcomer, request, Newcomer(incoming.conn));
    Ok(())
}

impl Endpoint {
    /// Lets in newcomers that know `secret`, and hands them to `handler`; only the first call counts.
    ///
    /// # Errors
    /// [`Error::Config`] for a file with the job's secret that cannot be read.
    pub fn admit_newcomers(&self, secret: &Secret, config: &Config, handler: Handler) -> Result<()> {
        let secret = job_secret(secret, config)?;
        drop(self.inner.admission.set(Admission { secret, handler }));
        Ok(())
    }
}

/// A member's end of a newcomer's connection.
#[derive(Debug)]
pub struct Newcomer(Box<dyn Conn>);

impl Newcomer {
    /// Sends a message of at most [`Endpoint::LONGEST_MESSAGE`] bytes. A newcomer to which it cannot be sent is as good
    /// as gone.
    ///
    /// # Errors
    /// Why it cannot be sent.
    pub fn send(&mut self, message: &[u8]) -> Result<(), String> {
        self.0.write(&[&(message.len() as u32).to_le_bytes(), message].concat())
    }

    /// True once the newcomer has closed the connection, or its process has ended.
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }

    /// The newcomer's address in words.
    pub fn address(&self) -> String {
        self.0.address()
    }
}

/// Dials the ranks of a group for a newcomer.
#[derive(Debug)]
pub struct JoinDialer {
    secret: Secret,
    locals: Vec<LocalAddress>,
    newcomer: u64,
    encrypt: bool,
}

impl JoinDialer {
    /// Newcomer `newcomer`, whose ticket holds `secret`.
    ///
    /// # Errors
    /// [`Error::Config`] for an interface that does not exist, or a file with the job's secret that cannot be read;
    /// [`Error::Os`] when the system does not send the interfaces.
    pub fn new(secret: &Secret, newcomer: u64, config: &Config) -> Result<JoinDialer> {
        let (secret, locals) = (job_secret(secret, config)?, local_addresses(config)?);
        Ok(JoinDialer { secret, locals, newcomer, encrypt: config.encrypt })
    }

    /// `addresses` in the order in which they should be tried.
    pub fn order(&self, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        order_candidates(&self.locals, addresses, true).into_iter().map(|(address, _)| address).collect()
    }

    /// Connects to one rank with a request, for as long as `limit`.
    ///
    /// # Errors
    /// [`Failure::Wrong`] where no process listens; [`Failure::Refused`] by one that does not know the secret, or takes
    /// no newcomers; [`Failure::Final`] with the error of `abort`, or when the time is up.
    pub fn dial(
        &self,
        address: SocketAddr,
        request: &[u8],
        limit: Duration,
        abort: &dyn Fn() -> Option<Error>,
    ) -> Result<MemberConn, Failure> {
        let wait = Wait::without_ranks(limit, abort);
        let caller = Caller::new(&JoinHello { newcomer: self.newcomer }, self.secret, request);
        let mut socket = tcp::open(None, address, &tcp::SocketOptions::for_messages(self.encrypt), &wait)?;
        stream::greet(&mut socket, &caller, &wait).map_err(|failure| match failure {
            Failure::Wrong(why) if why.starts_with(stream::CLOSED) => Failure::Slow(why),
            Failure::Wrong(why) => Failure::Refused(why),
            other => other,
        })?;
        Ok(MemberConn { socket: Kept::new(socket), received: Mutex::default() })
    }
}

/// A newcomer's end of its connection to a member.
#[derive(Debug)]
pub struct MemberConn {
    socket: Kept<Socket>,
    /// The part of the next message that has come.
    received: Mutex<Vec<u8>>,
}

impl MemberConn {
    /// The member's next message; `None` when none comes within `limit`.
    ///
    /// # Errors
    /// Why no more will come: its process or its communicator is gone.
    pub fn receive(&self, limit: Duration) -> Result<Option<Vec<u8>>, String> {
        use std::io::Read;
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let length = received.first_chunk().map(|head| u32::from_le_bytes(*head) as usize);
            if let Some(length) = length.filter(|&length| length > MAX_ATTACHED) {
                return Err(format!("expected a message of at most {MAX_ATTACHED} bytes, got one of {length}"));
            }
            if let Some(message) = length.and_then(|length| received.get(4..4 + length)) {
                let message = message.to_vec();
                received.clear();
                return Ok(Some(message));
            }
            // No byte of the message after it.
            let want = length.map_or(4, |length| 4 + length) - received.len();
            let mut bytes = vec![0; want];
            match (&*self.socket).read(&mut bytes) {
                Ok(0) => return Err(stream::CLOSED.to_owned()),
                Ok(n) => received.extend(bytes.iter().take(n)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    match poll(&mut [PollFd::new(&*self.socket, PollFlags::IN)], limit) {
                        Ok(0) => return Ok(None),
                        Ok(_) => {}
                        Err(e) => return Err(e.to_string()),
                    }
                }
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    /// True when there is something to receive, or the member has gone.
    pub fn is_readable(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        self.socket.has_opened() || !matches!(rustix::net::recv(&*self.socket, &mut [0u8; 1], flags), Err(Errno::AGAIN))
    }
}
