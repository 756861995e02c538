//! A link of the transport, without a communicator around it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkOptions, LinkPair, Received};
use tinynccl::wire::Header;
use tinynccl::{Comm, Config, Secret};

use super::{Level, Options, Waiting};
use crate::messages::Messages;

/// Longest wait for a message.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of an endpoint's description.
const INFO: usize = 4096;

/// One end of the link.
pub(super) struct Wire {
    link: LinkPair,
    bell: Arc<Doorbell>,
    in_place: bool,
    wait: Waiting,
    /// Longer messages are cut.
    longest: usize,
    data: Vec<u8>,
}

fn header(len: usize) -> Header {
    Header { len: len as u32, count: 1, ..Header::default() }
}

impl Messages for Wire {
    fn send(&mut self, bytes: usize) -> Result<()> {
        for piece in self.data[..bytes].chunks(self.longest) {
            let h = header(piece.len());
            let in_place = self.in_place && !self.link.send.sends_from_caller(piece.len());
            until(&mut self.link, &self.bell, self.wait, true, |link| {
                if !in_place {
                    return Ok(link.send.send_from(&h, piece)?);
                }
                let there = link.send.reserve()?.is_some();
                if there {
                    link.send.commit(&h)?;
                }
                Ok(there)
            })?;
        }
        Ok(())
    }

    fn recv(&mut self, bytes: usize) -> Result<()> {
        for piece in self.data[..bytes].chunks_mut(self.longest) {
            let (h, in_place) = (header(piece.len()), self.in_place);
            until(&mut self.link, &self.bell, self.wait, false, |link| {
                let received = match in_place {
                    false => link.recv.recv_into(&h, piece)?,
                    true => match link.recv.peek()?.map(|(theirs, _)| theirs) {
                        None => Received::Pending,
                        Some(theirs) if !h.agrees_with(&theirs) => Received::Mismatch(theirs),
                        Some(_) => {
                            link.recv.release()?;
                            Received::Done
                        }
                    },
                };
                match received {
                    Received::Mismatch(got) => bail!("expected {h}, got {got}"),
                    received => Ok(matches!(received, Received::Done)),
                }
            })?;
        }
        Ok(())
    }
}

impl Wire {
    pub(super) fn new(comm: &Comm, config: &Config, options: &Options) -> Result<Wire> {
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
        let size = LinkOptions { max_message: longest, depth: config.fifo_depth };
        let to = ConnectTo { comm: 99, peer_rank: peer, info: &info, channel: 0, options: size };
        let link = endpoint.connect(&to, &bell, &|| None, PATIENCE)?;
        let in_place = options.level == Level::InPlace;
        Ok(Wire { link, bell, in_place, wait: options.wait, longest, data: vec![1; options.bytes.max(1)] })
    }
}

/// Repeats a call until it is done.
fn until(
    link: &mut LinkPair,
    bell: &Doorbell,
    wait: Waiting,
    sending: bool,
    mut call: impl FnMut(&mut LinkPair) -> Result<bool>,
) -> Result<()> {
    let (mut turns, mut since) = (0u32, None);
    while !call(link)? {
        turns += 1;
        if wait == Waiting::Events {
            sleep(link, bell, sending)?;
        } else {
            wait.turn();
            if !turns.is_multiple_of(1024) {
                continue;
            }
        }
        if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            bail!("nothing came for {PATIENCE:?}");
        }
    }
    Ok(())
}

fn sleep(link: &mut LinkPair, bell: &Doorbell, sending: bool) -> Result<()> {
    let (ready, interest) =
        if sending { (link.send.arm()?, link.send.interest()) } else { (link.recv.arm()?, link.recv.interest()) };
    if !ready {
        let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
        if let Some(fd) = interest.fd {
            // SAFETY: the descriptor belongs to the link, which we hold.
            fds.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN));
        }
        poll(&mut fds, Some(&Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 }))?;
    }
    link.send.disarm();
    link.recv.disarm();
    bell.drain();
    Ok(())
}
