//! Posted receives, and the fragments that came before them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::rails::data::control::Kind;
use crate::rails::data::control::Outbox;
use crate::rails::data::frame::{self, Frame, WHOLE, charge};
use crate::rails::data::request::{MAX_GROUP, MAX_REQUESTS};
use crate::rails::data::upcalls::Upcalls;
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::lock;

/// Tags of a connection.
const MAX_TAGS: usize = 1 << 16;

/// A posted receive.
#[derive(Debug)]
pub(in crate::rails) struct PostedBuffer {
    pub(in crate::rails) data: *mut u8,
    capacity: usize,
    slot: usize,
    /// Position in the group of its request.
    index: usize,
    tag: i32,
    number: u64,
    got: AtomicUsize,
    /// Length of the message; `UNKNOWN` until a fragment gives it.
    total: AtomicUsize,
}

/// Length not known yet.
const UNKNOWN: usize = usize::MAX;

// SAFETY: fragments go to disjoint parts of the memory, which nothing else uses by the contract of `Receiver::receive`.
unsafe impl Send for PostedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PostedBuffer {}

/// A message that came before its receive.
#[derive(Debug, Default)]
struct Early {
    fragments: Vec<(Frame, Vec<u8>)>,
}

#[derive(Debug, Default)]
struct Tag {
    /// The number of the first of `posted`.
    first: u64,
    /// Receives from `first` on; `None` for those whose message is here.
    posted: VecDeque<Option<Arc<PostedBuffer>>>,
    early: HashMap<u64, Early>,
    /// Lengths of the sender's messages that wait for CTS frames, by message number.
    waiting: HashMap<u64, u64>,
    /// True if the last message was long: the sender gets CTS frames before it requests them.
    long: bool,
    /// True if a fragment has waited in vain for its receive: the next ones do not wait, until one is posted.
    late: bool,
    /// Window charge of the early fragments, also of those still being read, in bytes ([`charge`]).
    held: u64,
    placed: u64,
    reported: u64,
}

#[derive(Debug, Default)]
struct Tags {
    all: HashMap<i32, Tag>,
    /// Streams that wait for a receive.
    held: Vec<usize>,
}

/// Receiving side of a connection: posted receives, and fragments that came before theirs.
#[derive(Debug)]
pub(in crate::rails) struct ReceiveQueue {
    tags: Mutex<Tags>,
    /// Receives whose credits the sender has, by the credits' ids.
    advertised: Mutex<HashMap<u16, Arc<PostedBuffer>>>,
    window_updates: Outbox,
    window: u64,
}

impl ReceiveQueue {
    pub(in crate::rails) fn new(config: &Config) -> ReceiveQueue {
        let window = config.net_window as u64;
        ReceiveQueue { tags: Mutex::default(), advertised: Mutex::default(), window_updates: Outbox::default(), window }
    }

    /// Posts the receives of a group.
    pub(in crate::rails) fn post(&self, connection: &impl Upcalls, slot: usize, group: &[(*mut u8, usize, i32)]) {
        for (index, &(data, capacity, tag)) in group.iter().enumerate() {
            let (buffer, early, expected, held) = {
                let mut tags = lock(&self.tags);
                let held = std::mem::take(&mut tags.held);
                let known = tags.of(tag);
                known.late = false;
                let number = known.first + known.posted.len() as u64;
                let (got, total) = (AtomicUsize::new(0), AtomicUsize::new(UNKNOWN));
                let buffer = Arc::new(PostedBuffer { data, capacity, slot, index, tag, number, got, total });
                known.posted.push_back(Some(buffer.clone()));
                let early = known.early.remove(&number);
                let fragments = early.map_or(Vec::new(), |e| e.fragments);
                known.held -= fragments.iter().map(|(_, data)| charge(data.len())).sum::<u64>();
                let expected = known.waiting.remove(&number);
                if fragments.is_empty() && (known.long || expected.is_some()) {
                    self.send_cts(connection, &buffer);
                }
                (buffer, fragments, expected, held)
            };
            held.into_iter().for_each(|stream| connection.resume(stream));
            if let Some(Err(detail)) = expected.map(|total| buffer.check(tag, total)) {
                connection.fail(detail);
            }
            for (frame, data) in early {
                if let Err(detail) = self.copy(connection, &buffer, &frame, &data) {
                    connection.fail(detail);
                }
            }
        }
        if !self.window_updates.is_empty() {
            connection.wake_some(1, 0);
        }
    }

    /// Copies a fragment that came early into its posted buffer.
    fn copy(&self, connection: &impl Upcalls, buffer: &PostedBuffer, frame: &Frame, data: &[u8]) -> Result<(), String> {
        buffer.check(frame.tag, frame.total)?;
        // SAFETY: `check` has compared the fragment's end with the length of the memory, which is valid by the contract
        // of `Receiver::receive`; the source is our own memory.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.data.add(frame.offset as usize), data.len()) };
        self.placed(connection, buffer, frame);
        Ok(())
    }

    /// Returns the target of a fragment. `None`: `stream` waits for its receive, as the rest of the fragment is in the
    /// kernel; but not while a receive of another tag is posted, whose message may be behind.
    pub(in crate::rails) fn target(&self, frame: &Frame, stream: Option<usize>) -> Result<Option<Target>, String> {
        let len = frame.len as usize;
        let mut tags = lock(&self.tags);
        let known = tags.named(frame.tag)?;
        if let Some(buffer) = known.find(frame.number)? {
            buffer.check(frame.tag, frame.total)?;
            return Ok(Some(Target::Posted(buffer)));
        }
        let late = known.late;
        if let Some(stream) = stream
            && !late
            && !tags.all.iter().any(|(tag, other)| *tag != frame.tag && !other.posted.is_empty())
        {
            if !tags.held.contains(&stream) {
                tags.held.push(stream);
            }
            return Ok(None);
        }
        let known = tags.of(frame.tag);
        known.held += charge(len);
        if known.held > self.window {
            let (tag, window) = (frame.tag, self.window);
            return Err(format!(
                "expected at most {window} bytes of tag {tag} before their receives; set TINYNCCL_NET_WINDOW alike everywhere"
            ));
        }
        Ok(Some(Target::Early(Vec::with_capacity(len))))
    }

    /// Notes that a fragment of this tag has waited for its receive in vain.
    pub(in crate::rails) fn mark_late(&self, tag: i32) {
        lock(&self.tags).of(tag).late = true;
    }

    /// Takes in a fragment that is read whole.
    pub(in crate::rails) fn arrived(
        &self,
        connection: &impl Upcalls,
        frame: Frame,
        target: Target,
    ) -> Result<(), String> {
        let data = match target {
            Target::Posted(buffer) => {
                self.placed(connection, &buffer, &frame);
                return Ok(());
            }
            Target::Early(data) => data,
        };
        let buffer = {
            let mut tags = lock(&self.tags);
            let known = tags.of(frame.tag);
            match known.find(frame.number)? {
                Some(buffer) => {
                    known.held -= charge(data.len());
                    buffer
                }
                None => {
                    known.early.entry(frame.number).or_default().fragments.push((frame, data));
                    return Ok(());
                }
            }
        };
        self.copy(connection, &buffer, &frame, &data)
    }

    /// Counts a fragment that is in its posted buffer.
    fn placed(&self, connection: &impl Upcalls, buffer: &PostedBuffer, frame: &Frame) {
        let len = frame.len as usize;
        let whole = buffer.add(len, Some(frame.total as usize));
        let mut report = false;
        {
            let mut tags = lock(&self.tags);
            let known = tags.of(frame.tag);
            known.placed += charge(len);
            known.long &= buffer.total.load(Ordering::Relaxed) > WHOLE;
            if known.placed - known.reported >= self.window / 4 {
                known.reported = known.placed;
                self.window_updates.put([Frame::control(Kind::WindowUpdate, frame.tag, known.placed)]);
                report = true;
            }
            if whole {
                known.received(frame.number);
            }
        }
        if report && connection.session().several() {
            // The stream that the fragment came over may be one that takes nothing any more.
            connection.wake_some(1, 0);
        }
        if whole {
            self.finish(connection, buffer);
        }
    }

    /// Finishes a receive whose message is complete.
    fn finish(&self, connection: &impl Upcalls, buffer: &PostedBuffer) {
        if connection.has_rdma() {
            lock(&self.advertised).remove(&buffer.id());
        }
        if let Some(request) = connection.session().requests.get(buffer.slot) {
            request.received(buffer.index, buffer.total.load(Ordering::Acquire));
        }
    }

    /// Sends CTS frames for a posted receive, if its message may be a long one.
    fn send_cts(&self, connection: &impl Upcalls, buffer: &Arc<PostedBuffer>) {
        if buffer.capacity <= WHOLE || !connection.has_queue_pair() {
            return;
        }
        lock(&self.advertised).insert(buffer.id(), buffer.clone());
        connection.send_control(connection.cts_frames(
            (buffer.tag, buffer.number),
            buffer.data,
            buffer.capacity,
            buffer.id(),
        ));
    }

    /// Sends CTS frames for all posted receives: there is a new queue pair, or some control frames are lost.
    pub(in crate::rails) fn send_all_cts(&self, connection: &impl Upcalls) {
        let tags = lock(&self.tags);
        tags.all
            .values()
            .flat_map(|tag| tag.posted.iter().flatten())
            .for_each(|buffer| self.send_cts(connection, buffer));
    }

    /// Takes in the sender's request for the CTS frame of a long message.
    pub(in crate::rails) fn handle_rts(&self, connection: &impl Upcalls, frame: &Frame) -> Result<(), String> {
        let mut tags = lock(&self.tags);
        let known = tags.named(frame.tag)?;
        known.long = true;
        match known.find(frame.number) {
            Ok(Some(buffer)) => {
                buffer.check(frame.tag, frame.total)?;
                self.send_cts(connection, &buffer);
                Ok(())
            }
            Ok(None) if known.waiting.len() < MAX_REQUESTS || known.waiting.contains_key(&frame.number) => {
                known.waiting.insert(frame.number, frame.total);
                Ok(())
            }
            Ok(None) => Err(format!("expected at most {MAX_REQUESTS} messages to wait")),
            // It has come in the meantime.
            Err(_) => Ok(()),
        }
    }

    /// Takes in a fragment that has come by RDMA.
    pub(in crate::rails) fn written(&self, connection: &impl Upcalls, imm: u32, len: usize) -> Result<(), String> {
        let (id, index, last) = frame::read_imm(imm);
        let buffer = lock(&self.advertised).get(&id).cloned();
        let buffer = buffer.ok_or_else(|| format!("expected a fragment for a posted receive, got one for {id}"))?;
        if buffer.add(len, last.then_some(index * frame::RDMA_FRAGMENT + len)) {
            if let Some(known) = lock(&self.tags).all.get_mut(&buffer.tag) {
                known.received(buffer.number);
            }
            self.finish(connection, &buffer);
        }
        Ok(())
    }

    /// Queues the window_updates of all tags again: a lost stream may have had some.
    pub(in crate::rails) fn repeat_window_updates(&self) {
        let tags = lock(&self.tags);
        let placed = tags.all.iter().filter(|(_, tag)| tag.placed > 0);
        self.window_updates.put(placed.map(|(tag, known)| Frame::control(Kind::WindowUpdate, *tag, known.placed)));
    }

    /// Gives back the window charge of a fragment that began to come, and will not come whole.
    pub(in crate::rails) fn discard(&self, frame: &Frame, target: &Target) {
        if let (Target::Early(_), Some(tag)) = (target, lock(&self.tags).all.get_mut(&frame.tag)) {
            tag.held -= charge(frame.len as usize);
        }
    }

    /// The next report to send, if there is one.
    pub(in crate::rails) fn next_window_update(&self) -> Option<Frame> {
        self.window_updates.take()
    }
}

impl Tags {
    fn of(&mut self, tag: i32) -> &mut Tag {
        self.all.entry(tag).or_default()
    }

    /// Returns the tag that the peer names; an error if there are too many.
    fn named(&mut self, tag: i32) -> Result<&mut Tag, String> {
        if self.all.len() >= MAX_TAGS && !self.all.contains_key(&tag) {
            return Err(format!("expected at most {MAX_TAGS} tags"));
        }
        Ok(self.of(tag))
    }
}

impl PostedBuffer {
    /// Id of the receive's credits: unique among the connection's open receives.
    fn id(&self) -> u16 {
        (self.slot * MAX_GROUP + self.index) as u16
    }

    /// Counts `len` more bytes as placed; `total` is the length of the message, which the last fragment by RDMA and
    /// each one over a stream give. True once the message is complete.
    fn add(&self, len: usize, total: Option<usize>) -> bool {
        if let Some(total) = total {
            self.total.store(total, Ordering::Relaxed);
        }
        // The thread that adds the last bytes sees what the others have stored before they added theirs.
        self.got.fetch_add(len, Ordering::AcqRel) + len == self.total.load(Ordering::Relaxed)
    }

    fn check(&self, tag: i32, total: u64) -> Result<(), String> {
        if total <= self.capacity as u64 {
            return Ok(());
        }
        Err(format!(
            "the message of tag {} has {} bytes and its receive has room for {}: do all ranks make the same calls, with the same \
             NCCL_PROTO and NCCL_ALGO?",
            tag, total, self.capacity
        ))
    }
}

impl Tag {
    /// The receive of a message, if it is posted.
    fn find(&self, number: u64) -> Result<Option<Arc<PostedBuffer>>, String> {
        let again = || format!("message {number} was received before");
        let index = number.checked_sub(self.first).ok_or_else(again)?;
        match usize::try_from(index).ok().and_then(|index| self.posted.get(index)) {
            Some(Some(buffer)) => Ok(Some(buffer.clone())),
            Some(None) => Err(again()),
            None => Ok(None),
        }
    }

    /// Removes the receive of a message that is complete.
    fn received(&mut self, number: u64) {
        if let Some(posted) = self.posted.get_mut((number - self.first) as usize) {
            *posted = None;
        }
        while matches!(self.posted.front(), Some(None)) {
            self.posted.pop_front();
            self.first += 1;
        }
    }
}

#[derive(Debug)]
pub(in crate::rails) enum Target {
    Posted(Arc<PostedBuffer>),
    Early(Vec<u8>),
}
