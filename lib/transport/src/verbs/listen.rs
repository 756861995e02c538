//! The accepting side: takes the ports that the dialer wants.

use std::net::TcpStream;
use std::sync::Arc;

use super::address::list;
use super::link::Draft;
use super::link::exchange::{self, QpCard};
use super::nics::{Nics, PortPair};
use super::sys::Gid;
use crate::fabric::Accept;
use crate::linger::Linger;
use crate::{LinkPair, Peer};
use tinynccl_plan::error::{Error, Result};

/// Makes a link over a connection on which we have sent our welcome. A dialer that hangs up before the queue pairs are
/// joined has given up, and may come again: only its rank's death, which others report, ends the wait.
pub(super) fn finish(
    nics: &Nics,
    socket: TcpStream,
    who: Peer,
    accept: &Accept<'_>,
    linger: &Arc<Linger>,
) -> Result<Result<LinkPair, String>> {
    match join(nics, socket, who, accept, linger) {
        Err(e @ Error::PeerLost { .. }) => Ok(Err(e.to_string())),
        made => made.map(Ok),
    }
}

fn join(
    nics: &Nics,
    mut socket: TcpStream,
    mut who: Peer,
    accept: &Accept<'_>,
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    let card = exchange::recv_card(&mut socket, &who, accept.wait)?;
    let pair = |theirs: &QpCard| match nics.of_gid(&theirs.wanted) {
        Some(nic) => Ok(PortPair { nic, to: theirs.gid }),
        None => {
            let (wanted, ours) = (Gid(theirs.wanted).ip(), list(&nics.addresses()));
            Err(Error::invalid("connect", format!("expected one of our RDMA ports ({ours}), asked for {wanted}")))
        }
    };
    let made = card.qps.iter().map(pair).collect::<Result<Vec<_>>>().and_then(|pairs| {
        who.address = PortPair::list(&pairs);
        let mut draft = Draft::new(pairs, accept.options, nics.timing)?;
        draft.connect(&card, &who)?;
        Ok(draft)
    });
    let draft = match made {
        Ok(draft) => draft,
        Err(e) => {
            exchange::send_card(&mut socket, &who, Err(&e))?;
            return Err(e);
        }
    };
    exchange::send_card(&mut socket, &who, Ok(&draft.card))?;
    exchange::recv_ready(&mut socket, &who, accept.wait)?;
    draft.finish(&card, socket, who, linger)
}
