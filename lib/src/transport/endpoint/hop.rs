//! A relay's part in making a link between two other ranks: takes the hop from the lower end, makes the next one, joins
//! them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Hop, Inner};
use crate::error::{Error, Result};
use crate::threads::lock;
use crate::transport::EndpointInfo;
use crate::transport::accept::acceptor::Incoming;
use crate::transport::accept::conn::Conn;
use crate::transport::accept::handshake::Reply;
use crate::transport::accept::link::LinkHello;
use crate::transport::relay::{Forwarder, Junction, Path, Routes, Traffic};
use crate::transport::wait::Wait;

/// Links that may be in the making at once.
const SETUPS: usize = 1024;

/// Addresses of all ranks, and the routes between them.
#[derive(Debug)]
pub(super) struct World {
    pub(super) infos: Vec<EndpointInfo>,
    pub(super) routes: Routes,
}

/// State of an endpoint for links between other ranks.
#[derive(Debug)]
pub(super) struct Relay {
    world: Mutex<Option<Arc<World>>>,
    introduced: Condvar,
    /// One thread per link in the making: the next rank answers when it wants the link.
    setups: Mutex<Vec<JoinHandle<()>>>,
    /// Started with the first link.
    forwarder: Mutex<Option<Arc<Forwarder>>>,
    stopped: AtomicBool,
    limit: Duration,
}

impl Relay {
    /// `limit` is how long the ends wait for a link.
    pub(super) fn new(limit: Duration) -> Relay {
        Relay {
            world: Mutex::default(),
            introduced: Condvar::new(),
            setups: Mutex::default(),
            forwarder: Mutex::default(),
            stopped: AtomicBool::new(false),
            limit,
        }
    }

    pub(super) fn introduce(&self, world: World) {
        *lock(&self.world) = Some(Arc::new(world));
        self.introduced.notify_all();
    }

    pub(super) fn world(&self) -> Option<Arc<World>> {
        lock(&self.world).clone()
    }

    /// The lower end may know of all ranks before we do.
    fn await_world(&self, wait: &Wait<'_>) -> Result<Arc<World>> {
        let mut world = lock(&self.world);
        loop {
            if let Some(world) = &*world {
                return Ok(world.clone());
            }
            let slice = wait.slice(|| "this rank has not heard of the others yet".to_owned())?;
            world = self.introduced.wait_timeout(world, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn traffic(&self) -> Traffic {
        lock(&self.forwarder).as_ref().map(|forwarder| forwarder.traffic()).unwrap_or_default()
    }

    fn forwarder(&self, rank: usize) -> Result<Arc<Forwarder>> {
        let mut forwarder = lock(&self.forwarder);
        if let Some(running) = &*forwarder {
            return Ok(running.clone());
        }
        Ok(forwarder.insert(Arc::new(Forwarder::start(rank)?)).clone())
    }

    /// Ends what is in the making, then the links.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let setups = std::mem::take(&mut *lock(&self.setups));
        for setup in setups {
            if setup.join().is_err() {
                log::error!("a thread that makes a relayed link panicked");
            }
        }
        *lock(&self.forwarder) = None;
    }
}

/// Takes a connection for another rank. Called by the acceptor, so it does not block.
pub(super) fn take(endpoint: &Arc<Inner>, hello: LinkHello, mut incoming: Incoming) {
    let relay = &endpoint.relay;
    let mut setups = lock(&relay.setups);
    setups.retain(|setup| !setup.is_finished());
    let refusal = if relay.stopped.load(Ordering::Acquire) {
        Some("it is leaving".to_owned())
    } else if setups.len() >= SETUPS {
        Some(format!("{SETUPS} links are in the making"))
    } else {
        None
    };
    if let Some(why) = refusal {
        refuse(endpoint.rank, &mut *incoming.conn, &hello, &why);
        return;
    }
    let for_thread = endpoint.clone();
    let name = format!("tinynccl-hop-{}", endpoint.rank);
    match std::thread::Builder::new().name(name).spawn(move || make(&for_thread, &hello, incoming)) {
        Ok(setup) => setups.push(setup),
        // The connection is gone with the closure: the dialer comes again.
        Err(e) => log::warn!("rank {}: no thread for {hello:?}: {e}", endpoint.rank),
    }
}

fn refuse(rank: usize, conn: &mut dyn Conn, hello: &LinkHello, why: &str) {
    log::warn!("rank {rank}: does not relay {hello:?}: {why}");
    if let Err(e) = conn.reply(&Reply::Refused(format!("rank {rank} cannot relay: {why}"))) {
        log::debug!("rank {rank}: refusing rank {}: {e}", hello.from);
    }
}

/// Makes both hops and joins them, or sends the dialer the reason why not.
fn make(endpoint: &Arc<Inner>, hello: &LinkHello, mut incoming: Incoming) {
    let rank = endpoint.rank;
    let (next, path, forwarder) = match dial_on(endpoint, hello, &*incoming.conn) {
        Ok(made) => made,
        Err(e) => return refuse(rank, &mut *incoming.conn, hello, &e.to_string()),
    };
    let stopped = || endpoint.relay.stopped.load(Ordering::Acquire).then(|| aborted(rank, "it is leaving"));
    let wait = Wait::new(rank, hello.from as usize, endpoint.relay.limit, &stopped);
    let options = hello.options();
    let before =
        endpoint.accept(hello, incoming, (&options, hello.checksum()), forwarder.bell(), (hello.from as usize, &wait));
    match before {
        Ok(Ok(before)) => {
            log::info!("rank {rank}: relays: {path} (comm {}, channel {})", hello.comm, hello.channel);
            forwarder.add(Junction::new(rank, path.ends, [before, next], options.max_message));
        }
        // The next hop's link is closed: that rank learns of it at its first call.
        Ok(Err(e)) => log::warn!("rank {rank}: {path}: rank {} went away: {e}", hello.from),
        Err(e) => log::warn!("rank {rank}: {path}: {e}"),
    }
}

/// The hop towards the far end.
fn dial_on(
    endpoint: &Arc<Inner>,
    hello: &LinkHello,
    conn: &dyn Conn,
) -> Result<(crate::transport::LinkPair, Path, Arc<Forwarder>)> {
    let (rank, relay) = (endpoint.rank, &endpoint.relay);
    let (origin, target, from) = (hello.origin as usize, hello.target as usize, hello.from as usize);
    let give_up = || {
        if relay.stopped.load(Ordering::Acquire) {
            Some(aborted(rank, "it is leaving"))
        } else {
            conn.is_gone().then(|| aborted(rank, "the rank that asked for the link went away"))
        }
    };
    // The ends have the same limit: their wait should end first, and say who has not come.
    let limit = relay.limit.saturating_mul(2);
    let world = relay.await_world(&Wait::new(rank, target, limit, &give_up))?;
    let path = world.routes.path(origin, target).filter(|_| origin < target);
    let around = path.as_ref().and_then(|path| path.around(rank));
    let (Some(path), Some((before, next))) = (path, around) else {
        return Err(Error::invalid("relay", format!("rank {origin} and rank {target} do not need rank {rank}")));
    };
    let Some(info) = world.infos.get(next).filter(|_| before == from) else {
        return Err(Error::invalid("relay", format!("expected rank {before} to ask, got rank {from}")));
    };
    let options = hello.options();
    options.check()?;
    let forwarder = relay.forwarder(rank)?;
    let hop = Hop {
        origin,
        target,
        next,
        peer: next,
        info,
        comm: hello.comm,
        channel: hello.channel,
        options,
        checksum: hello.checksum(),
    };
    let wait = Wait::new(rank, next, limit, &give_up);
    let pair = endpoint.dial(&hop, forwarder.bell(), &wait)?;
    Ok((pair, path, forwarder))
}

fn aborted(rank: usize, reason: &str) -> Error {
    Error::Aborted { op: "relay".to_owned(), rank, reason: reason.to_owned() }
}

/// An error of making a relayed link, with the path that it would have taken.
pub(super) fn on_the_way(mut error: Error, path: &Path) -> Error {
    if let Error::PeerLost { detail, .. } | Error::Timeout { detail, .. } | Error::Protocol { detail, .. } = &mut error
    {
        detail.push_str(&format!(" ({path})"));
    }
    error
}
