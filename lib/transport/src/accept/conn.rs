//! A connection as the accepting end sees it, before it is a link.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use super::handshake::Reply;

/// A connection on which the handshake goes on, at the end that accepts. No method blocks.
///
/// [`StreamConn`](crate::StreamConn) is one over any stream of bytes.
pub trait Conn: Any + Send + fmt::Debug {
    /// Fills `bytes` once as many are here; `false` until then. It is asked again with the same length.
    ///
    /// # Errors
    /// Why they will not come.
    fn read(&mut self, bytes: &mut [u8]) -> Result<bool, String>;

    /// Sends a few hundred bytes, for which a new connection has buffer space.
    ///
    /// # Errors
    /// Why they cannot be sent.
    fn write(&mut self, bytes: &[u8]) -> Result<(), String>;

    /// The dialer's address in words.
    fn address(&self) -> String;

    /// The dialer has gone away in the meantime.
    fn is_gone(&self) -> bool;

    /// Readable when [`Conn::read`] has something to do.
    fn fd(&self) -> BorrowedFd<'_>;
}

impl dyn Conn {
    /// The connection as what it was when the fabric gave it away.
    ///
    /// # Errors
    /// It is another fabric's.
    pub fn downcast<T: Conn>(self: Box<Self>) -> Result<Box<T>, String> {
        let any: Box<dyn Any> = self;
        any.downcast().map_err(|_| "expected a connection of the same transport".to_owned())
    }

    pub(crate) fn reply(&mut self, reply: &Reply) -> Result<(), String> {
        self.write(&reply.to_bytes())
    }
}

impl AsFd for dyn Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}
