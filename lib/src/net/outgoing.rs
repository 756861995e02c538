//! Posted messages, cut into fragments that streams and queue pairs take.

use std::collections::{HashMap, VecDeque};
use std::net::Shutdown;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::frame::{self, Frame, Room, charge};
use super::link::Link;
use super::rdma;
use super::request::{MAX_GROUP, MAX_REQUESTS};
use super::stream::{State, Stream};
use crate::config::Config;
use crate::threads::{lock, try_lock};

/// A message is not cut below this.
pub(super) const WHOLE: usize = 32 << 10;

/// Fragments per stream of a long message where NIC pairs differ in speed: the last one keeps the others waiting.
const FINER: usize = 2;

/// The memory of a posted send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source(pub(super) *const u8);

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
    piece: usize,
    tag: i32,
    number: u64,
    /// True if it goes by RDMA, once its receive credit is here.
    rdma: bool,
}

/// Receive credits of a message that goes by RDMA: the remote buffer, and its keys.
#[derive(Debug)]
struct Target {
    address: u64,
    bytes: u64,
    id: u16,
    /// Remote keys, each with the number of its queue pair.
    keys: Vec<(u8, u32)>,
}

/// Remote address, key and immediate value of a fragment that goes by RDMA.
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) word: u32,
}

/// Most receive credits of a link that no message has used.
const MAX_ROOMS: usize = 2 * MAX_REQUESTS * MAX_GROUP;

/// A tag of the link.
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
    again: VecDeque<Piece>,
    /// Receive credits, by tag and message number.
    rooms: HashMap<(i32, u64), Target>,
}

/// Sending side of a link: messages that are posted and not sent yet.
#[derive(Debug)]
pub(super) struct Outgoing {
    queue: Mutex<Queue>,
    /// Jobs and fragments in the queue, to look at without its lock.
    pub(super) waiting: AtomicUsize,
    chunk: usize,
    window: u64,
    inline: usize,
}

/// A fragment that is being sent.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) frame: Frame,
    pub(super) bytes: Bytes,
}

/// Location of a fragment's bytes.
#[derive(Debug)]
pub(super) enum Bytes {
    /// In the memory of a posted send, whose request is open.
    Posted(usize, Source),
    /// A copy, for which the request does not wait.
    Copied(Vec<u8>),
}

impl Piece {
    pub(super) fn len(&self) -> usize {
        self.frame.len as usize
    }

    /// Address and length of the fragment's bytes, in a posted send's memory or in the copy.
    pub(super) fn memory(&self) -> (*const u8, usize) {
        match &self.bytes {
            Bytes::Posted(_, data) => (data.0, self.len()),
            Bytes::Copied(bytes) => (bytes.as_ptr(), bytes.len()),
        }
    }

    /// The request that it belongs to, and how much of that is over with this fragment.
    pub(super) fn share(&self) -> Option<(usize, usize)> {
        match self.bytes {
            Bytes::Posted(slot, _) => Some((slot, self.len().max(1))),
            Bytes::Copied(_) => None,
        }
    }
}

impl Outgoing {
    pub(super) fn new(config: &Config) -> Outgoing {
        Outgoing {
            queue: Mutex::default(),
            waiting: AtomicUsize::new(0),
            chunk: config.net_chunk,
            window: config.net_window as u64,
            inline: config.net_inline,
        }
    }

    /// Takes a message, and writes it at once if it is short and a stream is free.
    pub(super) fn post(&self, link: &Arc<Link>, slot: usize, data: *const u8, len: usize, tag: i32) {
        let piece = if len <= WHOLE {
            len
        } else {
            let parts = link.takers(len).count().max(1) * if link.is_uneven() { FINER } else { 1 };
            len.div_ceil(parts).next_multiple_of(4 << 10).clamp(WHOLE, self.chunk)
        };
        link.requests.begins(len);
        let mut rdma = len > WHOLE && link.rdma.takes(data, len);
        let mut waits = None;
        {
            let mut queue = lock(&self.queue);
            let number = queue.tag(tag).next;
            queue.tag(tag).next += 1;
            // Under the lock: the last queue pair may be lost just now.
            rdma &= link.rdma.any();
            match queue.rooms.get(&(tag, number)) {
                // A message that is too long for its receive is refused there.
                Some(room) => rdma &= room.bytes >= len as u64 && !room.keys.is_empty(),
                None => waits = rdma.then(|| Frame::waits(tag, number, len)),
            }
            if !rdma {
                queue.rooms.remove(&(tag, number));
            }
            queue.jobs.push_back(Job { slot, data: Source(data), len, at: 0, piece, tag, number, rdma });
            self.note(&queue);
        }
        if rdma {
            link.rdma.pump(link);
            if let Some(word) = waits {
                link.say(vec![word]);
            }
            return;
        }
        if len <= self.inline {
            for (index, stream) in link.takers(len) {
                if link.several() && link.turn(index, len).is_err() {
                    continue;
                }
                let Some(mut output) = try_lock(&stream.output) else { continue };
                if output.is_idle() {
                    output.pump(link, index, self.inline);
                    break;
                }
            }
        }
        if self.waiting.load(Ordering::Acquire) > 0 {
            link.wake_some(len.div_ceil(piece.max(1)).max(1), len);
        }
    }

    fn note(&self, queue: &Queue) {
        self.waiting.store(queue.jobs.len() + queue.again.len(), Ordering::Release);
    }

    /// Has all streams look for something to send, if there is something.
    pub(super) fn wake(&self, link: &Arc<Link>) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            link.wake_some(usize::MAX, usize::MAX);
        }
    }

    /// Takes the next fragment of at most `most` bytes for which its tag's window has room.
    pub(super) fn take(&self, most: usize) -> Option<Piece> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut queue = lock(&self.queue);
        if queue.again.front().is_some_and(|piece| piece.len() <= most) {
            let piece = queue.again.pop_front();
            self.note(&queue);
            return piece;
        }
        let Queue { jobs, tags, .. } = &mut *queue;
        let room = |job: &Job| {
            if job.rdma {
                return None;
            }
            let len = (job.len - job.at).min(job.piece);
            let tag = tags.iter().position(|t| t.tag == job.tag)?;
            let used = tags.get(tag).map(|t| t.sent - t.placed)?;
            (len <= most && used + charge(len) <= self.window).then_some((len, tag))
        };
        let (index, (len, tag)) = jobs.iter().enumerate().find_map(|(i, job)| Some((i, room(job)?)))?;
        tags.get_mut(tag)?.sent += charge(len);
        let job = jobs.get_mut(index)?;
        let at = job.at;
        job.at += len;
        // SAFETY: `at` is at most the length of the memory.
        let data = Source(unsafe { job.data.0.add(at) });
        let frame = Frame::piece(job.tag, job.number, job.len, at, len);
        let piece = Piece { frame, bytes: Bytes::Posted(job.slot, data) };
        if job.at == job.len {
            jobs.remove(index);
            self.note(&queue);
        }
        Some(piece)
    }

    /// Takes the next fragment for a queue pair: one of a message whose receive credit is here.
    pub(super) fn take_for(&self, number: u8) -> Option<(Piece, Place)> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut queue = lock(&self.queue);
        let Queue { jobs, rooms, .. } = &mut *queue;
        let found = |(index, job): (usize, &Job)| {
            let target = rooms.get(&(job.tag, job.number)).filter(|_| job.rdma)?;
            let key = target.keys.iter().find(|(queue, _)| *queue == number)?.1;
            Some((index, key, target.address, target.id))
        };
        let (index, key, address, id) = jobs.iter().enumerate().find_map(found)?;
        let job = jobs.get_mut(index)?;
        let (at, len) = (job.at, (job.len - job.at).min(rdma::PIECE));
        job.at += len;
        let last = job.at == job.len;
        let word = frame::imm(id, at / rdma::PIECE, last);
        // SAFETY: `at` is at most the length of the memory.
        let data = Source(unsafe { job.data.0.add(at) });
        let bytes = Bytes::Posted(job.slot, data);
        let piece = Piece { frame: Frame::piece(job.tag, job.number, job.len, at, len), bytes };
        if last && let Some(job) = jobs.remove(index) {
            rooms.remove(&(job.tag, job.number));
            self.note(&queue);
        }
        Some((piece, Place { address: address + at as u64, key, word }))
    }

    /// Takes in a receive credit. One for a message that goes over streams is ignored.
    pub(super) fn room(&self, link: &Arc<Link>, frame: &Frame) -> Result<(), String> {
        let Room { address, bytes, id, key } = frame.as_room();
        let at = (frame.tag, frame.number);
        {
            let mut queue = lock(&self.queue);
            let next = queue.tags.iter().find(|t| t.tag == at.0).map_or(0, |t| t.next);
            let Queue { jobs, rooms, .. } = &mut *queue;
            let job = jobs.iter_mut().find(|job| job.rdma && (job.tag, job.number) == at);
            match job {
                Some(job) if key.is_none() || bytes < job.len as u64 => {
                    job.rdma = false;
                    rooms.remove(&at);
                }
                None if at.1 < next => return Ok(()),
                _ => {
                    if rooms.len() >= MAX_ROOMS {
                        return Err(format!("expected at most {MAX_ROOMS} posted receives"));
                    }
                    let room = rooms.entry(at).or_insert(Target { address, bytes, id, keys: Vec::new() });
                    room.keys.retain(|(queue, _)| Some(*queue) != key.map(|(queue, _)| queue));
                    room.keys.extend(key);
                }
            }
        }
        link.rdma.pump(link);
        self.wake(link);
        Ok(())
    }

    /// Moves to the streams what waits for receive credits, as the last queue pair is lost.
    pub(super) fn leave_rooms(&self, link: &Arc<Link>) {
        {
            let mut queue = lock(&self.queue);
            queue.jobs.iter_mut().for_each(|job| job.rdma = false);
            queue.rooms.clear();
        }
        self.wake(link);
    }

    /// Queues fragments that did not arrive by RDMA for the streams, where they are charged to the window.
    pub(super) fn again(&self, link: &Arc<Link>, pieces: VecDeque<Piece>) {
        {
            let mut queue = lock(&self.queue);
            for piece in pieces {
                queue.tag(piece.frame.tag).sent += charge(piece.len());
                queue.again.push_back(piece);
            }
            self.note(&queue);
        }
        self.wake(link);
    }

    /// Takes in that the receiver has placed `bytes` bytes of a tag in all, as [`charge`] counts them.
    pub(super) fn placed(&self, link: &Arc<Link>, tag: i32, bytes: u64) -> Result<(), String> {
        {
            let mut queue = lock(&self.queue);
            let known = queue.tags.iter_mut().find(|t| t.tag == tag).filter(|t| bytes <= t.sent);
            let known = known.ok_or_else(|| format!("expected a report of tag {tag}, got one of {bytes} bytes"))?;
            // Reports come over several streams.
            known.placed = known.placed.max(bytes);
        }
        self.wake(link);
        Ok(())
    }

    /// Takes in that the receiver has read `pieces` fragments from a stream in all.
    pub(super) fn read(&self, link: &Arc<Link>, stream: &Stream, pieces: u64) -> Result<(), String> {
        {
            let mut output = lock(&stream.output);
            // What was sent last over a stream that others replace is read late.
            if stream.is(State::Gone) {
                return Ok(());
            }
            output.read(link, stream, pieces)?;
        }
        self.wake(link);
        Ok(())
    }

    /// Takes in that the receiver has read `pieces` fragments from a lost stream, and reads no more from it: the other
    /// fragments go over other streams.
    pub(super) fn agreed(&self, link: &Arc<Link>, stream: &Stream, pieces: u64) -> Result<(), String> {
        let left = {
            let mut output = lock(&stream.output);
            if !stream.is(State::Lost) {
                // The peer sent this twice.
                return Ok(());
            }
            output.read(link, stream, pieces)?;
            stream.becomes(State::Gone);
            stream.shut(Shutdown::Both);
            output.leave(link, stream)
        };
        let waits: Vec<Frame> = {
            let mut queue = lock(&self.queue);
            queue.again.extend(left);
            self.note(&queue);
            // These control frames may be lost with the stream.
            let waiting = queue.jobs.iter().filter(|job| job.rdma && !queue.rooms.contains_key(&(job.tag, job.number)));
            waiting.map(|job| Frame::waits(job.tag, job.number, job.len)).collect()
        };
        if !waits.is_empty() {
            link.say(waits);
        }
        self.wake(link);
        Ok(())
    }

    /// Forgets what was not begun; true when there was nothing.
    pub(super) fn clear(&self) -> bool {
        let mut queue = lock(&self.queue);
        let whole = queue.jobs.is_empty() && queue.again.is_empty();
        queue.jobs.clear();
        queue.again.clear();
        queue.rooms.clear();
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
