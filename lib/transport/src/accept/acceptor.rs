//! The thread that accepts connections and authenticates them, all of them at once, each within a bounded time.
//!
//! Links between ranks and connections over rails share it: a [`Handler`] names the listeners and the secrets, and
//! takes the connections that have proven themselves.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::conn::Conn;
use super::handshake::{Challenge, Hello, Reply, WRONG_SECRET};
use super::stream::due_of;
use crate::seal::{self, Binding, MESSAGE};
use tinynccl_plan::error::Result;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::half_open::{self, Source};
use tinynccl_sys::secret::{Proof, Secret};
use tinynccl_sys::strangers::Strangers;
use tinynccl_sys::threads::{Thread, poll};

/// Longest time that a connection may take to authenticate.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Most connections that are accepted before others are read.
const BATCH: usize = 256;
/// Pause after `accept` failed, for want of descriptors for example.
const BREATHER: Duration = Duration::from_millis(100);
/// Longest sleep while there is something with a deadline, and while there is nothing.
const SLICE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(3600);

/// A connection, and the index of the listener that it came over.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) listener: usize,
    pub(crate) conn: Box<dyn Conn>,
}

/// A connection that is not wanted, and the reason, which its dialer gets as the reply.
pub(crate) type Rejected = (String, Box<dyn Conn>);

/// Owner of an acceptor: its listeners, and what becomes of authenticated connections. No method blocks.
pub(crate) trait Handler: Send + Sized + 'static {
    /// Most unauthenticated connections at once; their addresses share it.
    const MOST: usize;

    /// Descriptors that are readable when [`Handler::tick`] has something to do, or [`Handler::incoming`], if
    /// `accepting`.
    fn fds(&self, accepting: bool) -> Vec<BorrowedFd<'_>>;

    /// The next connection of a dialer, if there is one.
    fn incoming(&self) -> std::io::Result<Option<Incoming>>;

    /// Returns the secret that the dialer of `hello` must know, or the reason for which it is rejected.
    fn secret(&self, hello: &Hello) -> Result<Secret, String>;

    /// Returns true if the connection of `hello` stays in clear text where others are encrypted.
    fn is_plain(&self, _hello: &Hello) -> bool {
        false
    }

    /// Takes an authenticated connection, with the attachment of its hello. No reply to its proof has been sent.
    fn admit(&mut self, hello: &Hello, incoming: Incoming, attached: &[u8]) -> Result<(), Rejected>;

    /// Does what else there is to do; true if it must be called again within half a second.
    fn tick(&mut self) -> bool;

    /// Ends the thread.
    fn finish(self) {}
}

/// The thread of an acceptor, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Acceptor {
    stop: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
    thread: Thread,
}

impl Acceptor {
    /// Starts the thread; `name` is its owner's in the log. Whoever rings `bell` has it call [`Handler::tick`].
    ///
    /// # Errors
    /// [`Error::Os`](tinynccl_plan::Error::Os) when there are no threads left.
    pub(crate) fn start(
        op: &'static str,
        name: String,
        bell: Arc<Doorbell>,
        handler: impl Handler,
    ) -> Result<Acceptor> {
        let stop = Arc::new(AtomicBool::new(false));
        let what = format!("the acceptor thread of {name}");
        let rejections = Strangers::new(format!("{name}: rejected connections:"));
        let accepting =
            Loop { name, stop: stop.clone(), bell: bell.clone(), handler, half_open: Vec::new(), rejections };
        let thread = Thread::start(op, "tinynccl-accept".to_owned(), what, move || accepting.run())?;
        Ok(Acceptor { stop, bell, thread })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        if !self.thread.is_here() {
            return;
        }
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        self.thread.join();
    }
}

/// An unauthenticated connection.
struct HalfOpen {
    incoming: Incoming,
    source: Source,
    deadline: Instant,
    stage: Stage,
}

/// Next bytes that a connection must send.
#[derive(Clone, Copy)]
enum Stage {
    Hello,
    /// The message of the encryption's handshake behind a hello.
    Seal(Hello),
    Proof(Hello, Secret, Challenge, Option<Binding>),
    /// The attachment of a hello whose dialer has proven itself.
    Attachment(Hello),
}

/// Reason for a rejection, and whether the dialer gets it as the reply.
type Rejection = (String, bool);

struct Loop<H> {
    name: String,
    stop: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
    handler: H,
    half_open: Vec<HalfOpen>,
    rejections: Strangers,
}

impl<H: Handler> Loop<H> {
    fn run(mut self) {
        let (mut breather, mut busy) = (false, false);
        while !self.stop.load(Ordering::Acquire) {
            let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
            let half_open = self.half_open.iter().map(|half| half.incoming.conn.fd());
            let all = self.handler.fds(!breather).into_iter().chain(half_open);
            fds.extend(all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            let time = match (breather, busy || !self.half_open.is_empty()) {
                (true, _) => BREATHER,
                (false, true) => SLICE,
                (false, false) => IDLE,
            };
            let due = self.rejections.due().map(|due| due.saturating_duration_since(Instant::now()));
            if let Err(e) = poll(&mut fds, due.map_or(time, |due| due.min(time))) {
                log::error!("{}: the acceptor cannot poll: {e}", self.name);
                std::thread::sleep(BREATHER);
            }
            drop(fds);
            self.bell.drain();
            breather = !self.accept_all();
            self.read_all();
            self.rejections.tick();
            busy = self.handler.tick();
        }
        self.handler.finish();
    }

    /// Takes connections that wait; false when that failed.
    fn accept_all(&mut self) -> bool {
        let deadline = Instant::now() + HANDSHAKE;
        for _ in 0..BATCH {
            match self.handler.incoming() {
                Ok(Some(incoming)) => {
                    let source = Source::from(incoming.conn.address().as_str());
                    self.half_open.push(HalfOpen { incoming, source, deadline, stage: Stage::Hello });
                }
                Ok(None) => break,
                Err(e) => {
                    log::error!("{}: cannot accept a connection: {e}", self.name);
                    return false;
                }
            }
        }
        true
    }

    /// Reads from all unauthenticated connections.
    fn read_all(&mut self) {
        let now = Instant::now();
        let all = self.half_open.iter().map(|half| (half.source, !matches!(half.stage, Stage::Hello)));
        let excess = half_open::excess(all, H::MOST);
        for (i, mut half) in std::mem::take(&mut self.half_open).into_iter().enumerate() {
            let reason = match self.read(&mut half) {
                Ok(Some((hello, attached))) => match self.handler.admit(&hello, half.incoming, &attached) {
                    Ok(()) => continue,
                    Err((reason, conn)) => {
                        self.reject(conn, (reason, true));
                        continue;
                    }
                },
                Ok(None) if excess.contains(&i) => ("too many unauthenticated connections".to_owned(), false),
                Ok(None) if now >= half.deadline => ("the handshake timed out".to_owned(), false),
                Ok(None) => {
                    self.half_open.push(half);
                    continue;
                }
                Err(reason) => reason,
            };
            self.reject(half.incoming.conn, reason);
        }
    }

    /// Reads what is there of a connection: its hello and its attachment, once it has proven itself.
    fn read(&self, half: &mut HalfOpen) -> Result<Option<(Hello, Vec<u8>)>, Rejection> {
        let conn = &mut half.incoming.conn;
        let silent = |e: String| (e, false);
        loop {
            half.stage = match half.stage {
                Stage::Hello => {
                    let mut bytes = [0; Hello::BYTES];
                    if !conn.read(&mut bytes).map_err(silent)? {
                        return Ok(None);
                    }
                    let hello = Hello::parse(&bytes).map_err(|reason| match reason {
                        Some(reason) => (reason, true),
                        None => ("it does not speak our protocol".to_owned(), false),
                    })?;
                    let encrypts = due_of(&mut **conn).is_some() && !self.handler.is_plain(&hello);
                    match (hello.is_sealed(), encrypts) {
                        (true, true) => Stage::Seal(hello),
                        (false, false) => {
                            let secret = self.handler.secret(&hello).map_err(|reason| (reason, true))?;
                            let challenge = Challenge::to(&hello, &secret, &[]).map_err(|e| silent(e.to_string()))?;
                            conn.reply(&Reply::Prove(challenge, None)).map_err(silent)?;
                            Stage::Proof(hello, secret, challenge, None)
                        }
                        (theirs, ours) => return Err((seal::differs(ours, theirs), true)),
                    }
                }
                Stage::Seal(hello) => {
                    let mut message = [0; MESSAGE];
                    if !conn.read(&mut message).map_err(silent)? {
                        return Ok(None);
                    }
                    let secret = self.handler.secret(&hello).map_err(|reason| (reason, true))?;
                    let (keys, ours) =
                        seal::answer(&secret, bytemuck::bytes_of(&hello), &message).map_err(|reason| (reason, true))?;
                    let binding = keys.binding;
                    let challenge = Challenge::to(&hello, &secret, &binding).map_err(|e| silent(e.to_string()))?;
                    conn.reply(&Reply::Prove(challenge, Some(ours))).map_err(silent)?;
                    if let Some(socket) = due_of(&mut **conn) {
                        socket.seal(keys);
                    }
                    Stage::Proof(hello, secret, challenge, Some(binding))
                }
                Stage::Proof(hello, secret, challenge, binding) => {
                    let mut proof = [0; size_of::<Proof>()];
                    let late = |e| silent(format!("{e}, where its proof was expected"));
                    match conn.read(&mut proof).map_err(late)? {
                        false => return Ok(None),
                        true if challenge.is_met(&hello, &secret, binding.as_ref().map_or(&[], |b| b), &proof) => {
                            Stage::Attachment(hello)
                        }
                        true => return Err((WRONG_SECRET.to_owned(), true)),
                    }
                }
                Stage::Attachment(hello) => {
                    let mut bytes = vec![0; hello.attached()];
                    let all = bytes.is_empty() || conn.read(&mut bytes).map_err(silent)?;
                    return Ok(all.then_some((hello, bytes)));
                }
            };
        }
    }

    fn reject(&mut self, mut conn: Box<dyn Conn>, (reason, reply): Rejection) {
        self.rejections.note(format!("{}: {reason}", conn.address()));
        if reply {
            // It has gone, or receives it.
            let _ = conn.reply(&Reply::Stranger(reason));
        }
    }
}
