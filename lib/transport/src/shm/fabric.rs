//! Shared memory as an endpoint sees it: reaches processes of the same machine, network namespace and user.

use std::os::fd::{AsFd, BorrowedFd};

use super::connect;
use super::listen::{self, Port};
use super::single_copy::ZeroCopyFrom;
use crate::accept::conn::Conn;
use crate::fabric::{Accept, Dial, Dialed, Fabric, Site};
use crate::{EndpointInfo, LinkPair};
use tinynccl_plan::error::Result;
use tinynccl_sys::config;

/// A Unix socket over which memory comes.
#[derive(Debug)]
struct ShmFabric {
    port: Port,
    single_copy: config::SingleCopy,
    /// From which length on its links use zero copy on small pages.
    ordinary: ZeroCopyFrom,
}

/// Listens on a Unix socket.
///
/// # Errors
/// [`Error::Os`](tinynccl_plan::Error::Os).
pub(crate) fn bind(site: &Site<'_>) -> Result<Box<dyn Fabric>> {
    Ok(Box::new(ShmFabric {
        port: Port::bind()?,
        single_copy: site.config.single_copy,
        ordinary: ZeroCopyFrom::default(),
    }))
}

impl Fabric for ShmFabric {
    fn kind(&self) -> &'static str {
        "shm"
    }

    fn name(&self) -> &'static str {
        "shared memory"
    }

    fn describe(&self, info: &mut EndpointInfo) {
        info.unix = Some(self.port.name.clone());
    }

    fn reaches(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> Result<&'static str, String> {
        match ours.host.separation(&theirs.host) {
            Some(why) => Err(why.to_owned()),
            None if theirs.unix.is_none() => Err("one of them has no Unix socket".to_owned()),
            None => Ok("same machine, network namespace and user"),
        }
    }

    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed> {
        match &dial.info.unix {
            Some(name) => connect::connect(name, dial, (self.single_copy, &self.ordinary)),
            None => Ok(Dialed::NotPossible("it has no Unix socket".to_owned())),
        }
    }

    fn listeners(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.port.as_fd()]
    }

    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>> {
        Ok(listen::incoming(&self.port)?.map(|conn| Box::new(conn) as Box<dyn Conn>))
    }

    fn accept(&self, conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>> {
        Ok(listen::finish(conn, accept, (self.single_copy, &self.ordinary)))
    }

    fn zero_copy_from(&self, bytes: usize) {
        self.ordinary.set(bytes);
    }
}
