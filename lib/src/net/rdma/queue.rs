//! One queue pair of a link, and the fragments in flight on it.

use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::frame::{Card, Frame};
use super::super::link::{Link, Side};
use super::super::load::Load;
use super::super::outgoing::{Outgoing, Piece};
use super::super::stream::{Life, Rail as Cable, State};
use super::super::worker::Worker;
use super::DEPTH;
use crate::error::Result;
use crate::threads::lock;
use crate::transport::verbs::rails::{Device, Rail};
use crate::transport::verbs::sys::{Capacity, Channel, Cq, Outcome, Qp, Sge, Timing, Write, status};

/// Port, timing, addresses and worker thread of a queue pair that is to be made.
pub(super) struct Site<'a> {
    pub(super) rail: &'a Rail,
    pub(super) timing: Timing,
    pub(super) cable: Cable,
    pub(super) worker: &'a Arc<Worker>,
}

/// Receives of the receiving end, more than the sender has in flight: they are posted again a few at a time.
const RECEIVES: usize = 4 * DEPTH;
/// Number of receives above which no more are posted.
const ENOUGH: usize = 3 * DEPTH;
/// Retries without limit (7) for a peer that is slow to take its completions. One that is gone answers nothing.
const FOR_EVER: u8 = 7;
/// Longest time that a stopped queue pair may take to give back its receives.
const STOPPED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) life: Life,
    /// The NIC pair of the stream beside it.
    pub(super) cable: Cable,
    /// Our port and the peer's address, as text.
    pub(super) ports: String,
    pub(super) worker: Arc<Worker>,
    device: Arc<Device>,
    gid: [u8; 16],
    mtu: u32,
    qpn: u32,
    psn: u32,
    timing: Timing,
    cq: Arc<Cq>,
    pub(super) load: Load,
    work: Mutex<Work>,
}

#[derive(Debug)]
struct Work {
    /// `None` once it is closed.
    qp: Option<Qp>,
    /// Fragments that were posted and are not known to have arrived, oldest first.
    sent: VecDeque<Piece>,
    /// Fragments that have arrived.
    done: u64,
    /// Receives that are posted.
    receives: usize,
}

/// Outcome of [`Queue::post`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Posted {
    Piece,
    /// No fragment is posted whose receive credit has a key for this queue pair.
    Nothing,
    /// The queue pair takes no fragment now.
    Full,
}

impl Queue {
    /// Makes a queue pair that is initialised, at a port of ours.
    pub(super) fn new(site: &Site<'_>) -> Result<Queue> {
        let (device, port, cable) = (&site.rail.device, &site.rail.port, site.cable);
        let context = device.pd.context();
        let cq = Cq::new(context, Channel::new(context)?, DEPTH + RECEIVES)?;
        let qp = Qp::new(&device.pd, &cq, &Capacity { sends: DEPTH as u32, recvs: RECEIVES as u32, inline: 0 })?;
        qp.init(port.address.port)?;
        cq.request_event()?;
        let psn = Qp::random_psn()?;
        Ok(Queue {
            life: Life::new(State::New),
            cable,
            ports: format!("{} to {}", port.address, cable.theirs),
            worker: site.worker.clone(),
            device: device.clone(),
            gid: port.address.gid,
            mtu: port.mtu,
            qpn: qp.number(),
            psn,
            timing: Timing { rnr_retries: FOR_EVER, ..site.timing },
            cq,
            load: Load::default(),
            work: Mutex::new(Work { qp: Some(qp), sent: VecDeque::new(), done: 0, receives: 0 }),
        })
    }

    /// Makes a queue pair that receives from the queue pair of `theirs`, which is at the other end of the stream's NIC
    /// pair.
    pub(super) fn answering(site: &Site<'_>, theirs: &Card) -> Result<Queue, String> {
        let queue = Queue::new(site).map_err(|e| e.to_string())?;
        {
            let mut work = lock(&queue.work);
            let Work { qp: Some(qp), receives, .. } = &mut *work else { return Err("it is closed".to_owned()) };
            qp.post_receives(RECEIVES, 0).map_err(|e| e.to_string())?;
            *receives = RECEIVES;
            queue.take_from(site.rail, qp, theirs)?;
        }
        Ok(queue)
    }

    fn take_from(&self, rail: &Rail, qp: &Qp, theirs: &Card) -> Result<(), String> {
        let ip = Ipv6Addr::from(theirs.gid).to_canonical();
        if ip != self.cable.theirs || !(1..=5).contains(&theirs.mtu) {
            return Err(format!("expected the card of a port at {}, got {theirs:x?}", self.cable.theirs));
        }
        let to = rail.remote((theirs.qpn, theirs.psn), theirs.gid, 0, u32::from(theirs.mtu));
        qp.ready_to_receive(&to).map_err(|e| e.to_string())
    }

    /// Makes the sending end ready, once the receiver has answered.
    pub(super) fn join(&self, rail: &Rail, theirs: &Card) -> Result<(), String> {
        let work = lock(&self.work);
        let Some(qp) = &work.qp else { return Err("it is closed".to_owned()) };
        self.take_from(rail, qp, theirs)?;
        qp.ready_to_send(self.psn, &self.timing).map_err(|e| e.to_string())
    }

    pub(super) fn card(&self, stream: usize, number: usize) -> Frame {
        let Queue { qpn, psn, gid, mtu, .. } = *self;
        Frame::card(&Card { stream, queue: number as u8, qpn, psn, mtu: mtu as u8, gid })
    }

    /// Returns the keys of registered memory, for our device and for the peer's.
    pub(super) fn keys(&self, data: *const u8, len: usize) -> Option<(u32, u32)> {
        self.device.registered.keys(data, len)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.cq.as_fd()
    }

    /// Takes the completion event that has come, and requests the next one.
    pub(super) fn arm(&self) -> Result<(), String> {
        self.cq.drain_events().map_err(|e| e.to_string())?;
        self.cq.request_event().map_err(|e| e.to_string())
    }

    /// Posts the next fragment, if there is one for it; an error is the end of the queue pair.
    pub(super) fn post(&self, link: &Link, outgoing: &Outgoing, number: usize) -> Result<Posted, String> {
        let mut work = lock(&self.work);
        let Work { qp: Some(qp), sent, .. } = &mut *work else { return Ok(Posted::Full) };
        if sent.len() >= DEPTH || !self.life.is(State::Alive) || link.is_closed() {
            return Ok(Posted::Full);
        }
        let Some((piece, to)) = outgoing.take_for(number as u8) else { return Ok(Posted::Nothing) };
        let (data, len) = piece.memory();
        self.load.leave(len);
        // It is sent again in any case.
        sent.push_back(piece);
        let keys = self.keys(data, len).zip(NonNull::new(data.cast_mut()));
        let Some(((lkey, _), at)) = keys else {
            return Err(format!("{len} bytes of a message were deregistered before they were sent"));
        };
        let write = Write {
            from: Sge { at, len: len as u32, lkey },
            then: None,
            remote: to.address,
            word: to.word,
            signaled: true,
            inline: false,
        };
        // SAFETY: part of a posted send, valid until its request is done, which is after its completion; `close` ends
        // the queue pair before.
        unsafe { qp.post_write(0, to.key, &write) }.map_err(|e| e.to_string())?;
        Ok(Posted::Piece)
    }

    /// Takes in completions. An error is the end of the queue pair.
    pub(super) fn poll(&self, link: &Link) -> Result<(), String> {
        let mut work = lock(&self.work);
        let mut failed = None;
        loop {
            let batch = self.cq.poll().map_err(|e| e.to_string())?;
            for completion in batch.iter() {
                if let Err(why) = work.complete(link, completion.outcome, self) {
                    failed.get_or_insert(why);
                }
            }
            if batch.len() < Cq::BATCH {
                break;
            }
        }
        // One that is being stopped fails because of that.
        if let Some(why) = failed.filter(|_| self.life.is(State::Alive)) {
            return Err(why);
        }
        if self.life.is(State::Alive)
            && let Side::In(_) = link.side
            && work.receives <= ENOUGH
            && let Some(qp) = &work.qp
        {
            let more = RECEIVES - work.receives;
            qp.post_receives(more, 0).map_err(|e| e.to_string())?;
            work.receives = RECEIVES;
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn done(&self) -> u64 {
        lock(&self.work).done
    }

    /// Stops the queue pair: nothing is sent or received any more.
    pub(super) fn stop(&self) {
        if let Some(Err(e)) = lock(&self.work).qp.as_ref().map(Qp::stop) {
            log::warn!("net: {}: {e}", self.ports);
        }
    }

    /// Stops the receiving end, and returns the number of fragments that have arrived, of which there will not be more.
    pub(super) fn part(&self, link: &Link) -> Result<u64, String> {
        self.stop();
        let until = Instant::now() + STOPPED;
        loop {
            let _ = self.poll(link);
            let mut work = lock(&self.work);
            if work.receives == 0 || work.qp.is_none() {
                work.qp = None;
                return Ok(work.done);
            }
            if Instant::now() > until {
                return Err(format!("{}: a stopped queue pair keeps {} receives", self.ports, work.receives));
            }
            drop(work);
            std::thread::yield_now();
        }
    }

    /// Takes in that the receiver has got `arrived` fragments over this lost queue pair, and returns the others, for
    /// the streams. `None` if this is known already.
    pub(super) fn agreed(&self, link: &Link, arrived: u64) -> Result<Option<VecDeque<Piece>>, String> {
        // What is known here to have arrived is taken in first.
        let _ = self.poll(link);
        let mut work = lock(&self.work);
        if !self.life.is(State::Lost) {
            // The peer sent this twice.
            return Ok(None);
        }
        let known = work.done;
        let more = arrived.checked_sub(known).filter(|more| *more <= work.sent.len() as u64);
        let more = more.ok_or_else(|| format!("expected {known} pieces or more to have arrived, got {arrived}"))?;
        for _ in 0..more {
            work.arrived(link, self);
        }
        self.life.becomes(State::Gone);
        work.qp = None;
        Ok(Some(std::mem::take(&mut work.sent)))
    }

    /// Closes the queue pair. The device does not access any memory any more when this returns.
    pub(super) fn close(&self) {
        let mut work = lock(&self.work);
        work.qp = None;
        work.sent.clear();
    }
}

impl Work {
    /// Finishes the oldest fragment, which has arrived.
    fn arrived(&mut self, link: &Link, of: &Queue) {
        self.done += 1;
        let Some(piece) = self.sent.pop_front() else { return };
        of.load.arrive(piece.memory().1);
        if let Some((slot, amount)) = piece.share()
            && let Some(request) = link.requests.get(slot)
        {
            request.finish(amount);
        }
    }

    fn complete(&mut self, link: &Link, outcome: Outcome, of: &Queue) -> Result<(), String> {
        match (outcome, &link.side) {
            (Outcome::Sent, Side::Out(_)) => self.arrived(link, of),
            (Outcome::Written { len, word }, Side::In(incoming)) => {
                self.receives -= 1;
                self.done += 1;
                if let Err(detail) = incoming.written(link, word, len) {
                    link.fail(detail);
                }
            }
            (Outcome::Failed { status, vendor }, side) => {
                if matches!(side, Side::In(_)) {
                    self.receives -= 1;
                }
                return Err(status::completion(status, vendor, &of.timing));
            }
            (other, _) => return Err(format!("expected a write's completion, got {other:?}")),
        }
        Ok(())
    }
}
