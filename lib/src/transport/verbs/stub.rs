//! What a build without the feature `verbs` has instead: a clear error.

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::VerbsAddress;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::transport::linger::Linger;
use crate::transport::wait::Wait;
use crate::transport::{LinkOptions, LinkPair, Peer};

/// None can be made.
#[derive(Debug)]
pub(crate) enum Registration {}

/// No ports.
#[derive(Debug)]
pub(crate) enum Rails {}

impl Rails {
    pub(crate) fn open(_rank: usize, _config: &Config) -> Result<Rails> {
        Err(Error::Unsupported {
            what: "RDMA (TINYNCCL_TRANSPORT=verbs)".to_owned(),
            detail:
                "this program was built without it; build with `--features verbs` (needs libibverbs-dev, libnl-3-dev, \
                     libnl-route-3-dev, libclang-dev, cmake and pkg-config), or set TINYNCCL_TRANSPORT=auto"
                    .to_owned(),
        })
    }

    pub(crate) fn addresses(&self) -> Vec<VerbsAddress> {
        match *self {}
    }

    pub(crate) fn check(&self, _peer: usize, _theirs: &[VerbsAddress], _no_relay: bool) -> Result<()> {
        match *self {}
    }

    pub(crate) unsafe fn register(&self, _base: NonNull<u8>, _bytes: usize) -> Result<Registration> {
        match *self {}
    }

    pub(crate) fn event_fds(&self) -> std::iter::Empty<BorrowedFd<'_>> {
        match *self {}
    }

    pub(crate) fn hear(&self) {
        match *self {}
    }
}

pub(crate) fn connect(
    rails: &Rails,
    _socket: TcpStream,
    _who: Peer,
    _theirs: (&[VerbsAddress], u32),
    _options: &LinkOptions,
    _wait: &Wait<'_>,
    _linger: &Arc<Linger>,
) -> Result<LinkPair> {
    match *rails {}
}

pub(crate) fn finish(
    rails: &Rails,
    _socket: TcpStream,
    _who: Peer,
    _options: &LinkOptions,
    _wait: &Wait<'_>,
    _linger: &Arc<Linger>,
) -> Result<LinkPair> {
    match *rails {}
}
