//! One end of a link, from memory and queue pairs to both halves.

use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use super::exchange::{Card, MemoryCard, QpCard};
use super::layout::{Layout, Ring};
use super::memory::Region;
use super::{Core, Parts, Queue, QueuePair, QueuePairs, REPOST};
use crate::linger::Linger;
use crate::verbs::nics::{Device, PortPair};
use crate::verbs::recv::VerbsRecv;
use crate::verbs::send::VerbsSend;
use crate::verbs::stripes::Stripes;
use crate::verbs::sys::{Access, Capacity, Channel, Cq, Qp, Timing};
use crate::{LinkOptions, LinkPair, Peer};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;

/// Requests beyond those of messages: reports and the goodbye.
const SPARE: usize = 32;

/// An end whose queue pairs take nothing yet.
pub(crate) struct Draft<'a> {
    parts: Parts,
    pairs: Vec<PortPair<'a>>,
    /// For the peer.
    pub(crate) card: Card,
}

/// Capacity that queue pair `index` of a link must have.
fn capacity(layout: &Layout, index: usize) -> Capacity {
    let (sends, recvs, inline) = match index {
        0 => (layout.lines + layout.slots, layout.receives(), layout.longest(Ring::Lines) + Header::BYTES),
        // A stripe per slot.
        _ => (layout.slots, layout.slots, 0),
    };
    Capacity { sends: (sends + SPARE) as u32, recvs: (recvs + REPOST) as u32, inline: inline as u32 }
}

impl<'a> Draft<'a> {
    /// Memory, queues and a queue pair for each of `pairs`, the first of which carries what is not striped.
    pub(crate) fn new(pairs: Vec<PortPair<'a>>, options: &LinkOptions, timing: Timing) -> Result<Draft<'a>> {
        let layout = Layout::new(options)?;
        let bytes = layout.bytes()?;
        let mut devices: Vec<&Arc<Device>> = Vec::new();
        for pair in &pairs {
            if !devices.iter().any(|device| Arc::ptr_eq(device, &pair.nic.device)) {
                devices.push(&pair.nic.device);
            }
        }
        let of =
            |pair: &PortPair<'_>| devices.iter().position(|device| Arc::ptr_eq(device, &pair.nic.device)).unwrap_or(0);
        let domains = || devices.iter().map(|device| &device.pd);
        let staging = Region::new(domains(), bytes, Access::Source)?;
        let target = Region::new(domains(), bytes, Access::Target)?;
        let mut queues = Vec::with_capacity(devices.len());
        for (number, device) in devices.iter().enumerate() {
            let on_it = pairs.iter().enumerate().filter(|(_, pair)| of(pair) == number);
            let entries: u32 = on_it.map(|(i, _)| capacity(&layout, i)).map(|c| c.sends + c.recvs).sum();
            let context = device.pd.context();
            queues.push(Queue::new(Cq::new(context, Channel::new(context)?, entries as usize)?));
        }
        let (mut qps, mut cards) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
        for (index, pair) in pairs.iter().enumerate() {
            let (device, port) = (&pair.nic.device, &pair.nic.port);
            let capacity = capacity(&layout, index);
            let (Some(queue), Some(source), Some(sink)) =
                (queues.get(of(pair)), staging.mr(of(pair)), target.mr(of(pair)))
            else {
                return Err(Error::invalid("connect", "a device without a completion queue or memory"));
            };
            let qp = Qp::new(&device.pd, &queue.cq, &capacity)?;
            qp.init(port.address.port)?;
            cards.push(QpCard {
                gid: port.address.gid,
                wanted: pair.to,
                rkey: sink.rkey(),
                qpn: qp.number(),
                psn: Qp::random_psn()?,
                lid: u32::from(port.address.lid),
                mtu: port.mtu,
            });
            let qp = QueuePair::new(index, qp, device, pair.in_words(), source.lkey(), &layout);
            qp.post_receives(capacity.recvs as usize)?;
            qps.push(qp);
        }
        let memory = MemoryCard {
            address: target.base().as_ptr() as u64,
            bytes: bytes as u64,
            lines: layout.lines as u32,
            slots: layout.slots as u32,
        };
        let mut qps = qps.into_iter();
        let first = qps.next().ok_or_else(|| Error::invalid("connect", "expected a queue pair, got none"))?;
        Ok(Draft {
            parts: Parts {
                qps: QueuePairs { first, others: qps.collect() },
                queues,
                staging,
                target,
                layout,
                stripes: Stripes::new(pairs.len()),
                timing,
                // One request may be on its way when the limit is reached, and the goodbye comes on top.
                limit: u64::from(capacity(&layout, 0).sends) - 4,
            },
            pairs,
            card: Card { memory, qps: cards },
        })
    }

    /// Brings the queue pairs up to the peer's.
    pub(crate) fn connect(&mut self, theirs: &Card, who: &Peer) -> Result<()> {
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
        for (((qp, pair), ours), theirs) in self.parts.qps.iter_mut().zip(&self.pairs).zip(&ours.qps).zip(&theirs.qps) {
            if !(1..=5).contains(&theirs.mtu) {
                return Err(who.protocol("connect", format!("expected an MTU code from 1 to 5, got {}", theirs.mtu)));
            }
            qp.rkey = theirs.rkey;
            let to = pair.nic.remote((theirs.qpn, theirs.psn), theirs.gid, theirs.lid as u16, theirs.mtu);
            qp.handle().ready_to_receive(&to)?;
            qp.handle().ready_to_send(ours.psn, &self.parts.timing)?;
        }
        Ok(())
    }

    /// Both halves, once all queue pairs are ready.
    pub(crate) fn finish(self, theirs: &Card, socket: TcpStream, who: Peer, linger: &Arc<Linger>) -> Result<LinkPair> {
        let core = Arc::new(Mutex::new(Core::new(self.parts, socket, who, theirs.memory.address)?));
        Ok(LinkPair {
            send: Box::new(VerbsSend::new(&core, linger)),
            recv: Box::new(VerbsRecv::new(&core, linger)),
            kind: "verbs",
            any_length: false,
        })
    }
}
