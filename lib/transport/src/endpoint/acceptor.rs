//! The connections of an endpoint: relays those for other ranks, and files the others until our side asks for them.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::mail::{self, MailHello};
use super::newcomer::{self, JoinHello};
use super::{Inner, hop};
use crate::accept::acceptor::{Acceptor, Handler, Incoming, Rejected};
use crate::accept::handshake::{Hello, Reply};
use crate::accept::link::LinkHello;
use crate::fabric::Fabric;
use crate::linger::{Closing, Linger};
use crate::wait::Wait;
use tinynccl_plan::error::Result;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::{lock, poll};

/// Limit of connections that wait for our side to ask for them.
const FILED: usize = 16 << 10;
/// Longest time for what dropped links have left when the endpoint is dropped, too.
const FINISH: Duration = Duration::from_secs(5);

/// The link and the stream that a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) comm: u32,
    /// The ends of the link. Its target is we, or a rank that we relay to.
    pub(super) origin: u32,
    pub(super) target: u32,
    pub(super) channel: u32,
    pub(super) stream: usize,
}

impl Key {
    pub(super) fn of(hello: &LinkHello) -> Key {
        let LinkHello { comm, origin, target, channel, .. } = *hello;
        Key { comm, origin, target, channel, stream: hello.stream() }
    }
}

type Filed = HashMap<Key, VecDeque<(LinkHello, Incoming)>>;

/// State shared by the acceptor and the connecting threads.
#[derive(Debug)]
pub(super) struct Backlog {
    filed: Mutex<Filed>,
    arrived: Condvar,
    bell: Arc<Doorbell>,
    pub(super) linger: Arc<Linger>,
}

impl Backlog {
    pub(super) fn new() -> Result<Arc<Backlog>> {
        let bell = Doorbell::new()?;
        let linger = Linger::new(bell.clone());
        Ok(Arc::new(Backlog { filed: Mutex::default(), arrived: Condvar::new(), bell, linger }))
    }

    /// The next connection for `key` whose dialer is still there.
    pub(super) fn take(
        &self,
        key: &Key,
        wait: &Wait<'_>,
        detail: impl Fn() -> String,
    ) -> Result<(LinkHello, Incoming)> {
        let mut filed = lock(&self.filed);
        loop {
            if let Some(queue) = filed.get_mut(key) {
                while let Some((hello, incoming)) = queue.pop_front() {
                    if !incoming.conn.is_gone() {
                        return Ok((hello, incoming));
                    }
                    log::debug!("the connection of rank {} from {} went away", hello.from, incoming.conn.address());
                }
                filed.remove(key);
            }
            let slice = wait.slice(&detail)?;
            filed = self.arrived.wait_timeout(filed, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn file(&self, hello: LinkHello, mut incoming: Incoming) {
        let key = Key::of(&hello);
        let mut filed = lock(&self.filed);
        if filed.values().map(VecDeque::len).sum::<usize>() >= FILED {
            log::warn!("{FILED} connections wait to be asked for: turning away {}", incoming.conn.address());
            let _ = incoming.conn.reply(&Reply::Stranger("too many connections wait".to_owned()));
            return;
        }
        filed.entry(key).or_default().push_back((hello, incoming));
        self.arrived.notify_all();
    }
}

/// Starts the thread for an endpoint.
pub(super) fn start(inner: &Arc<Inner>) -> Result<Acceptor> {
    let (rank, secret, fabrics, backlog) = (inner.rank, inner.secret, inner.fabrics.clone(), inner.backlog.clone());
    let (endpoint, bell) = (Arc::downgrade(inner), backlog.bell.clone());
    let accepting = Accepting { rank, secret, fabrics, backlog, endpoint, closing: Vec::new() };
    Acceptor::start("listen", format!("rank {rank}"), bell, accepting)
}

/// Finishes the work of dropped links that would be lost with this process, for a bounded time.
fn finish(mut closing: Vec<Box<dyn Closing>>) {
    let until = Instant::now() + FINISH;
    closing.retain(|c| c.needs_this_process());
    loop {
        closing.retain_mut(|c| !c.is_done());
        let left = until.saturating_duration_since(Instant::now());
        if closing.is_empty() || left.is_zero() {
            return;
        }
        let mut fds: Vec<PollFd<'_>> =
            closing.iter().map(|c| PollFd::from_borrowed_fd(c.fd(), PollFlags::IN)).collect();
        if poll(&mut fds, left).is_err() {
            return;
        }
    }
}

/// State of an endpoint's acceptor thread.
struct Accepting {
    rank: usize,
    secret: Secret,
    fabrics: Arc<[Box<dyn Fabric>]>,
    backlog: Arc<Backlog>,
    /// Takes what is to be relayed.
    endpoint: Weak<Inner>,
    /// Work of dropped links.
    closing: Vec<Box<dyn Closing>>,
}

impl Handler for Accepting {
    const MOST: usize = 256;

    fn fds(&self, accepting: bool) -> Vec<BorrowedFd<'_>> {
        let listeners = self.fabrics.iter().filter(|_| accepting).flat_map(|fabric| fabric.listeners());
        listeners.chain(self.closing.iter().map(|closing| closing.fd())).collect()
    }

    fn incoming(&self) -> std::io::Result<Option<Incoming>> {
        let mut none = Ok(None);
        for (listener, fabric) in self.fabrics.iter().enumerate() {
            match fabric.incoming() {
                Ok(Some(conn)) => return Ok(Some(Incoming { listener, conn })),
                Ok(None) => {}
                // One that cannot accept does not keep the others from it.
                Err(e) => none = Err(e),
            }
        }
        none
    }

    fn secret(&self, hello: &Hello) -> Result<Secret, String> {
        if hello.purpose::<MailHello>().is_some() {
            return Ok(self.secret);
        }
        if hello.purpose::<JoinHello>().is_some() {
            let secret =
                self.endpoint.upgrade().and_then(|inner| inner.admission.get().map(|admission| admission.secret));
            return secret.ok_or_else(|| "this rank takes no newcomers".to_owned());
        }
        LinkHello::of(hello, self.rank).map(|_| self.secret)
    }

    fn admit(&mut self, hello: &Hello, incoming: Incoming, attached: &[u8]) -> Result<(), Rejected> {
        if let Some(hello) = hello.purpose::<MailHello>() {
            return mail::take(self.endpoint.upgrade().as_deref(), hello, incoming, attached);
        }
        if let Some(hello) = hello.purpose::<JoinHello>() {
            return newcomer::take(self.endpoint.upgrade().as_deref(), hello, incoming, attached);
        }
        let link = match LinkHello::of(hello, self.rank) {
            Ok(link) => link,
            Err(reason) => return Err((reason, incoming.conn)),
        };
        // Of several streams the first asks for the link.
        if link.target as usize == self.rank || link.stream() > 0 {
            self.backlog.file(link, incoming);
        } else if let Some(endpoint) = self.endpoint.upgrade() {
            hop::take(&endpoint, link, incoming);
        }
        Ok(())
    }

    fn tick(&mut self) -> bool {
        self.fabrics.iter().for_each(|fabric| fabric.handle_events());
        self.closing.extend(self.backlog.linger.collect());
        self.closing.retain_mut(|closing| !closing.is_done());
        !self.closing.is_empty()
    }

    fn finish(mut self) {
        self.closing.extend(self.backlog.linger.stop());
        finish(self.closing);
    }
}
