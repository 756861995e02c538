//! Shared memory from which the receiver pulls long messages: the contract, and what can happen to the sender.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use crate::harness::*;
use crate::{basics, credits, death, random, sleeping};
use rustix::process::{Pid, Signal, kill_process};
use tinynccl::Config;
use tinynccl::config::{SingleCopy, TransportChoice};
use tinynccl::error::{Error, Result};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, Interest, LinkPair, Peer, Received, SendLink};
use tinynccl::wire::Header;

/// All messages over 32 KiB go by zero copy, whatever their pages.
pub(crate) fn config() -> Config {
    let mut config = crate::harness::config(TransportChoice::Shm);
    config.single_copy = SingleCopy::From(0);
    config
}

/// Every message that is sent from the caller's memory goes by zero copy from a copy, which is spoilt as soon as the
/// link is flushed.
pub(crate) fn wrap(pair: LinkPair) -> LinkPair {
    LinkPair { send: Box::new(ZeroCopySender { inner: pair.send, next: None, held: Vec::new() }), ..pair }
}

#[derive(Debug)]
struct ZeroCopySender {
    inner: Box<dyn SendLink>,
    /// Copy of the message that is being sent; `held` has those of messages sent since the link was last flushed.
    next: Option<Vec<u8>>,
    held: Vec<Vec<u8>>,
}

impl ZeroCopySender {
    fn spoil(&mut self) {
        if self.inner.is_flushed() {
            self.held.iter_mut().for_each(|data| data.fill(0xee));
            self.held.clear();
        }
    }
}

impl SendLink for ZeroCopySender {
    fn peer(&self) -> &Peer {
        self.inner.peer()
    }
    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        self.inner.reserve()
    }
    fn commit(&mut self, header: &Header) -> Result<()> {
        self.inner.commit(header)
    }
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        let copy = self.next.get_or_insert_with(|| data.to_vec());
        // SAFETY: the copy is kept, as it is, until the link is flushed.
        let done = unsafe { self.inner.zero_copy().unwrap().send(header, copy, false) }?;
        if done {
            self.held.extend(self.next.take());
        }
        Ok(done)
    }
    fn sends_from_caller(&self, bytes: usize) -> bool {
        self.inner.sends_from_caller(bytes)
    }
    fn progress(&mut self) -> Result<bool> {
        let moved = self.inner.progress();
        self.spoil();
        moved
    }
    fn is_flushed(&self) -> bool {
        self.inner.is_flushed()
    }
    fn check_peer(&mut self) -> Result<()> {
        self.inner.check_peer()
    }
    fn arm(&mut self) -> Result<bool> {
        let ready = self.inner.arm();
        self.spoil();
        ready
    }
    fn disarm(&mut self) {
        self.inner.disarm();
    }
    fn bytes_moved(&self) -> u64 {
        self.inner.bytes_moved()
    }
    fn interest(&self) -> Interest {
        self.inner.interest()
    }
}

// What a sender leaves behind unfetched is lost with it, so the tests of messages that outlive their sender are not
// here.
#[test]
fn messages_arrive_whole_and_in_order_in_every_pairing_of_calls() {
    basics::pairings(Backend::ZeroCopyShm);
}

#[test]
fn an_unexpected_message_is_reported_and_stays() {
    basics::mismatch(Backend::ZeroCopyShm);
}

#[test]
fn credits_are_enough_and_bounded() {
    credits::bounded(Backend::ZeroCopyShm);
}

#[test]
fn both_ends_flooding_do_not_deadlock() {
    credits::flood(Backend::ZeroCopyShm);
}

#[test]
fn a_sender_without_credit_is_woken() {
    sleeping::credit(Backend::ZeroCopyShm);
}

#[test]
fn the_death_of_the_peer_wakes_a_sleeper() {
    death::wakes(Backend::ZeroCopyShm);
}

#[test]
fn any_interleaving_keeps_the_order() {
    random::interleavings(Backend::ZeroCopyShm);
}

const ROLE: &str = "TINYNCCL_TEST_LENDER";
const MARK: &str = "INFO ";
/// Longer than a message that a link holds.
const LONG: usize = 5 * OPTIONS.max_message;

/// The other process: sends three messages by zero copy, and waits. It does nothing unless it is started for that.
#[test]
fn sending_process() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let endpoint = Endpoint::new(1, SECRET, &config()).unwrap();
    println!("\n{MARK}{}", serde_json::to_string(&endpoint.info()).unwrap());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let info: EndpointInfo = serde_json::from_str(&line).unwrap();
    let mut link = connect(&endpoint, 0, &info, &Doorbell::new().unwrap());
    assert!(link.any_length);
    // The other end has tried to read us by then.
    std::io::stdin().read_line(&mut line).unwrap();
    let data: Vec<Vec<u8>> = (0..3).map(|seq| payload(seq, LONG)).collect();
    for (seq, data) in data.iter().enumerate() {
        // SAFETY: `data` outlives the link's use of it: until this process ends.
        if !unsafe { link.send.zero_copy().unwrap().send(&header(seq as u32, LONG), data, false) }.unwrap() {
            // Our memory cannot be read: the parent reports it.
            break;
        }
    }
    println!("\n{MARK}sent");
    // Until the parent closes the pipe, or kills us.
    std::io::stdin().read_line(&mut line).unwrap();
    drop(data);
}

fn connect(endpoint: &Endpoint, peer_rank: usize, info: &EndpointInfo, bell: &std::sync::Arc<Doorbell>) -> LinkPair {
    let to = ConnectTo { comm: 0, peer_rank, info, channel: 0, options: OPTIONS };
    endpoint.connect(&to, bell, &|| None, PATIENCE).unwrap()
}

/// Kills the other process when a test fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_stopped_lender_is_read_and_a_killed_one_is_lost() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "zero_copy::sending_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = Killed(child);
    let mut stdout = BufReader::new(child.0.stdout.take().unwrap());
    let mut mark = || loop {
        let mut line = String::new();
        assert!(stdout.read_line(&mut line).unwrap() > 0, "the child ended");
        if let Some(text) = line.strip_prefix(MARK) {
            break text.to_owned();
        }
    };
    let info: EndpointInfo = serde_json::from_str(&mark()).unwrap();
    let endpoint = Endpoint::new(0, SECRET, &config()).unwrap();
    let mut stdin = child.0.stdin.take().unwrap();
    writeln!(stdin, "{}", serde_json::to_string(&endpoint.info()).unwrap()).unwrap();
    let mut link = connect(&endpoint, 1, &info, &Doorbell::new().unwrap());
    writeln!(stdin, "connected").unwrap();
    assert_eq!(mark().trim(), "sent");
    if !link.recv.must_pull() {
        println!("SKIPPED: reading another process: this system does not let us");
        return;
    }
    let pid = Pid::from_child(&child.0);
    kill_process(pid, Signal::STOP).unwrap();
    recv_into(&mut link, 0, LONG);
    kill_process(pid, Signal::CONT).unwrap();
    recv_chunks(&mut link, 1, LONG);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    // The third was sent, but it was never here.
    let mut dst = vec![0; LONG];
    for _ in 0..2 {
        match link.recv.recv_into(&header(2, LONG), &mut dst) {
            Err(Error::PeerLost { rank: 0, peer: 1, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(!matches!(link.recv.recv_into(&header(2, LONG), &mut dst), Ok(Received::Done)));
}
