//! One end of a link, from memory and queue pairs to both halves.

use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use super::exchange::{Card, Memory, QueuePair};
use super::layout::{Layout, Ring};
use super::memory::Region;
use super::{Core, Lane, Lanes, Parts, Queue, REPOST};
use crate::error::{Error, Result};
use crate::transport::linger::Linger;
use crate::transport::verbs::rails::{Device, Way};
use crate::transport::verbs::recv::VerbsRecv;
use crate::transport::verbs::send::VerbsSend;
use crate::transport::verbs::stripes::Stripes;
use crate::transport::verbs::sys::{Access, Capacity, Channel, Cq, Gid, Qp, Route, Timing};
use crate::transport::{LinkOptions, LinkPair, Peer};
use crate::wire::Header;

/// Requests beyond those of messages: reports and the goodbye.
const SPARE: usize = 32;

/// An end whose queue pairs take nothing yet.
pub(in super::super) struct Draft<'a> {
    parts: Parts,
    ways: Vec<Way<'a>>,
    /// For the peer.
    pub(in super::super) card: Card,
}

/// How much each queue pair must hold.
fn capacity(layout: &Layout, index: usize) -> Capacity {
    let (sends, recvs, inline) = match index {
        0 => (layout.lines + layout.slots, layout.receives(), layout.longest(Ring::Lines) + Header::BYTES),
        // A stripe per slot.
        _ => (layout.slots, layout.slots, 0),
    };
    Capacity { sends: (sends + SPARE) as u32, recvs: (recvs + REPOST) as u32, inline: inline as u32 }
}

fn random_psn() -> Result<u32> {
    let mut psn = [0u8; 4];
    rustix::rand::getrandom(&mut psn, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::errno("connect", "a random packet sequence number", e))?;
    Ok(u32::from_le_bytes(psn) & 0x00ff_ffff)
}

impl<'a> Draft<'a> {
    /// Memory, queues and a queue pair for each of `ways`, the first of which carries what is not striped.
    pub(in super::super) fn new(ways: Vec<Way<'a>>, options: &LinkOptions, timing: Timing) -> Result<Draft<'a>> {
        let layout = Layout::new(options)?;
        let bytes = layout.bytes()?;
        let mut devices: Vec<&Arc<Device>> = Vec::new();
        for way in &ways {
            if !devices.iter().any(|device| Arc::ptr_eq(device, &way.rail.device)) {
                devices.push(&way.rail.device);
            }
        }
        let of = |way: &Way<'_>| devices.iter().position(|device| Arc::ptr_eq(device, &way.rail.device)).unwrap_or(0);
        let domains = || devices.iter().map(|device| &device.pd);
        let staging = Region::new(domains(), bytes, Access::Source)?;
        let target = Region::new(domains(), bytes, Access::Target)?;
        let mut queues = Vec::with_capacity(devices.len());
        for (number, device) in devices.iter().enumerate() {
            let on_it = ways.iter().enumerate().filter(|(_, way)| of(way) == number);
            let entries: u32 = on_it.map(|(i, _)| capacity(&layout, i)).map(|c| c.sends + c.recvs).sum();
            let context = device.pd.context();
            queues.push(Queue::new(Cq::new(context, Channel::new(context)?, entries as usize)?));
        }
        let (mut lanes, mut qps) = (Vec::with_capacity(ways.len()), Vec::with_capacity(ways.len()));
        for (index, way) in ways.iter().enumerate() {
            let (device, choice) = (&way.rail.device, &way.rail.choice);
            let capacity = capacity(&layout, index);
            let (Some(queue), Some(source), Some(sink)) =
                (queues.get(of(way)), staging.mr(of(way)), target.mr(of(way)))
            else {
                return Err(Error::invalid("connect", "a device without a completion queue or memory"));
            };
            let qp = Qp::new(&device.pd, &queue.cq, &capacity)?;
            qp.init(choice.address.port)?;
            qps.push(QueuePair {
                gid: choice.address.gid,
                wanted: way.to,
                rkey: sink.rkey(),
                qpn: qp.number(),
                psn: random_psn()?,
                lid: u32::from(choice.address.lid),
                mtu: choice.mtu,
            });
            let lane = Lane::new(index, qp, device, way.in_words(), source.lkey(), &layout);
            lane.post_receives(capacity.recvs as usize)?;
            lanes.push(lane);
        }
        let memory = Memory {
            address: target.base().as_ptr() as u64,
            bytes: bytes as u64,
            lines: layout.lines as u32,
            slots: layout.slots as u32,
        };
        let mut lanes = lanes.into_iter();
        let first = lanes.next().ok_or_else(|| Error::invalid("connect", "expected a queue pair, got none"))?;
        Ok(Draft {
            parts: Parts {
                lanes: Lanes { first, others: lanes.collect() },
                queues,
                staging,
                target,
                layout,
                stripes: Stripes::new(ways.len()),
                timing,
                // One request may be on its way when the limit is reached, and the goodbye comes on top.
                limit: u64::from(capacity(&layout, 0).sends) - 4,
            },
            ways,
            card: Card { memory, qps },
        })
    }

    /// Brings the queue pairs up to the peer's.
    pub(in super::super) fn connect(&mut self, theirs: &Card, who: &Peer) -> Result<()> {
        let ours = &self.card;
        let shape = |c: &Card| (c.memory.bytes, c.memory.lines, c.memory.slots, c.qps.len());
        if shape(ours) != shape(theirs) {
            let detail = format!(
                "expected memory for {:?} (bytes, lines, slots, queue pairs), got {:?}; give all ranks the same configuration \
                 and build",
                shape(ours),
                shape(theirs)
            );
            return Err(who.protocol("connect", detail));
        }
        for (((lane, way), ours), theirs) in self.parts.lanes.iter_mut().zip(&self.ways).zip(&ours.qps).zip(&theirs.qps)
        {
            if !(1..=5).contains(&theirs.mtu) {
                return Err(who.protocol("connect", format!("expected an MTU code from 1 to 5, got {}", theirs.mtu)));
            }
            let choice = &way.rail.choice;
            lane.rkey = theirs.rkey;
            lane.qp().ready_to_receive(&Route {
                qpn: theirs.qpn,
                psn: theirs.psn,
                gid: Gid(theirs.gid),
                lid: theirs.lid as u16,
                mtu: ours.mtu.min(theirs.mtu),
                port: choice.address.port,
                gid_index: choice.gid_index,
                infiniband: choice.address.infiniband,
            })?;
            lane.qp().ready_to_send(ours.psn, &self.parts.timing)?;
        }
        Ok(())
    }

    /// Both halves, once all queue pairs are ready.
    pub(in super::super) fn finish(
        self,
        theirs: &Card,
        socket: TcpStream,
        who: Peer,
        linger: &Arc<Linger>,
    ) -> Result<LinkPair> {
        let core = Arc::new(Mutex::new(Core::new(self.parts, socket, who, theirs.memory.address)?));
        Ok(LinkPair {
            send: Box::new(VerbsSend::new(&core, linger)),
            recv: Box::new(VerbsRecv::new(&core, linger)),
            kind: "verbs",
            any_length: false,
        })
    }
}
