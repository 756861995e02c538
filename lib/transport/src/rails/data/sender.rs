//! Posted messages, cut into fragments that streams and queue pairs take.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::rails::data::control::Cts;
use crate::rails::data::frame::{self, Frame, WHOLE, charge};
use crate::rails::data::request::{MAX_GROUP, MAX_REQUESTS};
use crate::rails::data::upcalls::{Streams, Upcalls};
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::lock;

/// Fragments per stream of a long message where NIC pairs differ in speed: the last one keeps the others waiting.
const FINER: usize = 2;

/// The memory of a posted send.
#[derive(Debug, Clone, Copy)]
pub(in crate::rails) struct Source(pub(in crate::rails) *const u8);

// SAFETY: read only, which any thread may do; it stays valid by the contract of `Sender::send`.
unsafe impl Send for Source {}

/// A posted message, or what is left of it.
#[derive(Debug)]
struct Job {
    slot: usize,
    data: Source,
    len: usize,
    at: usize,
    /// Length of its fragments.
    fragment: usize,
    tag: i32,
    number: u64,
    /// True if it goes by RDMA, once its CTS frame is here.
    rdma: bool,
}

/// CTS frames of a message that goes by RDMA: the remote buffer, and its keys.
#[derive(Debug)]
struct Credit {
    address: u64,
    bytes: u64,
    id: u16,
    /// Remote keys, each with the number of its queue pair.
    keys: Vec<(u8, u32)>,
}

/// Remote address, key and immediate value of a fragment that goes by RDMA.
pub(in crate::rails) struct RemoteBuffer {
    pub(in crate::rails) address: u64,
    pub(in crate::rails) key: u32,
    pub(in crate::rails) imm: u32,
}

/// Most CTS frames of a connection that no message has used.
const MAX_CREDITS: usize = 2 * MAX_REQUESTS * MAX_GROUP;

/// A tag of the connection.
#[derive(Debug)]
struct Tag {
    tag: i32,
    next: u64,
    sent: u64,
    placed: u64,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    tags: Vec<Tag>,
    /// Fragments that a lost stream had, and which did not arrive. They are charged to the window already.
    resend: VecDeque<Fragment>,
    /// CTS frames, by tag and message number.
    credits: HashMap<(i32, u64), Credit>,
}

/// Sending side of a connection: messages that are posted and not sent yet.
#[derive(Debug)]
pub(in crate::rails) struct SendQueue {
    queue: Mutex<Queue>,
    /// Jobs and fragments in the queue, to look at without its lock.
    pub(in crate::rails) waiting: AtomicUsize,
    chunk: usize,
    window: u64,
    inline: usize,
}

/// A fragment that is being sent.
#[derive(Debug)]
pub(in crate::rails) struct Fragment {
    pub(in crate::rails) frame: Frame,
    pub(in crate::rails) bytes: Payload,
}

/// Location of a fragment's bytes.
#[derive(Debug)]
pub(in crate::rails) enum Payload {
    /// In the memory of a posted send, whose request is open.
    Posted(usize, Source),
    /// A copy, for which the request does not wait.
    Copied(Vec<u8>),
}

impl Fragment {
    pub(in crate::rails) fn len(&self) -> usize {
        self.frame.len as usize
    }

    /// Address and length of the fragment's bytes, in a posted send's memory or in the copy.
    pub(in crate::rails) fn memory(&self) -> (*const u8, usize) {
        match &self.bytes {
            Payload::Posted(_, data) => (data.0, self.len()),
            Payload::Copied(bytes) => (bytes.as_ptr(), bytes.len()),
        }
    }

    /// The request that it belongs to, and how much of that is over with this fragment.
    pub(in crate::rails) fn share(&self) -> Option<(usize, usize)> {
        match self.bytes {
            Payload::Posted(slot, _) => Some((slot, self.len().max(1))),
            Payload::Copied(_) => None,
        }
    }
}

impl SendQueue {
    pub(in crate::rails) fn new(config: &Config) -> SendQueue {
        SendQueue {
            queue: Mutex::default(),
            waiting: AtomicUsize::new(0),
            chunk: config.net_chunk,
            window: config.net_window as u64,
            inline: config.net_inline,
        }
    }

    /// Takes a message, and writes it at once if it is short and a stream is free.
    pub(in crate::rails) fn post(&self, connection: &impl Upcalls, slot: usize, data: *const u8, len: usize, tag: i32) {
        let fragment = if len <= WHOLE {
            len
        } else {
            let (streams, uneven) = connection.spread(len);
            let parts = streams.max(1) * if uneven { FINER } else { 1 };
            len.div_ceil(parts).next_multiple_of(4 << 10).clamp(WHOLE, self.chunk)
        };
        connection.session().requests.begins(len);
        let mut rdma = len > WHOLE && connection.takes_rdma(data, len);
        let mut rts = None;
        {
            let mut queue = lock(&self.queue);
            let number = queue.tag(tag).next;
            queue.tag(tag).next += 1;
            // Under the lock: the last queue pair may be lost just now.
            rdma &= connection.has_queue_pair();
            match queue.credits.get(&(tag, number)) {
                // A message that is too long for its receive is refused there.
                Some(credit) => rdma &= credit.bytes >= len as u64 && !credit.keys.is_empty(),
                None => rts = rdma.then(|| Frame::rts(tag, number, len)),
            }
            if !rdma {
                queue.credits.remove(&(tag, number));
            }
            queue.jobs.push_back(Job { slot, data: Source(data), len, at: 0, fragment, tag, number, rdma });
            self.note(&queue);
        }
        if rdma {
            connection.pump_rdma();
            if let Some(rts) = rts {
                connection.send_control(vec![rts]);
            }
            return;
        }
        if len <= self.inline {
            connection.write_inline(len, self.inline);
        }
        if self.waiting.load(Ordering::Acquire) > 0 {
            connection.wake_some(len.div_ceil(fragment.max(1)).max(1), len);
        }
    }

    fn note(&self, queue: &Queue) {
        self.waiting.store(queue.jobs.len() + queue.resend.len(), Ordering::Release);
    }

    /// Has all streams look for something to send, if there is something.
    pub(in crate::rails) fn wake(&self, connection: &impl Streams) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            connection.wake_some(usize::MAX, usize::MAX);
        }
    }

    /// Takes the next fragment of at most `most` bytes for which its tag's window has room.
    pub(in crate::rails) fn take(&self, most: usize) -> Option<Fragment> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut queue = lock(&self.queue);
        if queue.resend.front().is_some_and(|fragment| fragment.len() <= most) {
            let fragment = queue.resend.pop_front();
            self.note(&queue);
            return fragment;
        }
        let Queue { jobs, tags, .. } = &mut *queue;
        let fits = |job: &Job| {
            if job.rdma {
                return None;
            }
            let len = (job.len - job.at).min(job.fragment);
            let tag = tags.iter().position(|t| t.tag == job.tag)?;
            let used = tags.get(tag).map(|t| t.sent - t.placed)?;
            (len <= most && used + charge(len) <= self.window).then_some((len, tag))
        };
        let (index, (len, tag)) = jobs.iter().enumerate().find_map(|(i, job)| Some((i, fits(job)?)))?;
        tags.get_mut(tag)?.sent += charge(len);
        let job = jobs.get_mut(index)?;
        let at = job.at;
        job.at += len;
        // SAFETY: `at` is at most the length of the memory.
        let data = Source(unsafe { job.data.0.add(at) });
        let frame = Frame::fragment(job.tag, job.number, job.len, at, len);
        let fragment = Fragment { frame, bytes: Payload::Posted(job.slot, data) };
        if job.at == job.len {
            jobs.remove(index);
            self.note(&queue);
        }
        Some(fragment)
    }

    /// Takes the next fragment for a queue pair: one of a message whose CTS frame is here.
    pub(in crate::rails) fn take_for(&self, number: u8) -> Option<(Fragment, RemoteBuffer)> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut queue = lock(&self.queue);
        let Queue { jobs, credits, .. } = &mut *queue;
        let found = |(index, job): (usize, &Job)| {
            let target = credits.get(&(job.tag, job.number)).filter(|_| job.rdma)?;
            let key = target.keys.iter().find(|(queue, _)| *queue == number)?.1;
            Some((index, key, target.address, target.id))
        };
        let (index, key, address, id) = jobs.iter().enumerate().find_map(found)?;
        let job = jobs.get_mut(index)?;
        let (at, len) = (job.at, (job.len - job.at).min(frame::RDMA_FRAGMENT));
        job.at += len;
        let last = job.at == job.len;
        let imm = frame::imm(id, at / frame::RDMA_FRAGMENT, last);
        // SAFETY: `at` is at most the length of the memory.
        let data = Source(unsafe { job.data.0.add(at) });
        let bytes = Payload::Posted(job.slot, data);
        let fragment = Fragment { frame: Frame::fragment(job.tag, job.number, job.len, at, len), bytes };
        if last && let Some(job) = jobs.remove(index) {
            credits.remove(&(job.tag, job.number));
            self.note(&queue);
        }
        Some((fragment, RemoteBuffer { address: address + at as u64, key, imm }))
    }

    /// Takes in a CTS frame. One for a message that goes over streams is ignored.
    pub(in crate::rails) fn handle_cts(&self, connection: &impl Upcalls, frame: &Frame) -> Result<(), String> {
        let Cts { address, bytes, id, key } = frame.as_cts();
        let at = (frame.tag, frame.number);
        {
            let mut queue = lock(&self.queue);
            let next = queue.tags.iter().find(|t| t.tag == at.0).map_or(0, |t| t.next);
            let Queue { jobs, credits, .. } = &mut *queue;
            let job = jobs.iter_mut().find(|job| job.rdma && (job.tag, job.number) == at);
            match job {
                Some(job) if key.is_none() || bytes < job.len as u64 => {
                    job.rdma = false;
                    credits.remove(&at);
                }
                None if at.1 < next => return Ok(()),
                _ => {
                    if credits.len() >= MAX_CREDITS {
                        return Err(format!("expected at most {MAX_CREDITS} posted receives"));
                    }
                    let credit = credits.entry(at).or_insert(Credit { address, bytes, id, keys: Vec::new() });
                    credit.keys.retain(|(queue, _)| Some(*queue) != key.map(|(queue, _)| queue));
                    credit.keys.extend(key);
                }
            }
        }
        connection.pump_rdma();
        self.wake(connection);
        Ok(())
    }

    /// Moves to the streams what waits for CTS frames, as the last queue pair is lost.
    pub(in crate::rails) fn fall_back_to_streams(&self, connection: &impl Streams) {
        {
            let mut queue = lock(&self.queue);
            queue.jobs.iter_mut().for_each(|job| job.rdma = false);
            queue.credits.clear();
        }
        self.wake(connection);
    }

    /// Queues fragments that did not arrive by RDMA for the streams, where they are charged to the window.
    pub(in crate::rails) fn resend(&self, connection: &impl Streams, fragments: VecDeque<Fragment>) {
        {
            let mut queue = lock(&self.queue);
            for fragment in fragments {
                queue.tag(fragment.frame.tag).sent += charge(fragment.len());
                queue.resend.push_back(fragment);
            }
            self.note(&queue);
        }
        self.wake(connection);
    }

    /// Takes in that the receiver has placed `bytes` bytes of a tag in all, as [`charge`] counts them.
    pub(in crate::rails) fn handle_window_update(
        &self,
        connection: &impl Streams,
        tag: i32,
        bytes: u64,
    ) -> Result<(), String> {
        {
            let mut queue = lock(&self.queue);
            let known = queue.tags.iter_mut().find(|t| t.tag == tag).filter(|t| bytes <= t.sent);
            let known = known.ok_or_else(|| format!("expected a report of tag {tag}, got one of {bytes} bytes"))?;
            // Reports come over several streams.
            known.placed = known.placed.max(bytes);
        }
        self.wake(connection);
        Ok(())
    }

    /// Queues fragments that a retired stream had and the receiver has not read: they go over other streams.
    pub(in crate::rails) fn resend_unacked(&self, connection: &impl Streams, unacked: VecDeque<Fragment>) {
        let rts: Vec<Frame> = {
            let mut queue = lock(&self.queue);
            queue.resend.extend(unacked);
            self.note(&queue);
            // These control frames may be lost with the stream.
            let waiting =
                queue.jobs.iter().filter(|job| job.rdma && !queue.credits.contains_key(&(job.tag, job.number)));
            waiting.map(|job| Frame::rts(job.tag, job.number, job.len)).collect()
        };
        if !rts.is_empty() {
            connection.send_control(rts);
        }
        self.wake(connection);
    }

    /// Forgets what was not begun; true when there was nothing.
    pub(in crate::rails) fn clear(&self) -> bool {
        let mut queue = lock(&self.queue);
        let whole = queue.jobs.is_empty() && queue.resend.is_empty();
        queue.jobs.clear();
        queue.resend.clear();
        queue.credits.clear();
        self.note(&queue);
        whole
    }
}

impl Queue {
    fn tag(&mut self, tag: i32) -> &mut Tag {
        let known = self.tags.iter().position(|t| t.tag == tag);
        let index = known.unwrap_or_else(|| {
            self.tags.push(Tag { tag, next: 0, sent: 0, placed: 0 });
            self.tags.len() - 1
        });
        &mut self.tags[index]
    }
}
