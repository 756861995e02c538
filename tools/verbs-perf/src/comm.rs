//! `Comm::send` and `Comm::recv`, as a program uses them: from ordinary memory, which is copied through the registered
//! slots of the link, or from memory that is registered itself, once or for each call.

use anyhow::Result;
use tinynccl::Comm;
use tinynccl::comm::Persistent;

use crate::{Args, Level, Messages};

/// The data to send.
enum Data {
    Ordinary(Vec<u8>),
    Registered(Persistent<u8>),
    /// Registered before each call, and not any more after it.
    PerCall(Vec<u8>),
}

/// One of the two ranks.
pub(crate) struct Rank<'a> {
    comm: &'a Comm,
    peer: usize,
    data: Data,
    into: Vec<u8>,
}

impl<'a> Rank<'a> {
    pub(crate) fn new(comm: &'a Comm, args: &Args) -> Result<Rank<'a>> {
        let data = vec![1u8; args.bytes];
        let into = data.clone();
        let data = match args.level {
            Level::Registered => Data::Registered(comm.register_persistent(data)?),
            Level::Registering => Data::PerCall(data),
            _ => Data::Ordinary(data),
        };
        Ok(Rank { comm, peer: 1 - comm.rank(), data, into })
    }
}

impl Messages for Rank<'_> {
    fn send(&mut self) -> Result<()> {
        match &mut self.data {
            Data::Ordinary(data) => self.comm.send(data, self.peer)?,
            Data::Registered(data) => self.comm.send(data, self.peer)?,
            Data::PerCall(data) => {
                let registered = self.comm.register_persistent(std::mem::take(data))?;
                self.comm.send(&registered, self.peer)?;
                *data = registered.into_inner();
            }
        }
        Ok(())
    }

    fn recv(&mut self) -> Result<()> {
        Ok(self.comm.recv(&mut self.into, self.peer)?)
    }

    fn signal(&mut self) -> Result<()> {
        Ok(self.comm.send(&[0u8], self.peer)?)
    }

    fn await_signal(&mut self) -> Result<()> {
        Ok(self.comm.recv(&mut [0u8], self.peer)?)
    }
}
