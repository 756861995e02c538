//! The two halves that an end of a relayed link holds: those of its link with the relay, in the name of the far end.

use std::sync::{Arc, OnceLock};

use super::notice;
use crate::{Interest, LinkPair, Peer, Received, RecvLink, SendLink};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;

/// Makes the link with `relay`, the next rank on the path, a link with the far end, `peer`, through `relays` (in
/// words).
pub(crate) fn wrap(pair: LinkPair, peer: usize, relay: usize, relays: &str) -> LinkPair {
    let Peer { rank, address, .. } = pair.send.peer().clone();
    let peer = Peer { rank, peer, address: format!("through {relays}: rank {relay} at {address}") };
    let names = Names { peer, relay, verdict: Arc::default() };
    LinkPair {
        send: Box::new(RelayedSend { inner: pair.send, names: names.clone() }),
        recv: Box::new(RelayedRecv { inner: pair.recv, names, pending: false }),
        kind: match pair.kind {
            "verbs" => "verbs, relayed",
            "tcp" => "tcp, relayed",
            "shm" => "shm, relayed",
            "rails" => "rails, relayed",
            _ => "relayed",
        },
        any_length: false,
    }
}

/// Names of the far end and of the relay, for errors.
#[derive(Debug, Clone)]
struct Names {
    /// The far end.
    peer: Peer,
    relay: usize,
    /// Text of the relay's notice, once the receiving half has come to it.
    verdict: Arc<OnceLock<String>>,
}

impl Names {
    /// The error after a notice, if one came.
    fn check(&self, op: &str) -> Result<()> {
        match self.verdict.get() {
            None => Ok(()),
            Some(text) => Err(self.peer.lost(op, text)),
        }
    }

    /// An error of the link with the relay as one of the link with the far end.
    #[cold]
    fn rename(&self, error: Error) -> Error {
        let Error::PeerLost { op, detail, .. } = error else { return error };
        if let Err(error) = self.check(&op) {
            return error;
        }
        let Names { relay, peer: Peer { rank, peer, .. }, .. } = self;
        // Closed without a notice, or with one that lies behind messages which have not been received yet.
        let detail = format!(
            "the link with rank {relay} of the world, which relays between its ranks {rank} and {peer}, ended ({detail}): rank \
             {relay} is gone, or rank {peer} is and rank {relay} closed the link"
        );
        self.peer.lost(&op, &detail)
    }
}

/// Methods of the link with the relay, with its errors as those of the link with the far end. Those with an operation
/// fail by themselves after a notice.
macro_rules! renamed {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty $(, $op:literal)?;)+) => {$(
        fn $method(&mut self $(, $argument: $type)*) -> Result<$result> {
            $(self.names.check($op)?;)?
            self.inner.$method($($argument),*).map_err(|e| self.names.rename(e))
        }
    )+};
}

#[derive(Debug)]
struct RelayedSend {
    inner: Box<dyn SendLink>,
    names: Names,
}

impl SendLink for RelayedSend {
    forward!(expect_more, sends_from_caller, is_flushed, disarm, bytes_moved, interest);
    renamed! {
        reserve() -> Option<&mut [u8]>, "send";
        commit(header: &Header) -> ();
        send_from(header: &Header, data: &[u8]) -> bool, "send";
        progress() -> bool;
        check_peer() -> (), "send";
        arm() -> bool, "send";
    }

    fn peer(&self) -> &Peer {
        &self.names.peer
    }
}

#[derive(Debug)]
struct RelayedRecv {
    inner: Box<dyn RecvLink>,
    names: Names,
    /// A message may be partly received: the link must not be asked for another one.
    pending: bool,
}

impl RelayedRecv {
    /// Returns true if a message is here. Fails when it is a notice; that stays where it is, so that the answer stays
    /// the same.
    fn look(&mut self) -> Result<bool> {
        self.pending = false;
        match self.inner.peek() {
            Ok(Some((header, payload))) if notice::is_one(&header) => {
                let text = notice::text(payload);
                Err(self.names.peer.lost("receive", self.names.verdict.get_or_init(|| text)))
            }
            Ok(message) => Ok(message.is_some()),
            Err(e) => Err(self.names.rename(e)),
        }
    }

    fn received(&mut self, result: Result<Received>) -> Result<Received> {
        self.pending = matches!(result, Ok(Received::Pending));
        match result {
            // Its text may not be here yet.
            Ok(Received::Mismatch(header)) if notice::is_one(&header) => self.look().map(|_| Received::Pending),
            Ok(received) => Ok(received),
            Err(e) => Err(self.names.rename(e)),
        }
    }
}

impl RecvLink for RelayedRecv {
    forward!(shows_in_place, disarm, bytes_moved, interest);
    renamed! {
        release() -> ();
        progress() -> bool;
        arm() -> bool;
    }

    fn peer(&self) -> &Peer {
        &self.names.peer
    }
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        if !self.look()? {
            return Ok(None);
        }
        self.inner.peek().map_err(|e| self.names.rename(e))
    }
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        let result = self.inner.recv_into(expected, dst);
        self.received(result)
    }
    fn recv_chunks(&mut self, expected: &Header, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        let result = self.inner.recv_chunks(expected, sink);
        self.received(result)
    }
    fn check_peer(&mut self) -> Result<()> {
        self.names.check("receive")?;
        self.inner.check_peer().map_err(|e| self.names.rename(e))?;
        // A notice is no message for the caller.
        if !self.pending {
            self.look()?;
        }
        Ok(())
    }
}
