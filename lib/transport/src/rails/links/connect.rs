//! Making of a link, at which both ends do the same: each listens for the other's messages.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::RecvFlags;

use super::recv::RailsRecv;
use super::send::RailsSend;
use crate::linger::Linger;
use crate::rails::{Handle, MAX_REQUESTS, Net};
use crate::seal::Socket;
use crate::stream::{CLOSED, read_exact};
use crate::wait::Wait;
use crate::{LinkOptions, LinkPair, Peer};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;

/// Time between two checks of the connections that are being made.
const LOOK: Duration = Duration::from_millis(1);
const READY: u8 = 1;

/// Makes a link over a socket on which both ends are authenticated.
pub(super) fn join(
    net: &Arc<Net>,
    mut socket: Socket,
    who: Peer,
    (options, bell, wait): (&LinkOptions, &Arc<Doorbell>, &Wait<'_>),
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    if options.depth > MAX_REQUESTS {
        let got = options.depth;
        return Err(Error::invalid("connect", format!("over rails: expected depth 1 to {MAX_REQUESTS}, got {got}")));
    }
    let (handle, listener) = net.listen()?;
    // A new connection's send buffer has room for it.
    socket.write_all(&handle.to_bytes()).map_err(|e| who.lost("connect", &e.to_string()))?;
    let mut theirs = [0; Handle::BYTES];
    read_exact(&mut socket, &mut theirs, wait, "its handle has not come").map_err(|failure| failure.of(&who))?;
    let connecting = net.connect(&Handle::parse(&theirs)?)?;
    let (mut sender, mut receiver) = (None, None);
    while sender.is_none() || receiver.is_none() {
        if sender.is_none() {
            sender = connecting.poll()?;
        }
        if receiver.is_none() {
            receiver = listener.accept()?;
        }
        // Its last byte stays in the socket.
        if matches!(rustix::net::recv(&socket, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT), Ok((0, _))) {
            return Err(who.lost("connect", CLOSED));
        }
        wait.pause(LOOK, || "the connections of its connections are not established".to_owned())?;
    }
    socket.write_all(&[READY]).map_err(|e| who.lost("connect", &e.to_string()))?;
    read_exact(&mut socket, &mut [0], wait, "its rails do not stand").map_err(|failure| failure.of(&who))?;
    let (Some(sender), Some(receiver)) = (sender, receiver) else {
        return Err(who.lost("connect", "a connection is missing"));
    };
    Ok(LinkPair {
        send: Box::new(RailsSend::new(net, sender, who.clone(), options, (bell, linger))?),
        recv: Box::new(RailsRecv::new(net, receiver, who, options, (bell, linger))?),
        kind: "rails",
        any_length: false,
    })
}
