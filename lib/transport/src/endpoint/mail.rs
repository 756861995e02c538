//! Short messages between the processes of two ranks, which need neither a link nor the rendezvous store.
//!
//! A message is one connection: the hello names its purpose, the message follows the proof, and the welcome confirms
//! that the receiver's acceptor thread has handed it on. So a delivered message is a sign of life, too.

use super::{Endpoint, Inner};
use crate::EndpointInfo;
use crate::accept::acceptor::{Incoming, Rejected};
use crate::accept::handshake::{Caller, MAX_ATTACHED, Purpose, Reply};
use crate::accept::stream::{self, Failure};
use crate::bootstrap::interface::order_candidates;
use crate::tcp;
use crate::wait::Wait;

/// Takes a message: the sender's rank in the world, and the bytes. It runs in the acceptor's thread and must not block.
pub(crate) type Receive = Box<dyn Fn(usize, &[u8]) + Send + Sync>;

/// Purpose of a connection that carries one message, which is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct MailHello {
    from: u32,
    to: u32,
}

impl Purpose for MailHello {
    const NUMBER: u32 = 5;
}

/// Takes an authenticated connection of this purpose, and confirms its message.
pub(super) fn take(
    endpoint: Option<&Inner>,
    hello: MailHello,
    mut incoming: Incoming,
    bytes: &[u8],
) -> Result<(), Rejected> {
    let Some(inner) = endpoint.filter(|inner| inner.rank == hello.to as usize) else {
        return Err((format!("expected a message to this rank, got one to rank {}", hello.to), incoming.conn));
    };
    let Some(receive) = inner.receive.get() else {
        return Err(("this rank takes no messages yet".to_owned(), incoming.conn));
    };
    receive(hello.from as usize, bytes);
    if let Err(e) = incoming.conn.reply(&Reply::Welcome) {
        log::debug!("rank {}: confirming a message of rank {}: {e}", inner.rank, hello.from);
    }
    Ok(())
}

impl Endpoint {
    /// Hands messages to `receive` from now on; only the first call counts.
    pub fn on_message(&self, receive: Receive) {
        drop(self.inner.receive.set(receive));
    }

    /// Longest message in bytes.
    pub const LONGEST_MESSAGE: usize = MAX_ATTACHED;

    /// Sends a message to rank `to`, reached at `info`, and waits until its process has taken it.
    ///
    /// # Errors
    /// The last address's failure; [`Failure::Final`] when the wait is over.
    pub fn send_message(&self, to: usize, info: &EndpointInfo, message: &[u8], wait: &Wait<'_>) -> Result<(), Failure> {
        let inner = &self.inner;
        let hello = MailHello { from: inner.rank as u32, to: to as u32 };
        let caller = Caller::new(&hello, inner.secret, message);
        let same_host = inner.info.host.same_network(&info.host);
        let mut failed = Failure::Slow("it advertises no address that we could reach".to_owned());
        for (address, _) in order_candidates(&inner.locals, &info.tcp, same_host) {
            let sent = tcp::open(None, address, &tcp::SocketOptions::for_messages(inner.encrypt), wait)
                .and_then(|mut socket| stream::greet(&mut socket, &caller, wait));
            match sent {
                Ok(()) => return Ok(()),
                Err(failure @ Failure::Final(_)) => return Err(failure),
                Err(failure) => failed = failure,
            }
        }
        Err(failed)
    }
}
