//! Long messages by RDMA: written from the sender's memory to that of the posted receive, and no thread copies them.
//!
//! Between two NICs with RDMA ports, the sender offers a queue pair beside its stream there
//! ([`Card`](super::frame::Card)), and the receiver answers with its own. From then on a message over 32 KiB waits
//! until the receiver has sent a receive credit with the address of its receive (a [`Room`]), as under NCCL's own
//! transport for InfiniBand. The sender requests that. While the messages of a tag are long, the receiver sends a
//! credit for each receive when it is posted; short ones should not pay for it, whose receives are often as long. A
//! message is cut into fragments of [`PIECE`] bytes, and a queue pair takes the next one when it has fewer than
//! [`DEPTH`] under way and the fragment would arrive as early over it as over any other.
//!
//! A fragment is one RDMA WRITE WITH IMMEDIATE. The immediate value names the credit and the fragment, and its
//! completion shows the receiver that the fragment is in its posted buffer. The last one of a message gives its length.
//!
//! Short messages, those of memory that is not registered, and all control frames go over the streams. So does
//! everything after the last queue pair is lost. One that fails is left as a stream is: the sender notifies the
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

use super::frame::{self, Frame, Room, Word};
use super::link::{Link, Side};
use super::load;
use super::stream::{Rail, State, Stream};
use super::worker::Task;
use crate::error::{Error, Result};
use crate::threads::lock;
use crate::transport::verbs::rails::Registered;
use crate::transport::verbs::sys::Access;
pub(super) use devices::Devices;
use queue::{Posted, Queue, Site};

/// Length of the fragments of a message, alike at both ends.
pub(super) const PIECE: usize = 512 << 10;
/// Most fragments of a queue pair in flight.
const DEPTH: usize = 8;
/// Most queue pairs in the life of a link.
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
    let registered = unsafe { devices.rails.register(base, bytes, Access::Target) };
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

/// The queue pairs of a link.
#[derive(Debug)]
pub(super) struct Queues {
    devices: Option<Arc<Devices>>,
    all: Box<[OnceLock<Queue>]>,
    /// Held while a queue pair is added, so that none comes while the link is being closed.
    making: Mutex<()>,
    /// True once it was logged that there are no more queue pairs.
    spent: AtomicBool,
}

impl Queues {
    pub(super) fn new(devices: Option<Arc<Devices>>) -> Queues {
        let most = if devices.is_some() { MOST } else { 0 };
        let all = std::iter::repeat_with(OnceLock::new).take(most).collect();
        Queues { devices, all, making: Mutex::default(), spent: AtomicBool::new(false) }
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

    fn made(&self) -> impl Iterator<Item = (usize, &Queue)> + Clone {
        self.all.iter().enumerate().filter_map(|(number, place)| Some((number, place.get()?)))
    }

    fn alive(&self) -> impl Iterator<Item = (usize, &Queue)> + Clone {
        self.made().filter(|(_, queue)| queue.life.is(State::Alive))
    }

    /// Returns true if a message of this memory may go by RDMA: it is registered, and there is a queue pair.
    pub(super) fn takes(&self, data: *const u8, len: usize) -> bool {
        self.alive().next().is_some_and(|(_, queue)| queue.keys(data, len).is_some())
    }

    /// Returns our port on the NIC pair of a stream, if there is one.
    fn site<'a>(&'a self, link: &Link, stream: Option<&'a Stream>) -> Option<Site<'a>> {
        let (devices, stream) = (self.devices.as_ref()?, stream?);
        let cable = stream.rail?;
        let timing = devices.timing(link.several());
        Some(Site { rail: devices.at(cable.ours)?, timing, cable, worker: &stream.worker })
    }

    /// Offers a queue pair beside a stream, if there is a port on its NIC pair and no queue pair yet. Returns the
    /// control frame for the peer.
    pub(super) fn offer(&self, link: &Arc<Link>, index: usize, stream: &Stream) -> Option<Frame> {
        if link.relayed() {
            return None;
        }
        let site = self.site(link, Some(stream))?;
        if self.made().any(|(_, q)| q.cable == site.cable && (q.life.is(State::New) || q.life.is(State::Alive))) {
            return None;
        }
        let Some(number) = self.all.iter().position(|place| place.get().is_none()) else {
            if !self.spent.swap(true, Ordering::Relaxed) {
                log::warn!(
                    "net: {}: {MOST} queue pairs are lost, and its messages go over TCP from now on",
                    link.name()
                );
            }
            return None;
        };
        self.keep(link, number, Queue::new(&site).map_err(|e| e.to_string())).ok()?;
        Some(self.get(number)?.card(index, number))
    }

    /// Offers queue pairs beside the streams on NIC pairs for which `on` is true, and notifies the peer.
    pub(super) fn offer_on(&self, link: &Arc<Link>, on: impl Fn(Rail) -> bool) {
        let Side::Out(_) = link.side else { return };
        let here = link.alive().filter(|(_, stream)| stream.rail.is_some_and(&on));
        let cards: Vec<Frame> = here.filter_map(|(index, stream)| self.offer(link, index, stream)).collect();
        if !cards.is_empty() {
            link.say(cards);
        }
    }

    fn keep(&self, link: &Arc<Link>, number: usize, made: Result<Queue, String>) -> Result<(), String> {
        let _making = lock(&self.making);
        if link.is_closed() {
            return Err("the connection is closed".to_owned());
        }
        let kept = made.and_then(|queue| {
            let place = self.all.get(number).ok_or_else(|| format!("expected at most {MOST} queue pairs"))?;
            place.set(queue).map_err(|_| format!("queue pair {number} exists"))
        });
        match (&kept, self.get(number)) {
            (Ok(()), Some(queue)) => {
                self.devices.iter().for_each(|devices| devices.tell(link));
                queue.worker.push(Task::Watch(link.clone(), number));
            }
            (Err(why), _) => log::warn!("net: {}: no RDMA: {why}", link.name()),
            _ => {}
        }
        kept
    }

    /// Handles a control frame of the peer's about a queue pair, or a request for a receive credit.
    #[cold]
    pub(super) fn heard(&self, link: &Arc<Link>, word: Word, frame: &Frame) -> Result<(), String> {
        match (word, &link.side) {
            (Word::Card, Side::In(_)) => {
                self.answer(link, frame);
                Ok(())
            }
            (Word::Card, Side::Out(_)) => {
                self.join(link, frame);
                Ok(())
            }
            _ if self.devices.is_none() => Err(format!("expected a word on streams alone, got {frame:x?}")),
            (Word::Left, Side::In(_)) => self.part(link, frame),
            (Word::Lost, Side::Out(_)) => {
                if let Some(number) = frame.queue() {
                    self.lose(link, number, "the peer has lost its end");
                }
                Ok(())
            }
            (Word::Agreed, Side::Out(outgoing)) => {
                let Some(queue) = frame.queue().and_then(|number| self.get(number)) else { return Ok(()) };
                let Some(left) = queue.agreed(link, frame.number)? else { return Ok(()) };
                outgoing.again(link, left);
                // Where nothing arrived, nothing would: a firewall, for example.
                let again = frame.number > 0 && self.is_up(queue.cable.ours);
                let stream = link.alive().find(|(_, s)| again && s.rail == Some(queue.cable));
                if let Some(card) = stream.and_then(|(index, stream)| self.offer(link, index, stream)) {
                    link.say(vec![card]);
                }
                Ok(())
            }
            (Word::Waits, Side::In(incoming)) => incoming.waits(link, frame),
            _ => Err(format!("expected a word on queue pairs for this end, got {frame:x?}")),
        }
    }

    /// Answers the sender's offer of a queue pair.
    fn answer(&self, link: &Arc<Link>, frame: &Frame) {
        let theirs = frame.as_card();
        let number = usize::from(theirs.queue);
        if self.get(number).is_some() {
            return;
        }
        let made = match self.site(link, link.stream(theirs.stream)) {
            Some(site) => Queue::answering(&site, &theirs),
            None => Err(match &self.devices {
                Some(devices) => format!("expected the cable of an RDMA port ({}), got another one", devices.ports()),
                None => "RDMA is off (TINYNCCL_NET_RDMA)".to_owned(),
            }),
        };
        let none = Frame::card(&frame::Card { qpn: 0, ..theirs });
        let kept = self.keep(link, number, made);
        let answer = self.get(number).filter(|_| kept.is_ok()).map(|queue| {
            log::info!("net: {}: long messages by RDMA, {}", link.name(), queue.ports);
            (queue, queue.card(theirs.stream, number))
        });
        link.say(vec![answer.as_ref().map_or(none, |(_, card)| *card)]);
        if let (Some((queue, _)), Side::In(incoming)) = (answer, &link.side)
            && queue.life.becomes(State::Alive)
        {
            incoming.tell_rooms(link);
        }
    }

    /// Handles the receiver's answer to an offer: connects the queue pair, or gives it up.
    fn join(&self, link: &Arc<Link>, frame: &Frame) {
        let theirs = frame.as_card();
        let number = usize::from(theirs.queue);
        let site = self.site(link, link.stream(theirs.stream));
        let (Some(queue), Some(site)) = (self.get(number).filter(|q| q.life.is(State::New)), site) else { return };
        if theirs.qpn == 0 {
            log::info!("net: {}: no RDMA over {}: the peer has no port there", link.name(), queue.cable);
            queue.life.becomes(State::Gone);
            queue.close();
            return;
        }
        match queue.join(site.rail, &theirs) {
            Ok(()) => {
                log::info!("net: {}: long messages by RDMA, {}", link.name(), queue.ports);
                queue.life.becomes(State::Alive);
            }
            Err(why) => self.lose(link, number, &why),
        }
    }

    /// Stops this end of a queue pair that the sender has left, and replies with the number of fragments that came over
    /// it.
    fn part(&self, link: &Arc<Link>, frame: &Frame) -> Result<(), String> {
        let number = frame.queue().ok_or("expected the number of a queue pair")?;
        let mut arrived = 0;
        if let Some(queue) = self.get(number) {
            queue.life.becomes(State::Lost);
            arrived = queue.part(link)?;
            queue.life.becomes(State::Gone);
        }
        link.say(vec![Frame::say(Word::Agreed, frame::queue(number), arrived)]);
        Ok(())
    }

    /// Gives a queue pair up, for the reason `why`.
    #[cold]
    fn lose(&self, link: &Arc<Link>, number: usize, why: &str) {
        let Some(queue) = self.get(number) else { return };
        if link.is_closed() || !queue.life.becomes(State::Lost) {
            return;
        }
        queue.stop();
        let left = self.alive().count();
        log::warn!("net: {}: RDMA {}: {why}; {left} other queue pairs and TCP carry on", link.name(), queue.ports);
        if let Side::Out(outgoing) = &link.side
            && left == 0
        {
            outgoing.leave_rooms(link);
        }
        link.restate();
    }

    /// Gives up the queue pairs of a NIC pair whose streams are all lost, which may show before they fail.
    pub(super) fn lose_cable(&self, link: &Arc<Link>, cable: Rail) {
        self.lose_on(link, |of| of == cable, "no stream gets through there");
    }

    fn lose_on(&self, link: &Arc<Link>, on: impl Fn(Rail) -> bool, why: &str) {
        for (number, _) in self.made().filter(|(_, queue)| on(queue.cable) && !queue.life.is(State::Gone)) {
            self.lose(link, number, why);
        }
    }

    /// Offers queue pairs at a port that went up, or gives up those of one that went down.
    pub(super) fn port(&self, link: &Arc<Link>, ip: IpAddr, up: bool) {
        match up {
            true => self.offer_on(link, |cable| cable.ours == ip),
            false => self.lose_on(link, |cable| cable.ours == ip, "the port is down"),
        }
    }

    /// Returns the control frames about lost queue pairs for the peer.
    pub(super) fn lost(&self, word: Word) -> impl Iterator<Item = Frame> {
        let lost = self.made().filter(|(_, queue)| queue.life.is(State::Lost));
        lost.map(move |(number, _)| Frame::say(word, frame::queue(number), 0))
    }

    /// Returns the receive credits of a posted receive: one for each queue pair, or one without a key if the memory is
    /// not registered.
    pub(super) fn rooms(&self, (tag, number): (i32, u64), data: *const u8, bytes: usize, id: u16) -> Vec<Frame> {
        let room = |key| Frame::room(tag, number, &Room { address: data.addr() as u64, bytes: bytes as u64, id, key });
        let keys = self.alive().map(|(queue, of)| Some((queue as u8, of.keys(data, bytes)?.1)));
        let keys: Option<Vec<(u8, u32)>> = keys.collect();
        match keys {
            Some(keys) => keys.into_iter().map(|key| room(Some(key))).collect(),
            None => vec![room(None)],
        }
    }

    /// Has queue pairs take what is posted and has a receive credit.
    pub(super) fn pump(&self, link: &Arc<Link>) {
        while let Some((first, _)) = self.alive().next()
            && self.next(link, first)
        {}
    }

    /// Returns the number of the queue pair over which a fragment would arrive first: this one, or another.
    fn turn(&self, number: usize) -> usize {
        let loads = self.alive().map(|(number, queue)| (number, &queue.load));
        load::turn(number, PIECE, loads).err().unwrap_or(number)
    }

    /// Posts the next fragment over the queue pair where it would arrive first, or over another if all receive credits
    /// lack the key of that one; false when there is nothing to do before the next event.
    fn next(&self, link: &Arc<Link>, number: usize) -> bool {
        let first = self.turn(number);
        match self.post(link, first) {
            Posted::Piece => true,
            Posted::Full => false,
            Posted::Nothing => self.alive().any(|(other, _)| other != first && self.post(link, other) == Posted::Piece),
        }
    }

    fn post(&self, link: &Arc<Link>, number: usize) -> Posted {
        let (Side::Out(outgoing), Some(queue)) = (&link.side, self.get(number)) else { return Posted::Nothing };
        queue.post(link, outgoing, number).unwrap_or_else(|why| {
            self.lose(link, number, &why);
            Posted::Full
        })
    }

    /// Takes in the completions of a queue pair, and gives it more.
    pub(super) fn event(&self, link: &Arc<Link>, number: usize) {
        let Some(queue) = self.get(number) else { return };
        if let Err(why) = queue.arm().and_then(|()| queue.poll(link)) {
            self.lose(link, number, &why);
        }
        while self.next(link, number) {}
    }

    /// Takes in the completions that came before the end of a stream.
    pub(super) fn settle(&self, link: &Arc<Link>) {
        for (_, queue) in self.alive() {
            // The end of the link says more than that of a queue pair.
            let _ = queue.poll(link);
        }
    }

    /// Closes all queue pairs. The owner's memory is not used any more when this returns.
    pub(super) fn close(&self, link: &Arc<Link>) {
        let _making = lock(&self.making);
        for (number, queue) in self.made() {
            queue.close();
            queue.worker.push(Task::Unwatch(link.clone(), number));
        }
    }

    /// Returns the number of fragments that have come by RDMA.
    #[cfg(test)]
    fn arrived(&self) -> u64 {
        self.made().map(|(_, queue)| queue.done()).sum()
    }

    /// Returns the descriptor of a queue pair's completion events.
    pub(super) fn watched(&self, number: usize) -> Option<BorrowedFd<'_>> {
        Some(self.get(number)?.fd())
    }
}
