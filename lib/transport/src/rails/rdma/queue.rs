//! One queue pair of a connection, and the fragments in flight on it.

use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::DEPTH;
use crate::rails::data::control::QpInfo;
use crate::rails::data::frame::Frame;
use crate::rails::data::sender::{Fragment, SendQueue};
use crate::rails::data::side::{Directed, Side};
use crate::rails::failover::slot::{State, StateCell};
use crate::rails::stream::Rail;
use crate::rails::stream::rate::Load;
use crate::rails::worker::thread::Worker;
use crate::verbs::nics::{Device, Nic};
use crate::verbs::sys::{Capacity, Channel, Cq, Outcome, Qp, Sge, Timing, Write, status};
use tinynccl_plan::error::Result;
use tinynccl_sys::threads::lock;

/// Port, timing, addresses and worker thread of a queue pair that is to be made.
pub(super) struct Site<'a> {
    pub(super) nic: &'a Nic,
    pub(super) timing: Timing,
    pub(super) rail: Rail,
    pub(super) worker: &'a Arc<Worker>,
}

/// Receives of the receiving end, more than the sender has in flight: they are posted again a few at a time.
const RECEIVES: usize = 4 * DEPTH;
/// Number of receives above which no more are posted.
const ENOUGH: usize = 3 * DEPTH;
/// Retries without limit (7) for a peer that is slow to take its completions. One that is gone answers nothing.
const UNLIMITED: u8 = 7;
/// Longest time that a stopped queue pair may take to give back its receives.
const STOPPED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) state: StateCell,
    /// The NIC pair of the stream beside it.
    pub(super) rail: Rail,
    /// Our port and the peer's address, as text.
    pub(super) ports: String,
    pub(super) worker: Arc<Worker>,
    /// Key of its completion events at the worker.
    pub(super) key: u64,
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
    sent: VecDeque<Fragment>,
    /// Fragments that have arrived.
    done: u64,
    /// Receives that are posted.
    receives: usize,
}

/// Outcome of [`Queue::post`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Posted {
    Fragment,
    /// No fragment is posted whose CTS frame has a key for this queue pair.
    Nothing,
    /// The queue pair takes no fragment now.
    Full,
}

impl Queue {
    /// Makes a queue pair that is initialised, at a port of ours.
    pub(super) fn new(site: &Site<'_>) -> Result<Queue> {
        let (device, port, rail) = (&site.nic.device, &site.nic.port, site.rail);
        let context = device.pd.context();
        let cq = Cq::new(context, Channel::new(context)?, DEPTH + RECEIVES)?;
        let qp = Qp::new(&device.pd, &cq, &Capacity { sends: DEPTH as u32, recvs: RECEIVES as u32, inline: 0 })?;
        qp.init(port.address.port)?;
        cq.request_event()?;
        let psn = Qp::random_psn()?;
        Ok(Queue {
            state: StateCell::new(State::New),
            rail,
            ports: format!("{} to {}", port.address, rail.theirs),
            worker: site.worker.clone(),
            key: site.worker.new_key(),
            device: device.clone(),
            gid: port.address.gid,
            mtu: port.mtu,
            qpn: qp.number(),
            psn,
            timing: Timing { rnr_retries: UNLIMITED, ..site.timing },
            cq,
            load: Load::default(),
            work: Mutex::new(Work { qp: Some(qp), sent: VecDeque::new(), done: 0, receives: 0 }),
        })
    }

    /// Makes a queue pair that receives from the queue pair of `theirs`, which is at the other end of the stream's NIC
    /// pair.
    pub(super) fn answering(site: &Site<'_>, theirs: &QpInfo) -> Result<Queue, String> {
        let queue = Queue::new(site).map_err(|e| e.to_string())?;
        {
            let mut work = lock(&queue.work);
            let Work { qp: Some(qp), receives, .. } = &mut *work else { return Err("it is closed".to_owned()) };
            qp.post_receives(RECEIVES, 0).map_err(|e| e.to_string())?;
            *receives = RECEIVES;
            queue.take_from(site.nic, qp, theirs)?;
        }
        Ok(queue)
    }

    fn take_from(&self, nic: &Nic, qp: &Qp, theirs: &QpInfo) -> Result<(), String> {
        let ip = Ipv6Addr::from(theirs.gid).to_canonical();
        if ip != self.rail.theirs || !(1..=5).contains(&theirs.mtu) {
            return Err(format!("expected the queue pair of a port at {}, got {theirs:x?}", self.rail.theirs));
        }
        let to = nic.remote((theirs.qpn, theirs.psn), theirs.gid, 0, u32::from(theirs.mtu));
        qp.ready_to_receive(&to).map_err(|e| e.to_string())
    }

    /// Makes the sending end ready, once the receiver has answered.
    pub(super) fn complete(&self, nic: &Nic, theirs: &QpInfo) -> Result<(), String> {
        let work = lock(&self.work);
        let Some(qp) = &work.qp else { return Err("it is closed".to_owned()) };
        self.take_from(nic, qp, theirs)?;
        qp.ready_to_send(self.psn, &self.timing).map_err(|e| e.to_string())
    }

    pub(super) fn qp_info(&self, stream: usize, number: usize) -> Frame {
        let Queue { qpn, psn, gid, mtu, .. } = *self;
        Frame::qp_info(&QpInfo { stream, queue: number as u8, qpn, psn, mtu: mtu as u8, gid })
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
    pub(super) fn post(&self, connection: &impl Directed, sender: &SendQueue, number: usize) -> Result<Posted, String> {
        let mut work = lock(&self.work);
        let Work { qp: Some(qp), sent, .. } = &mut *work else { return Ok(Posted::Full) };
        if sent.len() >= DEPTH || !self.state.is(State::Alive) || connection.session().is_closed() {
            return Ok(Posted::Full);
        }
        let Some((fragment, to)) = sender.take_for(number as u8) else { return Ok(Posted::Nothing) };
        let (data, len) = fragment.memory();
        self.load.sent(len);
        // It is sent again in any case.
        sent.push_back(fragment);
        let keys = self.keys(data, len).zip(NonNull::new(data.cast_mut()));
        let Some(((lkey, _), at)) = keys else {
            return Err(format!("{len} bytes of a message were deregistered before they were sent"));
        };
        let write = Write {
            from: Sge { at, len: len as u32, lkey },
            then: None,
            remote: to.address,
            word: to.imm,
            signaled: true,
            inline: false,
        };
        // SAFETY: part of a posted send, valid until its request is done, which is after its completion; `close` ends
        // the queue pair before.
        unsafe { qp.post_write(0, to.key, &write) }.map_err(|e| e.to_string())?;
        Ok(Posted::Fragment)
    }

    /// Takes in completions. An error is the end of the queue pair.
    pub(super) fn poll(&self, connection: &impl Directed) -> Result<(), String> {
        let mut work = lock(&self.work);
        let mut failed = None;
        loop {
            let batch = self.cq.poll().map_err(|e| e.to_string())?;
            for completion in batch.iter() {
                if let Err(why) = work.complete(connection, completion.outcome, self) {
                    failed.get_or_insert(why);
                }
            }
            if batch.len() < Cq::BATCH {
                break;
            }
        }
        // One that is being stopped fails because of that.
        if let Some(why) = failed.filter(|_| self.state.is(State::Alive)) {
            return Err(why);
        }
        if self.state.is(State::Alive)
            && let Side::In(_) = connection.side()
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
    pub(super) fn stop_and_count(&self, connection: &impl Directed) -> Result<u64, String> {
        self.stop();
        let until = Instant::now() + STOPPED;
        loop {
            let _ = self.poll(connection);
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
    pub(super) fn handle_retire_ack(
        &self,
        connection: &impl Directed,
        arrived: u64,
    ) -> Result<Option<VecDeque<Fragment>>, String> {
        // What is known here to have arrived is taken in first.
        let _ = self.poll(connection);
        let mut work = lock(&self.work);
        if !self.state.is(State::Retiring) {
            // The peer sent this twice.
            return Ok(None);
        }
        let known = work.done;
        let more = arrived.checked_sub(known).filter(|more| *more <= work.sent.len() as u64);
        let more = more.ok_or_else(|| format!("expected {known} fragments or more to have arrived, got {arrived}"))?;
        for _ in 0..more {
            work.arrived(connection, self);
        }
        self.state.advance(State::Retired);
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
    fn arrived(&mut self, connection: &impl Directed, of: &Queue) {
        self.done += 1;
        let Some(fragment) = self.sent.pop_front() else { return };
        of.load.arrived(fragment.memory().1);
        if let Some((slot, amount)) = fragment.share()
            && let Some(request) = connection.session().requests.get(slot)
        {
            request.finish(amount);
        }
    }

    fn complete(&mut self, connection: &impl Directed, outcome: Outcome, of: &Queue) -> Result<(), String> {
        match (outcome, connection.side()) {
            (Outcome::Sent, Side::Out(_)) => self.arrived(connection, of),
            (Outcome::Written { len, word: imm }, Side::In(receiver)) => {
                self.receives -= 1;
                self.done += 1;
                if let Err(detail) = receiver.written(connection, imm, len) {
                    connection.fail(detail);
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
