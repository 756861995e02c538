//! The dialing side: chooses the ports.

use std::net::TcpStream;
use std::sync::Arc;

use super::link::{Draft, exchange};
use super::nics::{Nics, PortPair};
use super::sys::Gid;
use crate::fabric::{Dial, unreachable};
use crate::linger::Linger;
use crate::{LinkPair, Peer};
use tinynccl_plan::error::Result;

/// Makes a link over a connection on which the peer has sent its welcome.
pub(super) fn connect(
    nics: &Nics,
    mut socket: TcpStream,
    mut who: Peer,
    dial: &Dial<'_>,
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    let pairs = nics.port_pairs(&dial.info.verbs, dial.channel);
    let made = pairs.map_err(|why| unreachable("RDMA", who.rank, who.peer, &why)).and_then(|pairs| {
        who.address = PortPair::list(&pairs);
        Draft::new(pairs, dial.options, nics.timing)
    });
    let mut draft = match made {
        Ok(made) => made,
        Err(e) => {
            exchange::send_card(&mut socket, &who, Err(&e))?;
            return Err(e);
        }
    };
    exchange::send_card(&mut socket, &who, Ok(&draft.card))?;
    let card = exchange::recv_card(&mut socket, &who, dial.wait)?;
    for (theirs, ours) in card.qps.iter().zip(&draft.card.qps) {
        if theirs.gid != ours.wanted {
            let (expected, got) = (Gid(ours.wanted).ip(), Gid(theirs.gid).ip());
            return Err(who.protocol("connect", format!("expected its port {expected}, got {got}")));
        }
    }
    draft.connect(&card, &who)?;
    exchange::send_ready(&mut socket, &who)?;
    draft.finish(&card, socket, who, linger)
}
