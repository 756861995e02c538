//! The dialing side: chooses the ports.

use std::net::TcpStream;
use std::sync::Arc;

use super::address::VerbsAddress;
use super::exchange;
use super::rails::{Rails, Way};
use super::setup::Draft;
use super::sys::Gid;
use crate::error::Result;
use crate::transport::linger::Linger;
use crate::transport::wait::Wait;
use crate::transport::{LinkOptions, LinkPair, Peer};

/// Makes a link over a connection on which the peer has said welcome.
pub(crate) fn connect(
    rails: &Rails,
    mut socket: TcpStream,
    mut who: Peer,
    (theirs, channel): (&[VerbsAddress], u32),
    options: &LinkOptions,
    wait: &Wait<'_>,
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    let made = rails.ways(who.peer, theirs, channel).and_then(|ways| {
        who.address = Way::list(&ways);
        Draft::new(ways, options, rails.timing)
    });
    let mut draft = match made {
        Ok(made) => made,
        Err(e) => {
            exchange::tell(&mut socket, &who, Err(&e))?;
            return Err(e);
        }
    };
    exchange::tell(&mut socket, &who, Ok(&draft.card))?;
    let card = exchange::hear(&mut socket, &who, wait)?;
    for (theirs, ours) in card.qps.iter().zip(&draft.card.qps) {
        if theirs.gid != ours.wanted {
            let (expected, got) = (Gid(ours.wanted).ip(), Gid(theirs.gid).ip());
            return Err(who.protocol("connect", format!("expected its port {expected}, got {got}")));
        }
    }
    draft.connect(&card, &who)?;
    exchange::tell_ready(&mut socket, &who)?;
    draft.finish(&card, socket, who, linger)
}
