//! Connecting to a handle: a thread finds the paths, opens the streams and shakes hands.

use std::collections::HashMap;
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use super::Inner;
use super::door::{ACCEPTOR, DIALER};
use super::ends::{self, Sender};
use super::handle::Handle;
use super::link::{Link, Ways};
use super::ports::{self, Way};
use super::relay::{self, Stops};
use crate::bootstrap::interface;
use crate::error::{Error, Result};
use crate::secret;
use crate::threads::{Thread, lock};
use crate::transport::handshake::{Caller, Hello};
use crate::transport::stream::{Failure, enter, greet, hail};
use crate::transport::tcp::{describe, open};
use crate::transport::wait::Wait;
use crate::transport::{LinkOptions, Peer};

/// Longest time for sending a peer the error that no path leads to it.
const NEWS: Duration = Duration::from_secs(5);
/// Number of times that a broken handshake is tried again; the first pause before that is [`PAUSE`].
const HANDSHAKES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(25);
/// Time that the other paths may take to answer after the first one: a later one is dialed again, like a lost rail.
const GRACE: Duration = Duration::from_millis(250);
/// Time for which a path that did not answer is left out where another one does.
const SILENT: Duration = Duration::from_secs(10);
/// Longest time that a lost rail may take to answer.
const REDIAL: Duration = Duration::from_secs(2);

/// A connection that is being made.
#[derive(Debug)]
pub struct Connecting {
    state: Arc<State>,
    // Joined when this goes, and signalled to end before.
    _thread: Thread,
}

#[derive(Debug, Default)]
struct State {
    made: Mutex<Option<Result<Sender>>>,
    stop: AtomicBool,
}

impl Connecting {
    /// The connection, once it stands.
    ///
    /// # Errors
    /// [`Error::Connection`] with the ports of both ends when no path leads to the peer, or with the failure of each
    /// path.
    pub fn poll(&self) -> Result<Option<Sender>> {
        lock(&self.state.made).take().transpose()
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
    }
}

pub(super) fn start(inner: &Arc<Inner>, handle: Handle) -> Result<Connecting> {
    let state = Arc::new(State::default());
    let (ours, inner) = (state.clone(), inner.clone());
    let what = "a thread that connects".to_owned();
    let thread = Thread::start("connect", "tinynccl-dial".to_owned(), what, move || {
        let stopped = || ours.stop.load(Ordering::Acquire).then(|| Error::invalid("connect", "closed meanwhile"));
        let made = dial(&inner, &handle, &stopped);
        // The owner may have the last reference to what this holds, and joins this thread.
        drop(inner);
        *lock(&ours.made) = Some(made);
    })?;
    Ok(Connecting { state, _thread: thread })
}

/// Returns the name of a connection: its ends as text. `way`: the far one, and the relays between, if it has some.
pub(super) fn name(sockets: &[TcpStream], way: &[SocketAddr]) -> String {
    let ends = |s: &TcpStream| match (s.local_addr(), s.peer_addr()) {
        (Ok(ours), Ok(theirs)) => format!("{} and {}", describe(ours), describe(theirs)),
        _ => "closed".to_owned(),
    };
    let first = sockets.first();
    let count = sockets.len();
    match way.split_first() {
        None => format!("connection between {}, {count} streams", first.map_or(String::new(), ends)),
        Some((far, relays)) => {
            let ours = first.and_then(|s| s.local_addr().ok()).map_or(String::new(), describe);
            let through = relay::words(relays);
            format!("connection between {ours} and {}, {count} streams, through {through}", describe(*far))
        }
    }
}

fn failed(ours: &Inner, theirs: &Handle, detail: String) -> Error {
    let connection =
        format!("from ports {} to ports {}", ports::list(&ours.ports), ports::list_remote(&theirs.addresses));
    Error::Connection { op: "connect".to_owned(), connection, detail }
}

/// Returns the reason why no path leads to a peer, and what to do.
fn no_way(inner: &Inner) -> String {
    let relays = match inner.config.net_relay_port {
        0 => "relays are off (TINYNCCL_NET_RELAY_PORT is 0)".to_owned(),
        udp => format!(
            "no relay was found (UDP port {udp}, TINYNCCL_NET_RELAY_PORT; nodes that answered: {})",
            inner.relays.nodes.heard()
        ),
    };
    format!(
        "no two of them are in one subnet, the kernel has no route from one of ours, and {relays}: cable the nodes so that at most \
         3 others lie between two, each pair of neighbours with a subnet of its own, or set TINYNCCL_IFNAME to the interfaces \
         that lead to all"
    )
}

fn dial(inner: &Arc<Inner>, handle: &Handle, stopped: &(dyn Fn() -> Option<Error> + Sync)) -> Result<Sender> {
    let wait = Wait::new(DIALER, ACCEPTOR, inner.config.connect_timeout, stopped);
    let handle = &inner.relays.nodes.whole(handle, &wait)?;
    let direct = ports::ways(&inner.ports, &handle.addresses, handle.host == inner.host);
    let mut ways = direct.clone();
    let mut opened: Vec<(TcpStream, Way)> = Vec::new();
    // Paths that are to be taken when they are back.
    let mut down: Vec<Way> = Vec::new();
    for round in 0u32.. {
        let mut did = Vec::new();
        down.clear();
        if direct.is_empty() {
            ways = inner.relays.nodes.ways(handle, &wait)?;
            match stopped() {
                Some(e) => return Err(e),
                None if ways.is_empty() => {
                    let error = failed(inner, handle, no_way(inner));
                    tell(inner, handle, &error, stopped);
                    return Err(error);
                }
                None => {}
            }
        }
        let up = if ways.len() > 1 { interface::up() } else { None };
        let mut there: Vec<&Way> = Vec::new();
        for way in &ways {
            if up.as_ref().zip(way.from).is_some_and(|(up, from)| !up.contains(&from)) {
                did.push(format!("{way}: its interface is down"));
                down.push(way.clone());
                continue;
            }
            there.push(way);
        }
        // A path that did not answer a moment ago holds up no other connection.
        let (silent, there): (Vec<&Way>, Vec<&Way>) = there.into_iter().partition(|way| inner.silent.is(way));
        for some in [there, silent] {
            if !opened.is_empty() {
                down.extend(some.into_iter().cloned());
                continue;
            }
            for (way, made) in some.iter().zip(open_all(inner, handle, &some, &wait, stopped)) {
                match made {
                    Ok(socket) => opened.push((socket, (*way).clone())),
                    Err(Failure::Final(e)) => return Err(failed(inner, handle, e.to_string())),
                    Err(failure) => {
                        // Cut further away, perhaps.
                        if let Failure::Slow(_) = failure {
                            inner.silent.note(way);
                            down.push((*way).clone());
                        }
                        did.push(format!("{way}: {}", failure.text()));
                    }
                }
            }
        }
        let did = did.join("; ");
        match (opened.is_empty(), did.is_empty()) {
            (false, true) => break,
            (false, false) => {
                log::warn!("net: {} of {} ways to a peer do not work: {did}", ways.len() - opened.len(), ways.len());
                break;
            }
            (true, _) if wait.left().is_zero() => {
                let error = failed(inner, handle, did);
                tell(inner, handle, &error, stopped);
                return Err(error);
            }
            // The deadline is checked above, with the failure of each path.
            (true, _) => {
                inner.relays.nodes.forget();
                match wait.pause(PAUSE * (1 << round.min(5)), String::new) {
                    Err(e) if stopped().is_some() => return Err(e),
                    Ok(()) | Err(_) => {}
                }
            }
        }
    }
    let working: Vec<Way> = opened.iter().map(|(_, way)| way.clone()).collect();
    let all: Vec<Way> = working.iter().cloned().chain(down).collect();
    let reason = |f: Failure| failed(inner, handle, f.text());
    let link = u32::from_le_bytes(secret::random()?);
    let relayed = working.iter().any(|way| !way.relays.is_empty());
    let begun = working.len();
    let streams = begun.max(inner.config.net_streams).min(crate::config::MAX_STREAMS);
    let several = all.len() > 1;
    let redial = Redial::new(handle.clone(), link, all, begun, streams);
    let mut opened = opened.into_iter().map(|(socket, _)| socket);
    let mut sockets: Vec<TcpStream> = Vec::with_capacity(streams);
    for (stream, way) in working.iter().cycle().take(streams).enumerate() {
        // Before the next one is opened: the acceptor waits only `door::HANDSHAKE` for a proof.
        sockets.push(redial.first(inner, (opened.next(), way), stream, &wait).map_err(reason)?);
    }
    let mut way: Vec<SocketAddr> = Vec::new();
    for one in working.iter().filter(|_| relayed) {
        let doors = [handle.door(one.to)];
        relay::note(&mut way, doors.iter().chain(&one.relays));
    }
    let name = name(&sockets, &way);
    let words: Vec<String> = working.iter().map(ToString::to_string).collect();
    log::info!("made {name}, over {}", words.join(" and "));
    let ways = Ways { several, relayed };
    let sender = ends::sender(name, (sockets, ways), inner)?;
    if ways.several {
        inner.rails.watch(inner, &sender.link, Some(redial))?;
    }
    Ok(sender)
}

/// Data by which a connection was made, and by which its lost streams are made again.
#[derive(Debug)]
pub(super) struct Redial {
    handle: Handle,
    pub(super) link: u32,
    /// All paths, first those that worked.
    pub(super) ways: Vec<Way>,
    begun: usize,
    streams: usize,
    /// Stream positions of the link: those of the first streams, and those that others have had since.
    places: Mutex<Vec<Place>>,
}

/// A position among the streams of a link, which only streams of one path have.
#[derive(Debug)]
struct Place {
    way: usize,
    /// The number of the next stream there. No number is used again once the peer has our proof: it may have accepted
    /// the stream that failed here.
    next: usize,
}

impl Redial {
    /// Returns the number of streams that a path had at first, or would have had.
    pub(super) fn streams_of(&self, way: usize) -> usize {
        let ways = self.begun.max(1);
        self.streams / ways + usize::from(way % ways < self.streams % ways)
    }

    pub(super) fn new(handle: Handle, link: u32, ways: Vec<Way>, begun: usize, streams: usize) -> Redial {
        Redial { handle, link, ways, begun, streams, places: Mutex::default() }
    }

    /// Returns the number of the path of a stream of the link.
    pub(super) fn way_of(&self, link: &Link, stream: usize) -> usize {
        self.places(link).get(stream % link.places().max(1)).map_or(usize::MAX, |place| place.way)
    }

    /// Returns the link's stream positions up to the last one that was taken.
    fn places(&self, link: &Link) -> MutexGuard<'_, Vec<Place>> {
        let mut places = lock(&self.places);
        for place in places.len()..self.streams {
            places.push(Place { way: place % self.begun.max(1), next: place + link.places() });
        }
        places
    }

    /// Returns a number for a stream on a path: in a position that such a one has had, or in a new one. `None` if there
    /// is none.
    fn number(&self, link: &Link, way: usize) -> Option<usize> {
        let places = self.places(link);
        let free = |place: &&Place| place.way == way && link.is_free(place.next);
        let again = places.iter().find(free).map(|place| place.next);
        again.or_else(|| Some(places.len()).filter(|new| *new < link.places()))
    }

    /// Marks `number` as used.
    fn take(&self, link: &Link, way: usize, number: usize) {
        let mut places = self.places(link);
        let next = number + link.places();
        match places.get_mut(number % link.places().max(1)) {
            Some(place) => place.next = next,
            None => places.push(Place { way, next }),
        }
    }

    /// Opens a socket for one more stream on the path of this number.
    pub(super) fn open(&self, inner: &Inner, number: usize, stopped: &dyn Fn() -> bool) -> Result<TcpStream, String> {
        let stopped = || stopped().then(|| Error::invalid("connect", "closed meanwhile"));
        let wait = Wait::new(DIALER, ACCEPTOR, REDIAL, &stopped);
        let way = self.ways.get(number).ok_or("no such way")?;
        attempt(inner, &self.handle, way, &wait).map_err(Failure::text)
    }

    /// Makes the stream on path `number` over `socket`, and returns the stream's number.
    pub(super) fn join(
        &self,
        inner: &Inner,
        link: &Arc<Link>,
        (number, mut socket): (usize, TcpStream),
        stopped: &dyn Fn() -> bool,
    ) -> Result<usize, String> {
        let stopped = || stopped().then(|| Error::invalid("connect", "closed meanwhile"));
        let wait = Wait::new(DIALER, ACCEPTOR, REDIAL, &stopped);
        let way = self.ways.get(number).ok_or("no such way")?;
        // One thread does this.
        let index = self.number(link, number).ok_or("the peer has not left its lost streams yet")?;
        let taken = || self.take(link, number, index);
        self.greet(inner, &mut socket, (index, way), &wait, taken).map_err(Failure::text)?;
        let added = link.add(index, socket, &inner.workers);
        added.then_some(index).ok_or_else(|| format!("there is no room for a stream {index}"))
    }

    /// Makes a stream of a new connection, over `opened` if there is one. A handshake that breaks is tried again, as
    /// the acceptor may have had too many.
    fn first(
        &self,
        inner: &Inner,
        (mut opened, way): (Option<TcpStream>, &Way),
        stream: usize,
        wait: &Wait<'_>,
    ) -> std::result::Result<TcpStream, Failure> {
        let mut again = 0;
        loop {
            let mut shake = || {
                let mut socket = opened.take().map_or_else(|| attempt(inner, &self.handle, way, wait), Ok)?;
                self.greet(inner, &mut socket, (stream, way), wait, || ()).map(|()| socket)
            };
            match shake() {
                Err(Failure::Wrong(text) | Failure::Slow(text)) if again < HANDSHAKES && !wait.left().is_zero() => {
                    log::debug!("net: stream {stream} over {way}: {text}; once more");
                    wait.pause(PAUSE * (1 << again), String::new)?;
                    again += 1;
                }
                done => return done,
            }
        }
    }

    /// Shakes hands for a stream, and sends the path that it took. From `taken` on its number may be in use at the
    /// peer's.
    fn greet(
        &self,
        inner: &Inner,
        socket: &mut TcpStream,
        (stream, way): (usize, &Way),
        wait: &Wait<'_>,
        taken: impl FnOnce(),
    ) -> std::result::Result<(), Failure> {
        let hello = hello(inner, &self.handle, self.link, self.streams, self.ways.len()).of_stream(stream);
        let hello = hello.on_the_way(DIALER + way.relays.len(), ACCEPTOR);
        let address = socket.peer_addr().map_or(String::new(), describe);
        let who = Peer { rank: DIALER, peer: ACCEPTOR, address };
        let proof = hail(socket, &Caller { hello, secret: self.handle.key() }, wait)?;
        taken();
        enter(socket, &proof, wait, &who)?;
        if way.relays.is_empty() {
            return Ok(());
        }
        let slow = |e: std::io::Error| Failure::Slow(e.to_string());
        let stops: Vec<SocketAddr> = [socket.local_addr().map_err(slow)?].iter().chain(&way.relays).copied().collect();
        socket.write_all(bytemuck::bytes_of(&Stops::new(&stops))).map_err(slow)
    }
}

fn hello(inner: &Inner, handle: &Handle, link: u32, streams: usize, rails: usize) -> Hello {
    // The value that both ends must have alike stands where links have the length of a message, the rails where they
    // have a depth.
    let options = LinkOptions { max_message: inner.config.net_window, depth: rails };
    Hello::new((DIALER, ACCEPTOR), (handle.listener, link), &options, false, streams)
}

fn attempt(inner: &Inner, handle: &Handle, way: &Way, wait: &Wait<'_>) -> Result<TcpStream, Failure> {
    if way.relays.is_empty() {
        return open(way.from, handle.door(way.to), &inner.sockets, wait);
    }
    relay::through(inner, &relay::doors(&way.relays, handle, way.to), wait)
}

/// Opens all paths at once. Those that do not answer have [`GRACE`] longer than the first one that does.
fn open_all(
    inner: &Inner,
    handle: &Handle,
    ways: &[&Way],
    wait: &Wait<'_>,
    stopped: &(dyn Fn() -> Option<Error> + Sync),
) -> Vec<Result<TcpStream, Failure>> {
    let (limit, first) = (wait.left(), OnceLock::new());
    let is_late = || first.get().is_some_and(|at: &Instant| at.elapsed() >= GRACE);
    let open = |way: &Way| {
        let late = || is_late().then(|| Error::invalid("connect", "another way has answered"));
        let over = || stopped().or_else(late);
        let made = match attempt(inner, handle, way, &Wait::new(DIALER, ACCEPTOR, limit, &over)) {
            Err(Failure::Final(_)) if stopped().is_none() && is_late() => {
                Err(Failure::Slow(format!("no answer within {GRACE:?} of the first way that did answer")))
            }
            made => made,
        };
        if made.is_ok() {
            let _ = first.set(Instant::now());
        }
        made
    };
    let [.., last] = ways else { return Vec::new() };
    std::thread::scope(|scope| {
        let start = |way: &'_ Way| {
            let way = way.clone();
            let name = "tinynccl-way".to_owned();
            std::thread::Builder::new().name(name).spawn_scoped(scope, move || open(&way))
        };
        // The last one in this thread.
        let others: Vec<_> = ways.iter().take(ways.len() - 1).map(|way| (way, start(way))).collect();
        let last = open(last);
        let join = |(way, thread): (&&Way, std::io::Result<ScopedJoinHandle<'_, _>>)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(Failure::Slow("its thread panicked".to_owned()))),
            // No threads are left.
            Err(_) => open(way),
        };
        others.into_iter().map(join).chain([last]).collect()
    })
}

/// Paths that have not answered lately, of all connections.
#[derive(Debug, Default)]
pub(super) struct Silent(Mutex<HashMap<Way, Instant>>);

impl Silent {
    fn is(&self, way: &Way) -> bool {
        let mut all = lock(&self.0);
        all.retain(|_, at| at.elapsed() < SILENT);
        all.contains_key(way)
    }

    fn note(&self, way: &Way) {
        lock(&self.0).insert(way.clone(), Instant::now());
    }
}

/// Sends the listener the error that there will be no connection, over any path, also one that is not for data.
fn tell(inner: &Inner, handle: &Handle, error: &Error, stopped: &dyn Fn() -> Option<Error>) {
    let wait = Wait::new(DIALER, ACCEPTOR, NEWS, stopped);
    for way in ports::for_news(&handle.addresses).into_iter().chain(ports::for_news(&handle.others)) {
        let Ok(mut socket) = attempt(inner, handle, &way, &wait) else { continue };
        let who = Peer { rank: DIALER, peer: ACCEPTOR, address: way.to.to_string() };
        let caller = Caller { hello: hello(inner, handle, 0, 0, 0), secret: handle.key() };
        if greet(&mut socket, &caller, &wait, &who).is_ok() && socket.write_all(error.to_string().as_bytes()).is_ok() {
            let _ = socket.shutdown(Shutdown::Write);
            return;
        }
    }
    log::debug!("net: the peer could not be told: {error}");
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::net::tests::{Ends, net, until};

    #[test]
    fn a_peer_that_does_not_answer_costs_no_number() {
        let net = net(|_| ());
        let ends = Ends::new();
        let link = &ends.out.link;
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let (handle, _listener) = net.listen().unwrap();
        let ports = (door.local_addr().unwrap().port(), 0);
        let to = Ipv4Addr::LOCALHOST.into();
        let ways = vec![Way { from: None, to, why: "loopback".to_owned(), relays: Vec::new() }];
        let handle = Handle { ports, ..handle };
        let redial = Redial::new(handle, 1, ways, 1, 4);
        for _ in 0..100 {
            let socket = redial.open(&net.inner, 0, &|| false).unwrap();
            drop(door.accept().unwrap());
            assert!(redial.join(&net.inner, link, (0, socket), &|| false).is_err());
        }
        assert_eq!(redial.number(link, 0), Some(4), "the next one is still free");
        redial.take(link, 0, 4);
        assert_eq!(redial.number(link, 0), Some(4 + link.places()), "that one is not free any more");
        // Once both ends have left a stream its position is free again, for its path alone.
        link.lose(1, "a test loses it".to_owned());
        until("both ends to leave it", || link.is_free(1 + link.places()).then_some(()));
        assert_eq!((redial.number(link, 0), redial.number(link, 1)), (Some(1 + link.places()), Some(5)));
    }
}
