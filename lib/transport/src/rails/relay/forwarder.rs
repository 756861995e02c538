//! The thread of a relay: moves the bytes of all streams that pass through this process.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use socket2::SockRef;

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::threads::{Thread, lock};

/// Bytes that are moved at once, and that one direction of a stream holds at most.
const BUFFER: usize = 256 << 10;
/// Buffers of one stream in its time slice, before the others have theirs.
const TURN: usize = 8;
/// Time for which the thread polls before it sleeps: the next bytes are often close. It yields its core meanwhile.
const YIELD: Duration = Duration::from_micros(30);
const BELL: u64 = 0;

/// State shared with the relay thread.
#[derive(Debug)]
struct State {
    bell: Arc<Doorbell>,
    new: Mutex<Vec<RelayedStream>>,
    streams: AtomicUsize,
    shutting_down: AtomicBool,
}

/// A relay's thread. Dropping it waits until no stream needs it any more.
#[derive(Debug)]
pub(super) struct Forwarder {
    state: Arc<State>,
    thread: Thread,
}

impl Forwarder {
    /// Starts the thread. When it is dropped, `patience` is how long it waits while nothing passes.
    pub(super) fn start(patience: Duration) -> Result<Forwarder> {
        let state = Arc::new(State {
            bell: Doorbell::new()?,
            new: Mutex::default(),
            streams: AtomicUsize::new(0),
            shutting_down: AtomicBool::new(false),
        });
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::errno("net", "making an epoll", e))?;
        epoll::add(&epoll, &state.bell, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)
            .map_err(|e| Error::errno("net", "waiting for an eventfd", e))?;
        let run = Run {
            state: state.clone(),
            epoll,
            patience,
            relayed: HashMap::new(),
            next_key: BELL,
            again: Vec::new(),
            buffer: vec![0; BUFFER].into_boxed_slice(),
        };
        let what = "the thread that relays".to_owned();
        let thread = Thread::start("net", "tinynccl-relay".to_owned(), what, move || run.run())?;
        Ok(Forwarder { state, thread })
    }

    /// Relays between two connections from now on; `name` is for the log.
    pub(super) fn add(&self, name: String, near: TcpStream, far: TcpStream) {
        self.state.streams.fetch_add(1, Ordering::Relaxed);
        let sockets = [near, far].map(Kept::new);
        lock(&self.state.new).push(RelayedStream { name, sockets, flows: [Flow::default(), Flow::default()] });
        self.state.bell.ring();
    }

    /// Returns the number of streams that are being relayed.
    pub(super) fn streams(&self) -> usize {
        self.state.streams.load(Ordering::Relaxed)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.state.shutting_down.store(true, Ordering::Release);
        self.state.bell.ring();
        self.thread.join();
    }
}

/// A direction of a stream.
#[derive(Debug, Default)]
struct Flow {
    /// Bytes that have come and not been sent on; they begin at `start`.
    held: Vec<u8>,
    start: usize,
    /// True once the end has come; `over`: once it has been passed on.
    ended: bool,
    over: bool,
}

/// Work that is left in a direction after its time slice.
#[derive(PartialEq, Eq)]
enum Remaining {
    Nothing,
    More,
}

impl Flow {
    /// Moves what can be moved; adds to `moved`.
    fn advance(
        &mut self,
        mut from: &TcpStream,
        mut to: &TcpStream,
        buffer: &mut [u8],
        moved: &mut usize,
    ) -> std::io::Result<Remaining> {
        for _ in 0..TURN {
            while let Some(rest) = self.held.get(self.start..).filter(|rest| !rest.is_empty()) {
                match write(&mut to, rest)? {
                    0 => return Ok(Remaining::Nothing),
                    n => self.start += n,
                }
            }
            if self.start > 0 {
                // Streams that wait for nothing hold nothing.
                (self.held, self.start) = (Vec::new(), 0);
            }
            if self.ended {
                if !self.over {
                    self.over = true;
                    to.shutdown(Shutdown::Write)?;
                }
                return Ok(Remaining::Nothing);
            }
            match from.read(buffer) {
                Ok(0) => self.ended = true,
                Ok(n) => {
                    *moved += n;
                    let mut bytes = buffer.get(..n).unwrap_or_default();
                    while !bytes.is_empty() {
                        match write(&mut to, bytes)? {
                            0 => {
                                self.held = bytes.to_vec();
                                return Ok(Remaining::Nothing);
                            }
                            n => bytes = bytes.get(n..).unwrap_or_default(),
                        }
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Remaining::Nothing),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(Remaining::More)
    }
}

/// Writes bytes, and returns how many went out; 0 when there is no room.
fn write(to: &mut &TcpStream, bytes: &[u8]) -> std::io::Result<usize> {
    loop {
        match to.write(bytes) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(0),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// A stream between two other nodes: its two connections.
#[derive(Debug)]
struct RelayedStream {
    name: String,
    sockets: [Kept<TcpStream>; 2],
    /// The directions: from the first socket to the second, and back.
    flows: [Flow; 2],
}

impl RelayedStream {
    fn advance(&mut self, buffer: &mut [u8], moved: &mut usize) -> std::io::Result<Remaining> {
        let [near, far] = &self.sockets;
        let [there, back] = &mut self.flows;
        let more = [there.advance(near, far, buffer, moved)?, back.advance(far, near, buffer, moved)?];
        Ok(if more.contains(&Remaining::More) { Remaining::More } else { Remaining::Nothing })
    }

    fn is_over(&self) -> bool {
        self.flows.iter().all(|flow| flow.over)
    }

    /// Has both ends see an error, not an end, when the sockets are closed.
    fn reset(&self) {
        for socket in &self.sockets {
            // It is closed in any case.
            let _ = SockRef::from(&**socket).set_linger(Some(Duration::ZERO));
        }
    }
}

struct Run {
    state: Arc<State>,
    epoll: OwnedFd,
    patience: Duration,
    relayed: HashMap<u64, RelayedStream>,
    next_key: u64,
    /// Streams whose time slice was over before they were done.
    again: Vec<u64>,
    buffer: Box<[u8]>,
}

impl Run {
    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        let mut active = Instant::now();
        loop {
            // Looked at first: what was added before is taken.
            let shutting_down = self.state.shutting_down.load(Ordering::Acquire);
            self.take_new();
            if shutting_down && (self.relayed.is_empty() || active.elapsed() >= self.patience) {
                break;
            }
            let idle = active.elapsed();
            let time = match (self.again.is_empty() && idle >= YIELD, shutting_down) {
                (false, _) => Duration::ZERO,
                (true, true) => self.patience.saturating_sub(idle),
                (true, false) => Duration::from_secs(3600),
            };
            events.clear();
            let time = Timespec { tv_sec: time.as_secs().min(3600) as i64, tv_nsec: i64::from(time.subsec_nanos()) };
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&time)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => {
                    log::error!("net: the relay's epoll: {}", std::io::Error::from(e));
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            let mut moved = 0;
            for key in std::mem::take(&mut self.again) {
                self.advance(key, &mut moved);
            }
            for event in &events {
                match event.data.u64() {
                    BELL => self.state.bell.drain(),
                    key => self.advance(key, &mut moved),
                }
            }
            if moved > 0 {
                active = Instant::now();
            } else if idle < YIELD {
                std::thread::yield_now();
            }
        }
        if !self.relayed.is_empty() {
            log::warn!("net: {} relayed streams end, since this process ends", self.relayed.len());
            self.relayed.values().for_each(RelayedStream::reset);
        }
    }

    fn take_new(&mut self) {
        let new = std::mem::take(&mut *lock(&self.state.new));
        for stream in new {
            self.next_key += 1;
            let flags =
                epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
            let add = |socket| epoll::add(&self.epoll, socket, epoll::EventData::new_u64(self.next_key), flags);
            let [near, far] = &stream.sockets;
            if let Err(e) = add(near).and_then(|()| add(far)) {
                log::error!("net: cannot relay {}: {}", stream.name, std::io::Error::from(e));
                stream.reset();
                self.state.streams.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            // What was there before makes no event.
            self.again.push(self.next_key);
            self.relayed.insert(self.next_key, stream);
        }
    }

    fn advance(&mut self, key: u64, moved: &mut usize) {
        let Some(stream) = self.relayed.get_mut(&key) else { return };
        let over = match stream.advance(&mut self.buffer, moved) {
            Ok(Remaining::More) => {
                self.again.push(key);
                false
            }
            Ok(Remaining::Nothing) => stream.is_over(),
            Err(e) => {
                log::info!("net: relays {} no more: {e}", stream.name);
                stream.reset();
                true
            }
        };
        if over {
            self.relayed.remove(&key);
            self.state.streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
