//! A link of the transport, without a communicator around it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkOptions, LinkPair, Received};
use tinynccl::wire::Header;
use tinynccl::{Comm, Config, Secret};

use crate::{Args, Level, Messages, Waiting};

/// Longest wait for a message.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of an endpoint's description.
const INFO: usize = 4096;

/// One end of the link.
pub(crate) struct Wire<'a> {
    link: LinkPair,
    bell: Arc<Doorbell>,
    args: &'a Args,
    /// Longer messages are cut.
    longest: usize,
    data: Vec<u8>,
}

fn header(len: usize) -> Header {
    Header { len: len as u32, count: 1, ..Header::default() }
}

impl Messages for Wire<'_> {
    fn send(&mut self) -> Result<()> {
        let data = std::mem::take(&mut self.data);
        let sent = self.send_bytes(&data);
        self.data = data;
        sent
    }

    fn recv(&mut self) -> Result<()> {
        let mut data = std::mem::take(&mut self.data);
        let received = self.recv_bytes(&mut data);
        self.data = data;
        received
    }

    fn signal(&mut self) -> Result<()> {
        self.send_bytes(&[0])
    }

    fn await_signal(&mut self) -> Result<()> {
        self.recv_bytes(&mut [0])
    }
}

impl<'a> Wire<'a> {
    pub(crate) fn new(comm: &Comm, config: &Config, args: &'a Args) -> Result<Wire<'a>> {
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let endpoint = Endpoint::new(rank, Secret::new([7; 32]), config)?;
        let mut ours = serde_json::to_vec(&endpoint.info())?;
        ours.resize(INFO, b' ');
        let mut all = vec![0u8; 2 * INFO];
        comm.all_gather(&ours, &mut all)?;
        let info = all.chunks(INFO).nth(peer).context("the peer's address")?;
        let info: EndpointInfo = serde_json::from_slice(info)?;
        let bell = Doorbell::new()?;
        let longest = config.verbs_chunk;
        let options = LinkOptions { max_message: longest, depth: config.fifo_depth };
        let to = ConnectTo { comm: 99, peer_rank: peer, info: &info, channel: 0, options };
        let link = endpoint.connect(&to, &bell, &|| None, PATIENCE)?;
        Ok(Wire { link, bell, args, longest, data: vec![1u8; args.bytes] })
    }

    fn send_bytes(&mut self, data: &[u8]) -> Result<()> {
        for piece in data.chunks(self.longest) {
            let h = header(piece.len());
            let in_place = self.args.level == Level::InPlace && !self.link.send.sends_from_caller(piece.len());
            let mut wait = Wait::new();
            loop {
                let sent = if !in_place {
                    self.link.send.send_from(&h, piece)?
                } else if self.link.send.reserve()?.is_some() {
                    self.link.send.commit(&h)?;
                    true
                } else {
                    false
                };
                if sent {
                    break;
                }
                wait.turn(self, true)?;
            }
        }
        Ok(())
    }

    fn recv_bytes(&mut self, data: &mut [u8]) -> Result<()> {
        for piece in data.chunks_mut(self.longest) {
            let h = header(piece.len());
            let mut wait = Wait::new();
            loop {
                let received = if self.args.level == Level::InPlace {
                    let here = self.link.recv.peek()?.map(|(theirs, _)| theirs);
                    match here {
                        None => Received::Pending,
                        Some(theirs) if !h.agrees_with(&theirs) => Received::Mismatch(theirs),
                        Some(_) => {
                            self.link.recv.release()?;
                            Received::Done
                        }
                    }
                } else {
                    self.link.recv.recv_into(&h, piece)?
                };
                match received {
                    Received::Done => break,
                    Received::Pending => wait.turn(self, false)?,
                    Received::Mismatch(got) => bail!("expected {h}, got {got}"),
                }
            }
        }
        Ok(())
    }

    fn sleep(&mut self, sending: bool) -> Result<()> {
        let (ready, interest) = if sending {
            (self.link.send.arm()?, self.link.send.interest())
        } else {
            (self.link.recv.arm()?, self.link.recv.interest())
        };
        if !ready {
            let mut fds = vec![PollFd::new(&*self.bell, PollFlags::IN)];
            if let Some(fd) = interest.fd {
                // SAFETY: the descriptor belongs to the link, which we hold.
                fds.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN));
            }
            let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&timeout))?;
        }
        self.link.send.disarm();
        self.link.recv.disarm();
        self.bell.drain();
        Ok(())
    }
}

/// A wait with an end.
struct Wait {
    turns: u32,
    since: Option<Instant>,
}

impl Wait {
    fn new() -> Wait {
        Wait { turns: 0, since: None }
    }

    fn turn(&mut self, wire: &mut Wire<'_>, sending: bool) -> Result<()> {
        self.turns += 1;
        match wire.args.wait {
            Waiting::Events => wire.sleep(sending)?,
            Waiting::Yield => std::thread::yield_now(),
            Waiting::Poll => std::hint::spin_loop(),
        }
        if wire.args.wait != Waiting::Events && !self.turns.is_multiple_of(1024) {
            return Ok(());
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            bail!("nothing came for {PATIENCE:?}");
        }
        Ok(())
    }
}
