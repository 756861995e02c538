//! The loops that all tests of the contract share, for links of every backend.

use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{Doorbell, Endpoint, Interest, LinkOptions, LinkPair, Received};
use tinynccl::wire::Header;

use crate::harness::PATIENCE;

/// An odd largest message and a depth that is no power of two.
pub(crate) const OPTIONS: LinkOptions = LinkOptions { max_message: 70_001, depth: 3 };

/// One rank's end, with what keeps it alive.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) link: LinkPair,
    pub(crate) bell: Arc<Doorbell>,
    /// Kept for as long as the link: they read on after links that are dropped. Ours, and those that relay.
    pub(crate) endpoints: Vec<Arc<Endpoint>>,
}

/// Runs both ends at once, each in its thread.
pub(crate) fn run<T: Send>(
    [a, b]: [End; 2],
    first: impl FnOnce(End) -> T + Send,
    second: impl FnOnce(End) -> T + Send,
) -> [T; 2] {
    std::thread::scope(|s| [s.spawn(|| first(a)), s.spawn(|| second(b))].map(|t| t.join().unwrap()))
}

pub(crate) fn header(seq: u32, len: usize) -> Header {
    Header { count: 7, comm: 3, seq, root: Header::NO_ROOT, len: len as u32, ..Header::default() }
}

/// A payload that no other message has.
pub(crate) fn payload(seq: u32, len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seq.wrapping_mul(40_503)) >> 13) as u8)
        .collect()
}

/// Calls `step` until it gives something, yielding between.
pub(crate) fn until<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{what} did not come about");
        std::thread::yield_now();
    }
}

pub(crate) fn send_from(link: &mut LinkPair, seq: u32, len: usize) {
    let data = payload(seq, len);
    until("send_from", || {
        // A process receives while it waits, or two that send to each other could wait forever.
        link.recv.progress().unwrap();
        link.send.send_from(&header(seq, len), &data).unwrap().then_some(())
    });
}

pub(crate) fn send_reserved(link: &mut LinkPair, seq: u32, len: usize) {
    until("reserve", || {
        // Moves what was committed before.
        link.send.progress().unwrap();
        link.recv.progress().unwrap();
        let memory = link.send.reserve().unwrap()?;
        assert_eq!((memory.len(), memory.as_ptr() as usize % 64), (OPTIONS.max_message, 0));
        memory[..len].copy_from_slice(&payload(seq, len));
        Some(())
    });
    link.send.commit(&header(seq, len)).unwrap();
}

pub(crate) fn flush(link: &mut LinkPair) {
    until("flush", || {
        link.send.progress().unwrap();
        link.send.is_flushed().then_some(())
    });
}

pub(crate) fn recv_into(link: &mut LinkPair, seq: u32, len: usize) {
    let mut dst = vec![0xaa; len];
    until("recv_into", || {
        link.send.progress().unwrap();
        match link.recv.recv_into(&header(seq, len), &mut dst).unwrap() {
            Received::Done => Some(()),
            Received::Pending => None,
            Received::Mismatch(h) => panic!("expected {}, got {h}", header(seq, len)),
        }
    });
    assert!(dst == payload(seq, len), "payload of message {seq} of {len} bytes");
}

pub(crate) fn recv_chunks(link: &mut LinkPair, seq: u32, len: usize) {
    let mut got = Vec::with_capacity(len);
    until("recv_chunks", || {
        link.send.progress().unwrap();
        let mut sink = |at: usize, chunk: &[u8]| {
            assert_eq!((at, at % 64), (got.len(), 0), "chunks come in order and begin on cache lines");
            assert!(chunk.is_empty() || (chunk.as_ptr() as usize).is_multiple_of(8));
            got.extend_from_slice(chunk);
        };
        match link.recv.recv_chunks(&header(seq, len), &mut sink).unwrap() {
            Received::Done => Some(()),
            Received::Pending => None,
            Received::Mismatch(h) => panic!("expected {}, got {h}", header(seq, len)),
        }
    });
    assert!(got == payload(seq, len), "payload of message {seq} of {len} bytes");
}

pub(crate) fn recv_peeked(link: &mut LinkPair, seq: u32, len: usize) {
    until("peek", || {
        link.send.progress().unwrap();
        let (h, data) = link.recv.peek().unwrap()?;
        assert!(h.agrees_with(&header(seq, len)), "{h}");
        assert!(data == payload(seq, len), "payload of message {seq} of {len} bytes");
        assert!(data.is_empty() || (data.as_ptr() as usize).is_multiple_of(8));
        Some(())
    });
    link.recv.release().unwrap();
}

/// Sleeps as an executor does, on the doorbell and the links that were armed.
///
/// # Panics
/// When nothing wakes it.
pub(crate) fn sleep(bell: &Doorbell, interests: &[Interest]) {
    let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
    for interest in interests {
        if let Some(fd) = interest.fd {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.readable);
            flags.set(PollFlags::OUT, interest.writable);
            // SAFETY: the descriptor belongs to a link that the caller holds.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
    }
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let woken = rustix::event::poll(&mut fds, Some(&timeout)).unwrap();
    assert!(woken > 0, "a wake-up was lost");
}

/// Receives with sleeping: never spins.
pub(crate) fn recv_sleeping(end: &mut End, seq: u32, len: usize) -> Result<()> {
    let mut dst = vec![0; len];
    loop {
        match end.link.recv.recv_into(&header(seq, len), &mut dst)? {
            Received::Done => break,
            Received::Mismatch(h) => panic!("expected {}, got {h}", header(seq, len)),
            Received::Pending => {}
        }
        // The sending half may hold bytes that only progress moves: an executor waits for that, too.
        let mut ready = end.link.recv.arm()?;
        let mut interests = vec![end.link.recv.interest()];
        if !end.link.send.is_flushed() {
            ready |= end.link.send.progress()?;
            if !ready {
                end.link.send.arm()?;
                interests.push(end.link.send.interest());
            }
        }
        if !ready {
            sleep(&end.bell, &interests);
        }
        end.link.recv.disarm();
        end.link.send.disarm();
        end.bell.drain();
    }
    assert!(dst == payload(seq, len));
    Ok(())
}

/// Sends with sleeping: never spins.
pub(crate) fn send_sleeping(end: &mut End, seq: u32, len: usize) -> Result<()> {
    let data = payload(seq, len);
    while !end.link.send.send_from(&header(seq, len), &data)? {
        if !end.link.send.arm()? {
            sleep(&end.bell, &[end.link.send.interest()]);
        }
        end.link.send.disarm();
        end.bell.drain();
    }
    Ok(())
}

pub(crate) fn is_peer_lost<T>(result: &Result<T>, rank: usize) -> bool {
    matches!(result, Err(Error::PeerLost { rank: r, peer, .. }) if *r == rank && *peer == 1 - rank)
}
