//! A relay's part in making a link between two other ranks: takes the hop from the lower end, makes the next one, joins
//! them.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Hop, Inner};
use crate::EndpointInfo;
use crate::accept::acceptor::Incoming;
use crate::accept::conn::Conn;
use crate::accept::handshake::Reply;
use crate::accept::link::LinkHello;
use crate::relay::{Forwarder, Junction, Path, Routes, Setups, Traffic};
use crate::wait::Wait;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::lock;

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
    pub(super) setups: Setups<Forwarder>,
    limit: Duration,
}

impl Relay {
    /// `limit` is how long the ends wait for a link.
    pub(super) fn new(limit: Duration) -> Relay {
        Relay { world: Mutex::default(), introduced: Condvar::new(), setups: Setups::new(), limit }
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
        self.setups.running().map(|forwarder| forwarder.traffic()).unwrap_or_default()
    }
}

/// Takes a connection for another rank. Called by the acceptor, so it does not block.
pub(super) fn take(endpoint: &Arc<Inner>, hello: LinkHello, incoming: Incoming) {
    let (rank, for_thread) = (endpoint.rank, endpoint.clone());
    let make = move |incoming| make(&for_thread, &hello, incoming);
    if let Err((mut incoming, why)) = endpoint.relay.setups.start(format!("tinynccl-hop-{rank}"), incoming, |_| 0, make)
    {
        refuse(rank, &mut *incoming.conn, &hello, &why);
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
    let stopped = || endpoint.relay.setups.abort(rank);
    let wait = Wait::new(rank, hello.from as usize, endpoint.relay.limit, &stopped);
    let options = hello.options();
    let before = endpoint.accept(hello, incoming, &options, forwarder.bell(), (hello.from as usize, &wait));
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
) -> Result<(crate::LinkPair, Path, Arc<Forwarder>)> {
    let (rank, relay) = (endpoint.rank, &endpoint.relay);
    let (origin, target, from) = (hello.origin as usize, hello.target as usize, hello.from as usize);
    let give_up = || {
        let gone = || Error::Aborted {
            op: "relay".to_owned(),
            rank,
            reason: "the rank that asked for the link went away".to_owned(),
        };
        relay.setups.abort(rank).or_else(|| conn.is_gone().then(gone))
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
    let forwarder = relay.setups.forwarder(|| Forwarder::start(rank))?;
    let hop = Hop { origin, target, next, peer: next, info, comm: hello.comm, channel: hello.channel, options };
    let wait = Wait::new(rank, next, limit, &give_up);
    let pair = endpoint.dial(&hop, forwarder.bell(), &wait)?;
    Ok((pair, path, forwarder))
}

/// An error of making a relayed link, with the path that it would have taken.
pub(super) fn on_the_way(mut error: Error, path: &Path) -> Error {
    if let Error::PeerLost { detail, .. } | Error::Timeout { detail, .. } | Error::Protocol { detail, .. } = &mut error
    {
        detail.push_str(&format!(" ({path})"));
    }
    error
}
