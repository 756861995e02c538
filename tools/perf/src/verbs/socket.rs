//! The kernel's own sockets over loopback: what RDMA is compared with.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;

use anyhow::{Result, bail};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tinynccl::Comm;

use super::{Level, Options, Waiting};
use crate::messages::Messages;

/// Longest message of UDP.
pub(super) const DATAGRAM: usize = 65_507;

const ANY_PORT: &str = "127.0.0.1:0";

/// One end of a connection between the two ranks.
pub(super) struct Socket {
    socket: OwnedFd,
    data: Vec<u8>,
    wait: Waiting,
}

impl Socket {
    pub(super) fn new(comm: &Comm, options: &Options) -> Result<Socket> {
        let peer = |port: u16| ("127.0.0.1", port);
        let mut ports = [0; 2];
        let socket: OwnedFd = if options.level == Level::Udp {
            let socket = UdpSocket::bind(ANY_PORT)?;
            comm.all_gather(&[socket.local_addr()?.port()], &mut ports)?;
            socket.connect(peer(ports[1 - comm.rank()]))?;
            socket.into()
        } else {
            let listener = TcpListener::bind(ANY_PORT)?;
            comm.all_gather(&[listener.local_addr()?.port()], &mut ports)?;
            let stream = if comm.rank() == 0 { listener.accept()?.0 } else { TcpStream::connect(peer(ports[0]))? };
            stream.set_nodelay(true)?;
            stream.into()
        };
        Ok(Socket { socket, data: vec![1; options.bytes.max(1)], wait: options.wait })
    }

    /// Repeats a call, which gets the bytes that are left and says how many it has moved, until all are.
    fn all(&mut self, bytes: usize, mut call: impl FnMut(&OwnedFd, &mut [u8]) -> Result<usize, Errno>) -> Result<()> {
        let mut at = 0;
        while at < bytes {
            match call(&self.socket, &mut self.data[at..bytes]) {
                Ok(0) => bail!("the other rank has closed the connection"),
                Ok(moved) => at += moved,
                Err(Errno::WOULDBLOCK) => self.wait.turn(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Messages for Socket {
    fn send(&mut self, bytes: usize) -> Result<()> {
        let sleeps = self.wait == Waiting::Events;
        let flags = if sleeps { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
        self.all(bytes, |socket, data| send(socket, data, flags))
    }

    fn recv(&mut self, bytes: usize) -> Result<()> {
        let sleeps = self.wait == Waiting::Events;
        let flags = if sleeps { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        self.all(bytes, |socket, data| Ok(recv(socket, data, flags)?.0))
    }
}
