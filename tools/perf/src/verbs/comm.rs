//! `Comm::send` and `Comm::recv`, as a program uses them: from ordinary memory, which is copied through the registered
//! slots of the link, or from memory that is registered itself, once or for each call.

use anyhow::Result;
use tinynccl::Comm;
use tinynccl::comm::Persistent;

use super::{Level, Options};
use crate::messages::Messages;

/// The data to send.
enum Data {
    Ordinary(Vec<u8>),
    Registered(Persistent<u8>),
    /// Registered before each call, and not any more after it.
    PerCall(Vec<u8>),
}

/// One of the two ranks.
pub(super) struct Rank<'a> {
    comm: &'a Comm,
    peer: usize,
    data: Data,
    into: Vec<u8>,
}

impl<'a> Rank<'a> {
    pub(super) fn new(comm: &'a Comm, options: &Options) -> Result<Rank<'a>> {
        let data = vec![1u8; options.bytes.max(1)];
        let into = data.clone();
        let data = match options.level {
            Level::Registered => Data::Registered(comm.register_persistent(data)?),
            Level::Registering => Data::PerCall(data),
            _ => Data::Ordinary(data),
        };
        Ok(Rank { comm, peer: 1 - comm.rank(), data, into })
    }
}

impl Messages for Rank<'_> {
    fn send(&mut self, bytes: usize) -> Result<()> {
        match &mut self.data {
            Data::PerCall(data) if bytes == data.len() => {
                let registered = self.comm.register_persistent(std::mem::take(data))?;
                self.comm.send(&registered, self.peer)?;
                *data = registered.into_inner();
            }
            Data::Ordinary(data) | Data::PerCall(data) => self.comm.send(&data[..bytes], self.peer)?,
            Data::Registered(data) => self.comm.send(&data[..bytes], self.peer)?,
        }
        Ok(())
    }

    fn recv(&mut self, bytes: usize) -> Result<()> {
        Ok(self.comm.recv(&mut self.into[..bytes], self.peer)?)
    }
}
