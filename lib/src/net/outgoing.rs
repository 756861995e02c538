//! Posted messages, cut into pieces that the streams take; and the writing of them.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::frame::{Frame, charge};
use super::link::{Left, Link, Side};
use crate::config::Config;
use crate::threads::{lock, try_lock};

/// A message is not cut below this.
const WHOLE: usize = 32 << 10;
/// A piece that is copied behind its frame, as one place costs the kernel less than two.
const COPIED: usize = 2 << 10;
/// What a stream writes before others of its thread have their turn.
const TURN: usize = 2 << 20;

/// The memory of a posted send.
#[derive(Debug, Clone, Copy)]
struct Source(*const u8);

// SAFETY: read only, which any thread may do; it stays valid by the contract of `Sender::send`.
unsafe impl Send for Source {}

/// A posted message, or what is left of it.
#[derive(Debug)]
struct Job {
    slot: usize,
    data: Source,
    len: usize,
    at: usize,
    /// Length of its pieces.
    piece: usize,
    tag: i32,
    number: u64,
}

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
}

/// What is posted and not sent yet.
#[derive(Debug)]
pub(super) struct Outgoing {
    queue: Mutex<Queue>,
    /// Jobs in the queue, to look at without its lock.
    waiting: AtomicUsize,
    chunk: usize,
    window: u64,
    inline: usize,
}

/// A piece on its way.
struct Piece {
    frame: Frame,
    slot: usize,
    data: Source,
    len: usize,
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
            len.div_ceil(link.streams.len()).next_multiple_of(4 << 10).clamp(WHOLE, self.chunk)
        };
        {
            let mut queue = lock(&self.queue);
            let number = queue.tag(tag).next;
            queue.tag(tag).next += 1;
            queue.jobs.push_back(Job { slot, data: Source(data), len, at: 0, piece, tag, number });
            self.waiting.store(queue.jobs.len(), Ordering::Release);
        }
        if len <= self.inline {
            for (index, stream) in link.streams.iter().enumerate() {
                let Some(mut output) = try_lock(&stream.output) else { continue };
                if output.is_idle() {
                    output.pump(link, index, self.inline);
                    break;
                }
            }
        }
        if self.waiting.load(Ordering::Acquire) > 0 {
            link.wake_some(len.div_ceil(piece.max(1)).max(1));
        }
    }

    /// The next piece of at most `most` bytes for which its tag has room.
    fn take(&self, most: usize) -> Option<Piece> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut queue = lock(&self.queue);
        let Queue { jobs, tags } = &mut *queue;
        let room = |job: &Job| {
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
        let piece = Piece { frame: Frame::piece(job.tag, job.number, job.len, at, len), slot: job.slot, data, len };
        if job.at == job.len {
            jobs.remove(index);
            self.waiting.store(jobs.len(), Ordering::Release);
        }
        Some(piece)
    }

    /// The receiver has placed so much of a tag.
    pub(super) fn placed(&self, link: &Arc<Link>, tag: i32, bytes: u64) -> Result<(), String> {
        {
            let mut queue = lock(&self.queue);
            let known = queue.tags.iter_mut().find(|t| t.tag == tag).filter(|t| bytes <= t.sent);
            let known = known.ok_or_else(|| format!("expected a report of tag {tag}, got one of {bytes} bytes"))?;
            // Reports come over several streams.
            known.placed = known.placed.max(bytes);
        }
        if self.waiting.load(Ordering::Acquire) > 0 {
            link.wake_some(link.streams.len());
        }
        Ok(())
    }

    /// Forgets what was not begun; true when there was nothing.
    pub(super) fn clear(&self) -> bool {
        let mut queue = lock(&self.queue);
        let whole = queue.jobs.is_empty();
        queue.jobs.clear();
        self.waiting.store(0, Ordering::Release);
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

/// What a stream is writing.
#[derive(Debug)]
pub(super) struct Output {
    /// A frame, and what was copied behind it.
    head: Vec<u8>,
    head_at: usize,
    /// The rest of the piece, where the caller has it.
    data: Source,
    len: usize,
    at: usize,
    /// The request that it belongs to, and how much of it is over when it is written.
    done: Option<(usize, usize)>,
    blocked: bool,
}

impl Default for Output {
    fn default() -> Self {
        Output {
            head: Vec::new(),
            head_at: 0,
            data: Source(std::ptr::null()),
            len: 0,
            at: 0,
            done: None,
            blocked: false,
        }
    }
}

impl Output {
    fn is_idle(&self) -> bool {
        !self.blocked && self.head_at == self.head.len() && self.at == self.len
    }

    /// The socket takes more again.
    pub(super) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Forgets the piece; true when there was none.
    pub(super) fn clear(&mut self) -> bool {
        let whole = self.head_at == self.head.len() && self.at == self.len;
        *self = Output::default();
        whole
    }

    /// Writes until there is nothing of at most `most` bytes, the kernel takes no more, or the turn is over.
    pub(super) fn pump(&mut self, link: &Arc<Link>, stream: usize, most: usize) -> Left {
        let Some(socket) = link.streams.get(stream) else { return Left::Nothing };
        let mut written = 0;
        while !self.blocked && !link.is_closed() {
            if self.is_idle() {
                if written >= TURN {
                    return Left::More;
                }
                if !self.load(link, most) {
                    return Left::Nothing;
                }
            }
            match self.write(socket) {
                Ok(n) => written += n,
                Err(Errno::AGAIN) => self.blocked = true,
                Err(Errno::INTR) => {}
                Err(e) => {
                    let e = std::io::Error::from(e);
                    link.fail(format!(
                        "writing to stream {stream}: {e}; look at that rank's output for the first error"
                    ));
                    return Left::Nothing;
                }
            }
            if self.head_at == self.head.len()
                && self.at == self.len
                && let Some((slot, amount)) = self.done.take()
                && let Some(request) = link.requests.get(slot)
            {
                request.finish(amount);
            }
        }
        Left::Nothing
    }

    /// The next thing to write, if there is one.
    fn load(&mut self, link: &Link, most: usize) -> bool {
        self.head.clear();
        (self.head_at, self.at, self.len) = (0, 0, 0);
        match &link.side {
            Side::In(incoming) => match incoming.report() {
                Some(frame) => self.head.extend(bytemuck::bytes_of(&frame)),
                None => return false,
            },
            Side::Out(outgoing) => {
                let Some(piece) = outgoing.take(most) else { return false };
                self.head.extend(bytemuck::bytes_of(&piece.frame));
                self.done = Some((piece.slot, piece.len.max(1)));
                if piece.len <= COPIED && piece.len > 0 {
                    // SAFETY: part of a posted send, valid until its request is done, which is after this is written.
                    self.head.extend(unsafe { std::slice::from_raw_parts(piece.data.0, piece.len) });
                } else {
                    (self.data, self.len) = (piece.data, piece.len);
                }
            }
        }
        true
    }

    fn write(&mut self, socket: &impl AsFd) -> Result<usize, Errno> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let head = self.head.get(self.head_at..).unwrap_or_default();
        let n = if self.at == self.len {
            rustix::net::send(socket, head, flags)?
        } else {
            // SAFETY: the part from `at` on of a posted send, valid until its request is done, which is after this is
            // written; a link that is closed writes no more.
            let data = unsafe { std::slice::from_raw_parts(self.data.0.add(self.at), self.len - self.at) };
            if head.is_empty() {
                rustix::net::send(socket, data, flags)?
            } else {
                let parts = [IoSlice::new(head), IoSlice::new(data)];
                rustix::net::sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), flags)?
            }
        };
        let of_head = n.min(head.len());
        self.head_at += of_head;
        self.at += n - of_head;
        Ok(n)
    }
}
