//! A link that calls a function when a message was received, to do something to memory at that moment: when the
//! receiver looks for the next one, or at once after a message of sums.

use std::sync::Arc;

use tinynccl::Result;
use tinynccl::transport::{Interest, LinkPair, Peer, Received, RecvLink, SendLink};
use tinynccl::wire::Header;

/// Called with the header of each message after it was received.
pub type OnMessage = Arc<dyn Fn(&Header) + Send + Sync>;

/// Wraps a pair of links.
pub fn wrap(pair: LinkPair, on_message: OnMessage) -> LinkPair {
    LinkPair { recv: Box::new(TapRecv { inner: pair.recv, on_message, due: None }), any_length: false, ..pair }
}

struct TapRecv {
    inner: Box<dyn RecvLink>,
    on_message: OnMessage,
    due: Option<Header>,
}

impl TapRecv {
    fn passed(&mut self, header: Header) {
        self.due = Some(header);
        if header.algorithm == Header::SUMS {
            self.fire();
        }
    }

    fn fire(&mut self) {
        self.due.take().iter().for_each(|header| (self.on_message)(header));
    }
}

impl RecvLink for TapRecv {
    fn peer(&self) -> &Peer {
        self.inner.peer()
    }
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        self.fire();
        self.inner.peek()
    }
    fn release(&mut self) -> Result<()> {
        let header = self.inner.peek()?.map(|(header, _)| header);
        self.inner.release()?;
        header.into_iter().for_each(|header| self.passed(header));
        Ok(())
    }
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        self.fire();
        let received = self.inner.recv_into(expected, dst)?;
        if received == Received::Done {
            self.passed(*expected);
        }
        Ok(received)
    }
    fn progress(&mut self) -> Result<bool> {
        self.fire();
        self.inner.progress()
    }
    fn check_peer(&mut self) -> Result<()> {
        self.inner.check_peer()
    }
    fn arm(&mut self) -> Result<bool> {
        self.inner.arm()
    }
    fn disarm(&mut self) {
        self.inner.disarm();
    }
    fn bytes_moved(&self) -> u64 {
        self.inner.bytes_moved()
    }
    fn interest(&self) -> Interest {
        self.inner.interest()
    }
}
