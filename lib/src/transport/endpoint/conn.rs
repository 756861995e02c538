//! A connection of either kind, before its link is made.

use std::os::fd::{AsFd, BorrowedFd};

use crate::error::Result;
use crate::secret::Proof;
use crate::transport::handshake::{Hello, Reply};
use crate::transport::{shm, tcp};

/// A connection that waits for its hello or its proof, or with them.
#[derive(Debug)]
pub(super) enum Conn {
    Tcp(tcp::Pending),
    Unix(shm::Pending),
}

impl Conn {
    pub(super) fn hello(&mut self) -> Result<Option<[u8; Hello::BYTES]>, String> {
        match self {
            Conn::Tcp(c) => c.hello(),
            Conn::Unix(c) => c.hello(),
        }
    }

    pub(super) fn proof(&mut self) -> Result<Option<Proof>, String> {
        match self {
            Conn::Tcp(c) => c.proof(),
            Conn::Unix(c) => c.proof(),
        }
    }

    pub(super) fn reply(&mut self, reply: &Reply) -> Result<(), String> {
        match self {
            Conn::Tcp(c) => c.reply(reply),
            Conn::Unix(c) => c.reply(reply),
        }
    }

    pub(super) fn address(&self) -> String {
        match self {
            Conn::Tcp(c) => c.address(),
            Conn::Unix(c) => c.address(),
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        match self {
            Conn::Tcp(c) => c.is_gone(),
            Conn::Unix(c) => c.is_gone(),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Conn::Tcp(c) => c.as_fd(),
            Conn::Unix(c) => c.as_fd(),
        }
    }
}
