//! Long messages by RDMA: written from the sender's memory to that of the posted receive, and no thread copies them.
//!
//! Between two NICs with RDMA ports, the sender offers a queue pair beside its stream there
//! ([`QpInfo`]), and the receiver answers with its own. From then on
//! a message over 32 KiB waits until the receiver has sent a CTS frame with the address of its receive (a [`Cts`]), as
//! under NCCL's own transport for InfiniBand. The sender requests that. While the messages of a tag are long, the
//! receiver sends a CTS frame for each receive when it is posted; short ones should not pay for it, whose receives are
//! often as long. A message is cut into fragments of [`RDMA_FRAGMENT`] bytes, and a queue pair takes the next one when
//! it has fewer than [`DEPTH`] under way and the fragment would arrive as early over it as over any other.
//!
//! A fragment is one RDMA WRITE WITH IMMEDIATE. The immediate value names the CTS and the fragment, and its
//! completion shows the receiver that the fragment is in its posted buffer. The last one of a message gives its length.
//!
//! Short messages, those of memory that is not registered, and all control frames go over the streams. So does
//! everything after the last queue pair is lost. One that fails is retired as a stream is: the sender notifies the
//! receiver, which stops its own end, then replies with the number of fragments that came over it, and streams carry
//! the others. Another one is offered if it had carried something and its NIC pair still has a stream, or when that has
//! one again. A port whose device reports it down loses its queue pairs at once, and offers others when it is up.

mod devices;
mod queue;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};

use crate::rails::data::control::{self, Cts, Kind, QpInfo};
use crate::rails::data::frame::{Frame, RDMA_FRAGMENT};
use crate::rails::data::side::{Directed, Side};
use crate::rails::failover::slot::State;
use crate::rails::stream::rate;
use crate::rails::stream::{Rail, Stream};
use crate::rails::worker::thread::{Job, Worker};
use crate::verbs::nics::Registered;
use crate::verbs::sys::Access;
pub(super) use devices::{Devices, PortListener, watch};
use queue::{Posted, Queue, Site};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::lock;

/// Most fragments of a queue pair in flight.
const DEPTH: usize = 8;
/// Most queue pairs in the state of a connection.
const MOST: usize = 64;

/// Memory that is registered with the RDMA devices, if there are some, until this is dropped.
#[derive(Debug)]
pub struct Memory {
    _registered: Option<Registered>,
}

/// Registers memory with `devices`, if there are some; messages of memory that they refuse go over TCP.
///
/// # Safety
/// The memory stays mapped until this is dropped.
pub(super) unsafe fn register(devices: Option<&Devices>, base: *mut u8, bytes: usize) -> Memory {
    static REFUSED: Once = Once::new();
    let (Some(devices), Some(base)) = (devices, NonNull::new(base).filter(|_| bytes > 0)) else {
        return Memory { _registered: None };
    };
    // SAFETY: by the caller; peers write to it only where a receive is posted, whose memory is not used otherwise.
    let registered = unsafe { devices.nics.register(base, bytes, Access::Target) };
    let refused = |e: &Error| {
        REFUSED.call_once(|| {
            log::warn!(
                "net: {bytes} bytes were not registered, and the messages there go over TCP ({e}): raise the limit of locked \
                 memory (ulimit -l), or set TINYNCCL_NET_RDMA=0"
            );
        });
    };
    Memory { _registered: registered.inspect_err(refused).ok() }
}

/// The queue pairs of a connection.
#[derive(Debug)]
pub(super) struct Queues {
    devices: Option<Arc<Devices>>,
    all: Box<[OnceLock<Queue>]>,
    /// Held while a queue pair is added, so that none comes while the connection is being closed.
    inserting: Mutex<()>,
    /// True once it was logged that there are no more queue pairs.
    spent: AtomicBool,
}

impl Queues {
    pub(super) fn new(devices: Option<Arc<Devices>>) -> Queues {
        let most = if devices.is_some() { MOST } else { 0 };
        let all = std::iter::repeat_with(OnceLock::new).take(most).collect();
        Queues { devices, all, inserting: Mutex::default(), spent: AtomicBool::new(false) }
    }

    /// Returns true if this end has RDMA ports.
    pub(super) fn is_on(&self) -> bool {
        self.devices.is_some()
    }

    fn is_up(&self, ip: IpAddr) -> bool {
        self.devices.as_ref().is_some_and(|devices| devices.is_up(ip))
    }

    /// Returns true while there is a queue pair that carries fragments.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.alive().next().is_some()
    }

    fn get(&self, number: usize) -> Option<&Queue> {
        self.all.get(number)?.get()
    }

    fn existing(&self) -> impl Iterator<Item = (usize, &Queue)> + Clone {
        self.all.iter().enumerate().filter_map(|(number, slot)| Some((number, slot.get()?)))
    }

    fn alive(&self) -> impl Iterator<Item = (usize, &Queue)> + Clone {
        self.existing().filter(|(_, queue)| queue.state.is(State::Alive))
    }

    /// Returns true if a message of this memory may go by RDMA: it is registered, and there is a queue pair.
    pub(super) fn takes(&self, data: *const u8, len: usize) -> bool {
        self.alive().next().is_some_and(|(_, queue)| queue.keys(data, len).is_some())
    }

    /// Returns our port on the NIC pair of a stream, if there is one.
    fn site<'a>(&'a self, connection: &impl Directed, stream: Option<&'a Stream>) -> Option<Site<'a>> {
        let (devices, stream) = (self.devices.as_ref()?, stream?);
        let rail = stream.rail?;
        let timing = devices.timing(connection.session().several());
        Some(Site { nic: devices.at(rail.ours)?, timing, rail, worker: &stream.worker })
    }

    /// Offers a queue pair beside a stream, if there is a port on its NIC pair and no queue pair yet. Returns the
    /// control frame for the peer.
    pub(super) fn offer(&self, connection: &impl Directed, index: usize, stream: &Stream) -> Option<Frame> {
        if connection.session().relayed() {
            return None;
        }
        let site = self.site(connection, Some(stream))?;
        if self.existing().any(|(_, q)| q.rail == site.rail && (q.state.is(State::New) || q.state.is(State::Alive))) {
            return None;
        }
        let Some(number) = self.all.iter().position(|slot| slot.get().is_none()) else {
            if !self.spent.swap(true, Ordering::Relaxed) {
                log::warn!(
                    "net: {}: {MOST} queue pairs are lost, and its messages go over TCP from now on",
                    connection.session().name()
                );
            }
            return None;
        };
        self.insert(connection, number, Queue::new(&site).map_err(|e| e.to_string())).ok()?;
        Some(self.get(number)?.qp_info(index, number))
    }

    /// Offers queue pairs beside the streams on NIC pairs for which `on` is true, and notifies the peer.
    pub(super) fn offer_where(&self, connection: &impl Directed, on: impl Fn(Rail) -> bool) {
        let Side::Out(_) = connection.side() else { return };
        let here = connection.alive_on(&on).into_iter();
        let offer = |index| self.offer(connection, index, connection.stream(index)?);
        let offers: Vec<Frame> = here.filter_map(offer).collect();
        if !offers.is_empty() {
            connection.send_control(offers);
        }
    }

    fn insert(&self, connection: &impl Directed, number: usize, made: Result<Queue, String>) -> Result<(), String> {
        let _inserting = lock(&self.inserting);
        if connection.session().is_closed() {
            return Err("the connection is closed".to_owned());
        }
        let kept = made.and_then(|queue| {
            let slot = self.all.get(number).ok_or_else(|| format!("expected at most {MOST} queue pairs"))?;
            slot.set(queue).map_err(|_| format!("queue pair {number} exists"))
        });
        match (&kept, self.get(number)) {
            (Ok(()), Some(_)) => connection.serve_queue_pair(number),
            (Err(why), _) => log::warn!("net: {}: no RDMA: {why}", connection.session().name()),
            _ => {}
        }
        kept
    }

    /// Handles a control frame of the peer's about a queue pair, or a request for a CTS frame.
    #[cold]
    pub(super) fn handle_control(&self, connection: &impl Directed, kind: Kind, frame: &Frame) -> Result<(), String> {
        match (kind, connection.side()) {
            (Kind::QpInfo, Side::In(_)) => {
                self.accept_offer(connection, frame);
                Ok(())
            }
            (Kind::QpInfo, Side::Out(_)) => {
                self.complete(connection, frame);
                Ok(())
            }
            _ if self.devices.is_none() => Err(format!("expected a control frame about a stream, got {frame:x?}")),
            (Kind::Retire, Side::In(_)) => self.retire(connection, frame),
            (Kind::StreamFailed, Side::Out(_)) => {
                if let Some(number) = frame.queue() {
                    self.fail(connection, number, "the peer has lost its end");
                }
                Ok(())
            }
            (Kind::RetireAck, Side::Out(sender)) => {
                let Some(queue) = frame.queue().and_then(|number| self.get(number)) else { return Ok(()) };
                let Some(left) = queue.handle_retire_ack(connection, frame.number)? else { return Ok(()) };
                sender.resend(connection, left);
                // Where nothing arrived, nothing would: a firewall, for example.
                let again = frame.number > 0 && self.is_up(queue.rail.ours);
                let alive = connection.alive_on(&|rail| again && rail == queue.rail);
                if let Some(&index) = alive.first()
                    && let Some(stream) = connection.stream(index)
                    && let Some(offer) = self.offer(connection, index, stream)
                {
                    connection.send_control(vec![offer]);
                }
                Ok(())
            }
            (Kind::Rts, Side::In(receiver)) => receiver.handle_rts(connection, frame),
            _ => Err(format!("expected a control frame about queue pairs for this end, got {frame:x?}")),
        }
    }

    /// Answers the sender's offer of a queue pair.
    fn accept_offer(&self, connection: &impl Directed, frame: &Frame) {
        let theirs = frame.as_qp_info();
        let number = usize::from(theirs.queue);
        if self.get(number).is_some() {
            return;
        }
        let made = match self.site(connection, connection.stream(theirs.stream)) {
            Some(site) => Queue::answering(&site, &theirs),
            None => Err(match &self.devices {
                Some(devices) => {
                    format!("expected the NIC pair of an RDMA port ({}), got another one", devices.ports())
                }
                None => "RDMA is off (TINYNCCL_NET_RDMA)".to_owned(),
            }),
        };
        let none = Frame::qp_info(&QpInfo { qpn: 0, ..theirs });
        let kept = self.insert(connection, number, made);
        let answer = self.get(number).filter(|_| kept.is_ok()).map(|queue| {
            log::info!("net: {}: long messages by RDMA, {}", connection.session().name(), queue.ports);
            (queue, queue.qp_info(theirs.stream, number))
        });
        connection.send_control(vec![answer.as_ref().map_or(none, |(_, info)| *info)]);
        if let (Some((queue, _)), Side::In(receiver)) = (answer, connection.side())
            && queue.state.advance(State::Alive)
        {
            receiver.send_all_cts(connection);
        }
    }

    /// Handles the receiver's answer to an offer: connects the queue pair, or gives it up.
    fn complete(&self, connection: &impl Directed, frame: &Frame) {
        let theirs = frame.as_qp_info();
        let number = usize::from(theirs.queue);
        let site = self.site(connection, connection.stream(theirs.stream));
        let (Some(queue), Some(site)) = (self.get(number).filter(|q| q.state.is(State::New)), site) else { return };
        if theirs.qpn == 0 {
            log::info!("net: {}: no RDMA over {}: the peer has no port there", connection.session().name(), queue.rail);
            queue.state.advance(State::Retired);
            queue.close();
            return;
        }
        match queue.complete(site.nic, &theirs) {
            Ok(()) => {
                log::info!("net: {}: long messages by RDMA, {}", connection.session().name(), queue.ports);
                queue.state.advance(State::Alive);
            }
            Err(why) => self.fail(connection, number, &why),
        }
    }

    /// Stops this end of a queue pair that the sender has retired, and replies with the number of fragments that came
    /// over it.
    fn retire(&self, connection: &impl Directed, frame: &Frame) -> Result<(), String> {
        let number = frame.queue().ok_or("expected the number of a queue pair")?;
        let mut arrived = 0;
        if let Some(queue) = self.get(number) {
            queue.state.advance(State::Retiring);
            arrived = queue.stop_and_count(connection)?;
            queue.state.advance(State::Retired);
        }
        connection.send_control(vec![Frame::control(Kind::RetireAck, control::queue(number), arrived)]);
        Ok(())
    }

    /// Fails a queue pair over, for the reason `why`.
    #[cold]
    fn fail(&self, connection: &impl Directed, number: usize, why: &str) {
        let Some(queue) = self.get(number) else { return };
        if connection.session().is_closed() || !queue.state.advance(State::Retiring) {
            return;
        }
        queue.stop();
        let left = self.alive().count();
        log::warn!(
            "net: {}: RDMA {}: {why}; {left} other queue pairs and TCP carry on",
            connection.session().name(),
            queue.ports
        );
        if let Side::Out(sender) = connection.side()
            && left == 0
        {
            sender.fall_back_to_streams(connection);
        }
        connection.resend_control();
    }

    /// Fails over the queue pairs of a rail whose streams are all lost, which may show before they fail.
    pub(super) fn fail_rail(&self, connection: &impl Directed, rail: Rail) {
        self.fail_where(connection, |of| of == rail, "no stream gets through there");
    }

    fn fail_where(&self, connection: &impl Directed, on: impl Fn(Rail) -> bool, why: &str) {
        for (number, _) in self.existing().filter(|(_, queue)| on(queue.rail) && !queue.state.is(State::Retired)) {
            self.fail(connection, number, why);
        }
    }

    /// Offers queue pairs at a port that went up, or fails over those of one that went down.
    pub(super) fn port(&self, connection: &impl Directed, ip: IpAddr, up: bool) {
        match up {
            true => self.offer_where(connection, |rail| rail.ours == ip),
            false => self.fail_where(connection, |rail| rail.ours == ip, "the port is down"),
        }
    }

    /// Returns the control frames about lost queue pairs for the peer.
    pub(super) fn retiring(&self, kind: Kind) -> impl Iterator<Item = Frame> {
        let lost = self.existing().filter(|(_, queue)| queue.state.is(State::Retiring));
        lost.map(move |(number, _)| Frame::control(kind, control::queue(number), 0))
    }

    /// Returns the CTS frames of a posted receive: one for each queue pair, or one without a key if the memory is
    /// not registered.
    pub(super) fn cts_frames(&self, (tag, number): (i32, u64), data: *const u8, bytes: usize, id: u16) -> Vec<Frame> {
        let cts = |key| Frame::cts(tag, number, &Cts { address: data.addr() as u64, bytes: bytes as u64, id, key });
        let keys = self.alive().map(|(queue, of)| Some((queue as u8, of.keys(data, bytes)?.1)));
        let keys: Option<Vec<(u8, u32)>> = keys.collect();
        match keys {
            Some(keys) => keys.into_iter().map(|key| cts(Some(key))).collect(),
            None => vec![cts(None)],
        }
    }

    /// Has queue pairs take what is posted and has a CTS frame.
    pub(super) fn pump(&self, connection: &impl Directed) {
        while let Some((first, _)) = self.alive().next()
            && self.next(connection, first)
        {}
    }

    /// Returns the number of the queue pair over which a fragment would arrive first: this one, or another.
    fn first_to_arrive(&self, number: usize) -> usize {
        let loads = self.alive().map(|(number, queue)| (number, &queue.load));
        rate::first_to_arrive(number, RDMA_FRAGMENT, loads).err().unwrap_or(number)
    }

    /// Posts the next fragment over the queue pair where it would arrive first, or over another if all CTS frames
    /// lack the key of that one; false when there is nothing to do before the next event.
    fn next(&self, connection: &impl Directed, number: usize) -> bool {
        let first = self.first_to_arrive(number);
        match self.post(connection, first) {
            Posted::Fragment => true,
            Posted::Full => false,
            Posted::Nothing => {
                self.alive().any(|(other, _)| other != first && self.post(connection, other) == Posted::Fragment)
            }
        }
    }

    fn post(&self, connection: &impl Directed, number: usize) -> Posted {
        let (Side::Out(sender), Some(queue)) = (connection.side(), self.get(number)) else { return Posted::Nothing };
        queue.post(connection, sender, number).unwrap_or_else(|why| {
            self.fail(connection, number, &why);
            Posted::Full
        })
    }

    /// Takes in the completions of a queue pair, and gives it more.
    pub(super) fn event(&self, connection: &impl Directed, number: usize) {
        let Some(queue) = self.get(number) else { return };
        if let Err(why) = queue.arm().and_then(|()| queue.poll(connection)) {
            self.fail(connection, number, &why);
        }
        while self.next(connection, number) {}
    }

    /// Takes in the completions that came before the end of a stream.
    pub(super) fn drain(&self, connection: &impl Directed) {
        for (_, queue) in self.alive() {
            // The end of the connection says more than that of a queue pair.
            let _ = queue.poll(connection);
        }
    }

    /// Closes all queue pairs. The owner's memory is not used any more when this returns.
    pub(super) fn close(&self) {
        let _inserting = lock(&self.inserting);
        for (_, queue) in self.existing() {
            queue.close();
            queue.worker.push(Job::Remove(queue.key));
        }
    }

    /// Returns the number of fragments that have come by RDMA.
    #[cfg(test)]
    fn arrived(&self) -> u64 {
        self.existing().map(|(_, queue)| queue.done()).sum()
    }

    /// Has `listener` notified of our ports that go up or down.
    pub(super) fn listen(&self, listener: Arc<dyn PortListener>) {
        if let Some(devices) = &self.devices {
            devices.subscribe(listener);
        }
    }

    /// Returns the worker that serves a queue pair, and its key there.
    pub(super) fn served_by(&self, number: usize) -> Option<(&Arc<Worker>, u64)> {
        self.get(number).map(|queue| (&queue.worker, queue.key))
    }

    /// Returns the descriptor of a queue pair's completion events.
    pub(super) fn watched(&self, number: usize) -> Option<BorrowedFd<'_>> {
        Some(self.get(number)?.fd())
    }
}
