//! One end of a link, from memory and a queue pair to both halves.

use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use super::exchange::Card;
use super::layout::Layout;
use super::link::{Core, Parts, Remote};
use super::memory::Region;
use super::rails::Rail;
use super::recv::VerbsRecv;
use super::send::VerbsSend;
use super::sys::{Access, Capacity, Channel, Cq, Gid, Qp, Route, Timing};
use crate::error::{Error, Result};
use crate::transport::linger::Linger;
use crate::transport::{LinkOptions, LinkPair, Peer};
use crate::wire::Header;

/// Requests beyond those of messages: reports and the goodbye.
const SPARE: usize = 32;

/// An end whose queue pair takes nothing yet.
pub(super) struct Draft {
    parts: Parts,
    /// For the peer.
    pub(super) card: Card,
    gid_index: u8,
    port: u8,
    infiniband: bool,
}

impl Draft {
    /// Memory, queues and a queue pair on `rail`, for the peer's port `wanted`.
    pub(super) fn new(rail: &Rail, wanted: [u8; 16], options: &LinkOptions, timing: Timing) -> Result<Draft> {
        let layout = Layout::new(options)?;
        let pd = &rail.device.pd;
        let bytes = layout.bytes()?;
        let staging = Region::new(pd, bytes, Access::Source)?;
        let target = Region::new(pd, bytes, Access::Target)?;
        let sends = layout.lines + layout.slots + SPARE;
        let receives = layout.receives() + super::link::REPOST;
        let context = pd.context();
        let cq = Cq::new(context, Channel::new(context)?, sends + receives)?;
        let inline = layout.longest(super::layout::Ring::Lines) + Header::BYTES;
        let capacity = Capacity { sends: sends as u32, recvs: receives as u32, inline: inline as u32 };
        let qp = Qp::new(pd, &cq, &capacity)?;
        let choice = &rail.choice;
        qp.init(choice.address.port)?;
        qp.post_receives(receives)?;
        let mut psn = [0u8; 4];
        rustix::rand::getrandom(&mut psn, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::errno("connect", "a random packet sequence number", e))?;
        let card = Card {
            gid: choice.address.gid,
            wanted,
            address: target.base().as_ptr() as u64,
            bytes: bytes as u64,
            rkey: target.rkey(),
            qpn: qp.number(),
            psn: u32::from_le_bytes(psn) & 0x00ff_ffff,
            lid: u32::from(choice.address.lid),
            mtu: choice.mtu,
            lines: layout.lines as u32,
            slots: layout.slots as u32,
            padding: 0,
        };
        Ok(Draft {
            // One request may be on its way when the limit is reached, and the goodbye comes on top.
            parts: Parts {
                qp,
                cq,
                staging,
                target,
                device: rail.device.clone(),
                layout,
                timing,
                limit: sends as u64 - 4,
            },
            card,
            gid_index: choice.gid_index,
            port: choice.address.port,
            infiniband: choice.address.infiniband,
        })
    }

    /// Brings the queue pair up to the peer's.
    pub(super) fn connect(&self, theirs: &Card, who: &Peer) -> Result<()> {
        let ours = &self.card;
        let shape = |c: &Card| (c.bytes, c.lines, c.slots);
        if shape(ours) != shape(theirs) {
            let detail = format!(
                "expected memory for {:?} (bytes, lines, slots), got {:?}; give all ranks the same configuration and build",
                shape(ours),
                shape(theirs)
            );
            return Err(who.protocol("connect", detail));
        }
        if !(1..=5).contains(&theirs.mtu) {
            return Err(who.protocol("connect", format!("expected an MTU code from 1 to 5, got {}", theirs.mtu)));
        }
        self.parts.qp.ready_to_receive(&Route {
            qpn: theirs.qpn,
            psn: theirs.psn,
            gid: Gid(theirs.gid),
            lid: theirs.lid as u16,
            mtu: ours.mtu.min(theirs.mtu),
            port: self.port,
            gid_index: self.gid_index,
            infiniband: self.infiniband,
        })?;
        self.parts.qp.ready_to_send(ours.psn, &self.parts.timing)
    }

    /// Both halves, once both queue pairs are ready.
    pub(super) fn finish(self, theirs: &Card, socket: TcpStream, who: Peer, linger: &Arc<Linger>) -> Result<LinkPair> {
        let remote = Remote { address: theirs.address, rkey: theirs.rkey };
        let core = Arc::new(Mutex::new(Core::new(self.parts, socket, who, remote)?));
        Ok(LinkPair {
            send: Box::new(VerbsSend::new(&core, linger)),
            recv: Box::new(VerbsRecv::new(&core, linger)),
            kind: "verbs",
            lends_long: false,
        })
    }
}
