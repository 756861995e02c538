//! Connecting to a handle: a thread finds the paths, opens the streams and shakes hands.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use crate::bootstrap::interface;
use crate::handshake::Caller;
use crate::rails::address::handle::Handle;
use crate::rails::address::ports::{self, Route};
use crate::rails::connect::Context;
use crate::rails::connect::hello::{FailureReport, StreamHello};
use crate::rails::connect::redial::Redialer;
use crate::rails::connection::Connection;
use crate::rails::connection::ends::{self, Sender};
use crate::rails::data::session::Paths;
use crate::rails::relay::{self, SourceRoute};
use crate::seal::Socket;
use crate::stream::{Failure, enter, greet, hail};
use crate::tcp::{describe, open};
use crate::wait::Wait;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::secret;
use tinynccl_sys::threads::{Thread, lock};

/// Longest time for sending a peer the error that no path leads to it.
const NOTIFY_LIMIT: Duration = Duration::from_secs(5);
/// Number of times that a broken handshake is tried again; the first pause before that is [`PAUSE`].
const HANDSHAKES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(25);
/// Time that the other paths may take to answer after the first one: a later one is dialed again, like a lost rail.
const GRACE: Duration = Duration::from_millis(250);
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
    /// The connection, once it is established.
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

pub(in crate::rails) fn start(inner: &Arc<Context>, redialer: &Arc<Redialer>, handle: Handle) -> Result<Connecting> {
    let state = Arc::new(State::default());
    let (ours, inner, redialer) = (state.clone(), inner.clone(), redialer.clone());
    let what = "a thread that connects".to_owned();
    let thread = Thread::start("connect", "tinynccl-dial".to_owned(), what, move || {
        let stopped = || ours.stop.load(Ordering::Acquire).then(|| Error::invalid("connect", "closed meanwhile"));
        let made = dial(&inner, &redialer, &handle, &stopped);
        // The owner may have the last reference to what this holds, and joins this thread.
        drop((inner, redialer));
        *lock(&ours.made) = Some(made);
    })?;
    Ok(Connecting { state, _thread: thread })
}

/// Returns the name of a connection: its ends as text. `route`: the far one, and the relays between, if it has some.
pub(in crate::rails) fn name(sockets: &[Socket], route: &[SocketAddr]) -> String {
    let ends = |s: &Socket| match (s.tcp().local_addr(), s.tcp().peer_addr()) {
        (Ok(ours), Ok(theirs)) => format!("{} and {}", describe(ours), describe(theirs)),
        _ => "closed".to_owned(),
    };
    let first = sockets.first();
    let count = sockets.len();
    match route.split_first() {
        None => format!("connection between {}, {count} streams", first.map_or(String::new(), ends)),
        Some((far, relays)) => {
            let ours = first.and_then(|s| s.tcp().local_addr().ok()).map_or(String::new(), describe);
            let through = relay::relays_text(relays);
            format!("connection between {ours} and {}, {count} streams, through {through}", describe(*far))
        }
    }
}

fn failed(ours: &Context, theirs: &Handle, detail: String) -> Error {
    let connection =
        format!("from ports {} to ports {}", ports::list(&ours.ports), ports::list_remote(&theirs.addresses));
    Error::Connection { op: "connect".to_owned(), connection, detail }
}

/// Returns the reason why no path leads to a peer, and what to do.
fn no_route(inner: &Context) -> String {
    let relays = match inner.config.net_relay_port {
        0 => "relays are off (TINYNCCL_NET_RELAY_PORT is 0)".to_owned(),
        udp => format!(
            "no relay was found (UDP port {udp}, TINYNCCL_NET_RELAY_PORT; nodes that answered: {})",
            inner.relays.nodes.known_text()
        ),
    };
    format!(
        "no two of them are in one subnet, the kernel has no route from one of ours, and {relays}: connect the nodes so that at most \
         3 others lie between two, each pair of neighbours with a subnet of its own, or set TINYNCCL_IFNAME to the interfaces \
         that lead to all"
    )
}

fn dial(
    inner: &Arc<Context>,
    redialer: &Redialer,
    handle: &Handle,
    stopped: &(dyn Fn() -> Option<Error> + Sync),
) -> Result<Sender> {
    let wait = Wait::without_ranks(inner.config.connect_timeout, stopped);
    let handle = &inner.relays.nodes.complete(handle, &wait)?;
    let direct = ports::routes(&inner.ports, &handle.addresses, handle.host == inner.host);
    let mut routes = direct.clone();
    let mut opened: Vec<(Socket, Route)> = Vec::new();
    // Paths that are to be taken when they are back.
    let mut down: Vec<Route> = Vec::new();
    for round in 0u32.. {
        let mut failures = Vec::new();
        down.clear();
        if direct.is_empty() {
            routes = inner.relays.nodes.routes(handle, &wait)?;
            match stopped() {
                Some(e) => return Err(e),
                None if routes.is_empty() => {
                    let error = failed(inner, handle, no_route(inner));
                    notify_peer(inner, handle, &error, stopped);
                    return Err(error);
                }
                None => {}
            }
        }
        let up = if routes.len() > 1 { interface::up() } else { None };
        let mut there: Vec<&Route> = Vec::new();
        for route in &routes {
            if up.as_ref().zip(route.from).is_some_and(|(up, from)| !up.contains(&from)) {
                failures.push(format!("{route}: its interface is down"));
                down.push(route.clone());
                continue;
            }
            there.push(route);
        }
        // A path that did not answer a moment ago holds up no other connection.
        let (silent, there): (Vec<&Route>, Vec<&Route>) =
            there.into_iter().partition(|route| inner.unresponsive.is(route));
        for some in [there, silent] {
            if !opened.is_empty() {
                down.extend(some.into_iter().cloned());
                continue;
            }
            for (route, made) in some.iter().zip(open_all(inner, handle, &some, &wait, stopped)) {
                match made {
                    Ok(socket) => opened.push((socket, (*route).clone())),
                    Err(Failure::Final(e)) => return Err(failed(inner, handle, e.to_string())),
                    Err(failure) => {
                        // Cut further away, perhaps.
                        if let Failure::Slow(_) = failure {
                            inner.unresponsive.note(route);
                            down.push((*route).clone());
                        }
                        failures.push(format!("{route}: {}", failure.text()));
                    }
                }
            }
        }
        let failures = failures.join("; ");
        match (opened.is_empty(), failures.is_empty()) {
            (false, true) => break,
            (false, false) => {
                log::warn!(
                    "net: {} of {} routes to a peer failed: {failures}",
                    routes.len() - opened.len(),
                    routes.len()
                );
                break;
            }
            (true, _) if wait.left().is_zero() => {
                let error = failed(inner, handle, failures);
                notify_peer(inner, handle, &error, stopped);
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
    let working: Vec<Route> = opened.iter().map(|(_, route)| route.clone()).collect();
    let all: Vec<Route> = working.iter().cloned().chain(down).collect();
    let reason = |f: Failure| failed(inner, handle, f.text());
    let connection = u32::from_le_bytes(secret::random()?);
    let relayed = working.iter().any(|route| !route.relays.is_empty());
    let begun = working.len();
    let streams = begun.max(inner.config.net_streams).min(tinynccl_sys::config::MAX_STREAMS);
    let several = all.len() > 1;
    let redial = Redial::new(handle.clone(), connection, all, begun, streams);
    let mut opened = opened.into_iter().map(|(socket, _)| socket);
    let mut sockets: Vec<Socket> = Vec::with_capacity(streams);
    for (stream, route) in working.iter().cycle().take(streams).enumerate() {
        // Before the next one is opened: the acceptor waits a few seconds only for a proof.
        sockets.push(redial.first(inner, (opened.next(), route), stream, &wait).map_err(reason)?);
    }
    let mut route: Vec<SocketAddr> = Vec::new();
    for one in working.iter().filter(|_| relayed) {
        let acceptors = [handle.acceptor_at(one.to)];
        relay::add_route(&mut route, acceptors.iter().chain(&one.relays));
    }
    let name = name(&sockets, &route);
    let names: Vec<String> = working.iter().map(ToString::to_string).collect();
    log::info!("made {name}, over {}", names.join(" and "));
    let paths = Paths { several, relayed };
    let sender = ends::sender(name, (sockets, paths), &inner.resources())?;
    if paths.several {
        inner.monitor.watch(&inner.config, &sender.connection)?;
        redialer.watch(inner, &sender.connection, redial)?;
    }
    Ok(sender)
}

/// Data by which a connection was made, and by which its lost streams are made again.
#[derive(Debug)]
pub(in crate::rails) struct Redial {
    handle: Handle,
    pub(in crate::rails) connection: u32,
    /// All paths, first those that worked.
    pub(in crate::rails) routes: Vec<Route>,
    begun: usize,
    streams: usize,
    /// Stream positions of the connection: those of the first streams, and those that others have had since.
    positions: Mutex<Vec<Position>>,
}

/// A position among the streams of a connection, which only streams of one path have.
#[derive(Debug)]
struct Position {
    route: usize,
    /// The number of the next stream there. No number is used again once the peer has our proof: it may have accepted
    /// the stream that failed here.
    next: usize,
}

impl Redial {
    /// Returns the number of streams that a path had at first, or would have had.
    pub(in crate::rails) fn streams_of(&self, route: usize) -> usize {
        let routes = self.begun.max(1);
        self.streams / routes + usize::from(route % routes < self.streams % routes)
    }

    pub(in crate::rails) fn new(
        handle: Handle,
        connection: u32,
        routes: Vec<Route>,
        begun: usize,
        streams: usize,
    ) -> Redial {
        Redial { handle, connection, routes, begun, streams, positions: Mutex::default() }
    }

    /// Returns the number of the path of a stream of the connection.
    pub(in crate::rails) fn route_of(&self, connection: &Connection, stream: usize) -> usize {
        self.positions(connection)
            .get(stream % connection.positions().max(1))
            .map_or(usize::MAX, |position| position.route)
    }

    /// Returns the connection's stream positions up to the last one that was taken.
    fn positions(&self, connection: &Connection) -> MutexGuard<'_, Vec<Position>> {
        let mut positions = lock(&self.positions);
        for position in positions.len()..self.streams {
            positions.push(Position { route: position % self.begun.max(1), next: position + connection.positions() });
        }
        positions
    }

    /// Returns a number for a stream on a path: in a position that such a one has had, or in a new one. `None` if there
    /// is none.
    fn number(&self, connection: &Connection, route: usize) -> Option<usize> {
        let positions = self.positions(connection);
        let free = |position: &&Position| position.route == route && connection.is_free(position.next);
        let again = positions.iter().find(free).map(|position| position.next);
        again.or_else(|| Some(positions.len()).filter(|new| *new < connection.positions()))
    }

    /// Marks `number` as used.
    fn take(&self, connection: &Connection, route: usize, number: usize) {
        let mut positions = self.positions(connection);
        let next = number + connection.positions();
        match positions.get_mut(number % connection.positions().max(1)) {
            Some(position) => position.next = next,
            None => positions.push(Position { route, next }),
        }
    }

    /// Opens a socket for one more stream on the path of this number.
    pub(in crate::rails) fn open(
        &self,
        inner: &Context,
        number: usize,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Socket, String> {
        let stopped = || stopped().then(|| Error::invalid("connect", "closed meanwhile"));
        let wait = Wait::without_ranks(REDIAL, &stopped);
        let route = self.routes.get(number).ok_or("no such route")?;
        attempt(inner, &self.handle, route, &wait).map_err(Failure::text)
    }

    /// Makes the stream on path `number` over `socket`, and returns the stream's number.
    pub(in crate::rails) fn join(
        &self,
        inner: &Context,
        connection: &Arc<Connection>,
        (number, mut socket): (usize, Socket),
        stopped: &dyn Fn() -> bool,
    ) -> Result<usize, String> {
        let stopped = || stopped().then(|| Error::invalid("connect", "closed meanwhile"));
        let wait = Wait::without_ranks(REDIAL, &stopped);
        let route = self.routes.get(number).ok_or("no such route")?;
        // One thread does this.
        let index = self.number(connection, number).ok_or("the peer has not retired its lost streams yet")?;
        let taken = || self.take(connection, number, index);
        self.greet(inner, &mut socket, (index, route), &wait, taken).map_err(Failure::text)?;
        let added = connection.add(index, socket, &inner.workers);
        added.then_some(index).ok_or_else(|| format!("no free position for stream {index}"))
    }

    /// Makes a stream of a new connection, over `opened` if there is one. A handshake that breaks is tried again, as
    /// the acceptor may have had too many.
    fn first(
        &self,
        inner: &Context,
        (mut opened, route): (Option<Socket>, &Route),
        stream: usize,
        wait: &Wait<'_>,
    ) -> std::result::Result<Socket, Failure> {
        let mut again = 0;
        loop {
            let mut shake = || {
                let mut socket = opened.take().map_or_else(|| attempt(inner, &self.handle, route, wait), Ok)?;
                self.greet(inner, &mut socket, (stream, route), wait, || ()).map(|()| socket)
            };
            match shake() {
                Err(Failure::Wrong(text) | Failure::Slow(text)) if again < HANDSHAKES && !wait.left().is_zero() => {
                    log::debug!("net: stream {stream} over {route}: {text}; once more");
                    wait.pause(PAUSE * (1 << again), String::new)?;
                    again += 1;
                }
                done => return done,
            }
        }
    }

    /// Shakes hands for a stream, and sends the route that it took. From `taken` on its number may be in use at the
    /// peer's.
    fn greet(
        &self,
        inner: &Context,
        socket: &mut Socket,
        (stream, route): (usize, &Route),
        wait: &Wait<'_>,
        taken: impl FnOnce(),
    ) -> std::result::Result<(), Failure> {
        let hello = StreamHello {
            listener: self.handle.listener,
            connection: self.connection,
            stream: stream as u32,
            streams: self.streams as u32,
            routes: self.routes.len() as u32,
            window: inner.config.net_window as u32,
        };
        let ours = socket.tcp().local_addr().map_err(|e| Failure::Slow(e.to_string()))?;
        let hops: Vec<SocketAddr> = [ours].iter().chain(&route.relays).copied().collect();
        let hops = SourceRoute::new(&hops);
        let attached = if route.relays.is_empty() { &[][..] } else { bytemuck::bytes_of(&hops) };
        let caller = Caller::new(&hello, inner.key(&self.handle), attached);
        let proof = hail(socket, &caller, wait)?;
        taken();
        enter(socket, &proof, &caller, wait)
    }
}

fn attempt(inner: &Context, handle: &Handle, route: &Route, wait: &Wait<'_>) -> Result<Socket, Failure> {
    if route.relays.is_empty() {
        return open(route.from, handle.acceptor_at(route.to), &inner.sockets, wait);
    }
    relay::through(&inner.relays, &relay::acceptors(&route.relays, handle, route.to), wait)
}

/// Opens all paths at once. Those that do not answer have [`GRACE`] longer than the first one that does.
fn open_all(
    inner: &Context,
    handle: &Handle,
    routes: &[&Route],
    wait: &Wait<'_>,
    stopped: &(dyn Fn() -> Option<Error> + Sync),
) -> Vec<Result<Socket, Failure>> {
    let (limit, first) = (wait.left(), OnceLock::new());
    let is_late = || first.get().is_some_and(|at: &Instant| at.elapsed() >= GRACE);
    let open = |route: &Route| {
        let late = || is_late().then(|| Error::invalid("connect", "another route has answered"));
        let over = || stopped().or_else(late);
        let made = match attempt(inner, handle, route, &Wait::without_ranks(limit, &over)) {
            Err(Failure::Final(_)) if stopped().is_none() && is_late() => {
                Err(Failure::Slow(format!("no answer within {GRACE:?} of the first route that did answer")))
            }
            made => made,
        };
        if made.is_ok() {
            let _ = first.set(Instant::now());
        }
        made
    };
    let [.., last] = routes else { return Vec::new() };
    std::thread::scope(|scope| {
        let start = |route: &'_ Route| {
            let route = route.clone();
            let name = "tinynccl-route".to_owned();
            std::thread::Builder::new().name(name).spawn_scoped(scope, move || open(&route))
        };
        // The last one in this thread.
        let others: Vec<_> = routes.iter().take(routes.len() - 1).map(|route| (route, start(route))).collect();
        let last = open(last);
        let join = |(route, thread): (&&Route, std::io::Result<ScopedJoinHandle<'_, _>>)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(Failure::Slow("its thread panicked".to_owned()))),
            // No threads are left.
            Err(_) => open(route),
        };
        others.into_iter().map(join).chain([last]).collect()
    })
}

/// Sends the listener the error that there will be no connection, over any path, also one that is not for data.
fn notify_peer(inner: &Context, handle: &Handle, error: &Error, stopped: &dyn Fn() -> Option<Error>) {
    let wait = Wait::without_ranks(NOTIFY_LIMIT, stopped);
    let text = error.to_string();
    let caller = Caller::new(&FailureReport { listener: handle.listener }, inner.key(handle), text.as_bytes());
    for route in ports::for_error(&handle.addresses).into_iter().chain(ports::for_error(&handle.others)) {
        let Ok(mut socket) = attempt(inner, handle, &route, &wait) else { continue };
        if greet(&mut socket, &caller, &wait).is_ok() {
            return;
        }
    }
    log::debug!("net: the peer could not be notified: {error}");
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::rails::tests::{Ends, net, until};

    #[test]
    fn a_peer_that_does_not_answer_costs_no_number() {
        let net = net(|_| ());
        let ends = Ends::new();
        let connection = &ends.out.connection;
        let acceptor = TcpListener::bind("127.0.0.1:0").unwrap();
        let (handle, _listener) = net.listen().unwrap();
        let ports = (acceptor.local_addr().unwrap().port(), 0);
        let to = Ipv4Addr::LOCALHOST.into();
        let routes = vec![Route { from: None, to, why: "loopback".to_owned(), relays: Vec::new() }];
        let handle = Handle { ports, ..handle };
        let redial = Redial::new(handle, 1, routes, 1, 4);
        for _ in 0..100 {
            let socket = redial.open(&net.inner, 0, &|| false).unwrap();
            drop(acceptor.accept().unwrap());
            assert!(redial.join(&net.inner, connection, (0, socket), &|| false).is_err());
        }
        assert_eq!(redial.number(connection, 0), Some(4), "the next one is still free");
        redial.take(connection, 0, 4);
        assert_eq!(redial.number(connection, 0), Some(4 + connection.positions()), "that one is not free any more");
        // Once both ends have retired a stream its position is free again, for its path alone.
        connection.fail_stream(1, "a test loses it".to_owned());
        until("both ends to retire it", || connection.is_free(1 + connection.positions()).then_some(()));
        assert_eq!(
            (redial.number(connection, 0), redial.number(connection, 1)),
            (Some(1 + connection.positions()), Some(5))
        );
    }
}
