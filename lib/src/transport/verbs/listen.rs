//! The accepting side: takes the port that the dialer wants.

use std::net::TcpStream;
use std::sync::Arc;

use super::address::list;
use super::exchange;
use super::rails::Rails;
use super::setup::Draft;
use super::sys::Gid;
use crate::error::{Error, Result};
use crate::transport::linger::Linger;
use crate::transport::wait::Wait;
use crate::transport::{LinkOptions, LinkPair, Peer};

/// Makes a link over a connection on which we have said welcome.
pub(crate) fn finish(
    rails: &Rails,
    mut socket: TcpStream,
    mut who: Peer,
    options: &LinkOptions,
    wait: &Wait<'_>,
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    let card = exchange::hear(&mut socket, &who, wait)?;
    let made = match rails.of_gid(&card.wanted) {
        Some(rail) => Draft::new(rail, card.gid, options, rails.timing).map(|draft| (draft, rail)),
        None => {
            let (wanted, ours) = (Gid(card.wanted).ip(), list(&rails.addresses()));
            Err(Error::invalid("connect", format!("expected one of our RDMA ports ({ours}), asked for {wanted}")))
        }
    };
    let made = made.and_then(|(draft, rail)| {
        who.address = format!("{} from {}", Gid(card.gid).ip(), rail.choice.address);
        draft.connect(&card, &who).map(|()| draft)
    });
    let draft = match made {
        Ok(draft) => draft,
        Err(e) => {
            exchange::tell(&mut socket, &who, Err(&e))?;
            return Err(e);
        }
    };
    exchange::tell(&mut socket, &who, Ok(&draft.card))?;
    exchange::hear_ready(&mut socket, &who, wait)?;
    draft.finish(&card, socket, who, linger)
}
