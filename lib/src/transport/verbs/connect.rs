//! The dialing side: chooses the two ports.

use std::net::TcpStream;
use std::sync::Arc;

use super::address::VerbsAddress;
use super::exchange;
use super::rails::Rails;
use super::setup::Draft;
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
    let made = rails
        .choose(who.peer, theirs, channel)
        .and_then(|(rail, theirs)| Ok((Draft::new(rail, theirs.gid, options, rails.timing)?, theirs, rail)));
    let (draft, address, rail) = match made {
        Ok(made) => made,
        Err(e) => {
            exchange::tell(&mut socket, &who, Err(&e))?;
            return Err(e);
        }
    };
    who.address = format!("{address} from {}", rail.choice.address);
    exchange::tell(&mut socket, &who, Ok(&draft.card))?;
    let card = exchange::hear(&mut socket, &who, wait)?;
    if card.gid != draft.card.wanted {
        let got = super::sys::Gid(card.gid).ip();
        return Err(who.protocol("connect", format!("expected its port {address}, got {got}")));
    }
    draft.connect(&card, &who)?;
    exchange::tell_ready(&mut socket, &who)?;
    draft.finish(&card, socket, who, linger)
}
