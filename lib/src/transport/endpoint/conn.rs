//! A connection of either kind, before its link is made.

use std::os::fd::{AsFd, BorrowedFd};

use crate::error::Result;
use crate::transport::handshake::{Hello, Reply};
use crate::transport::{shm, tcp};

/// A connection that waits for its hello, or with it.
#[derive(Debug)]
pub(super) enum Conn {
    Tcp(tcp::Pending),
    Unix(shm::Pending),
}

impl Conn {
    pub(super) fn read(&mut self) -> Result<Option<[u8; Hello::BYTES]>, String> {
        match self {
            Conn::Tcp(c) => c.read(),
            Conn::Unix(c) => c.read(),
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
