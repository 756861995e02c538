//! Posted receives, and the fragments that came before them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::frame::{self, Frame, Word, charge};
use super::link::Link;
use super::outbox::Outbox;
use super::outgoing::WHOLE;
use super::rdma;
use super::request::{MAX_GROUP, MAX_REQUESTS};
use crate::config::Config;
use crate::threads::lock;

/// Tags of a connection.
const MAX_TAGS: usize = 1 << 16;

/// A posted receive.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) data: *mut u8,
    room: usize,
    slot: usize,
    /// Position in the group of its request.
    place: usize,
    tag: i32,
    number: u64,
    got: AtomicUsize,
    /// Length of the message; `UNKNOWN` until a fragment gives it.
    total: AtomicUsize,
}

/// Length not known yet.
const UNKNOWN: usize = usize::MAX;

// SAFETY: fragments go to disjoint parts of the memory, which nothing else uses by the contract of `Receiver::receive`.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// A message that came before its receive.
#[derive(Debug, Default)]
struct Early {
    pieces: Vec<(Frame, Vec<u8>)>,
}

#[derive(Debug, Default)]
struct Tag {
    /// The number of the first of `posted`.
    first: u64,
    /// Receives from `first` on; `None` for those whose message is here.
    posted: VecDeque<Option<Arc<Entry>>>,
    early: HashMap<u64, Early>,
    /// Lengths of the sender's messages that wait for receive credits, by message number.
    waiting: HashMap<u64, u64>,
    /// True if the last message was long: the sender gets receive credits before it requests them.
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

/// Receiving side of a link: posted receives, and fragments that came before theirs.
#[derive(Debug)]
pub(super) struct Incoming {
    tags: Mutex<Tags>,
    /// Receives whose credits the sender has, by the credits' ids.
    rooms: Mutex<HashMap<u16, Arc<Entry>>>,
    reports: Outbox,
    window: u64,
}

impl Incoming {
    pub(super) fn new(config: &Config) -> Incoming {
        let window = config.net_window as u64;
        Incoming { tags: Mutex::default(), rooms: Mutex::default(), reports: Outbox::default(), window }
    }

    /// Posts the receives of a group.
    pub(super) fn post(&self, link: &Arc<Link>, slot: usize, group: &[(*mut u8, usize, i32)]) {
        for (place, &(data, room, tag)) in group.iter().enumerate() {
            let (entry, early, expected, held) = {
                let mut tags = lock(&self.tags);
                let held = std::mem::take(&mut tags.held);
                let known = tags.of(tag);
                known.late = false;
                let number = known.first + known.posted.len() as u64;
                let (got, total) = (AtomicUsize::new(0), AtomicUsize::new(UNKNOWN));
                let entry = Arc::new(Entry { data, room, slot, place, tag, number, got, total });
                known.posted.push_back(Some(entry.clone()));
                let early = known.early.remove(&number);
                let pieces = early.map_or(Vec::new(), |e| e.pieces);
                known.held -= pieces.iter().map(|(_, data)| charge(data.len())).sum::<u64>();
                let expected = known.waiting.remove(&number);
                if pieces.is_empty() && (known.long || expected.is_some()) {
                    self.tell(link, &entry);
                }
                (entry, pieces, expected, held)
            };
            held.into_iter().for_each(|stream| link.resume(stream));
            if let Some(Err(detail)) = expected.map(|total| entry.check(tag, total)) {
                link.fail(detail);
            }
            for (frame, data) in early {
                if let Err(detail) = self.copy(link, &entry, &frame, &data) {
                    link.fail(detail);
                }
            }
        }
        if !self.reports.is_empty() {
            link.wake_some(1, 0);
        }
    }

    /// Copies a fragment that came early into its posted buffer.
    fn copy(&self, link: &Arc<Link>, entry: &Entry, frame: &Frame, data: &[u8]) -> Result<(), String> {
        entry.check(frame.tag, frame.total)?;
        // SAFETY: `check` has compared the fragment's end with the length of the memory, which is valid by the contract
        // of `Receiver::receive`; the source is our own memory.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), entry.data.add(frame.offset as usize), data.len()) };
        self.placed(link, entry, frame);
        Ok(())
    }

    /// Returns the target of a fragment. `None`: `stream` waits for its receive, as the rest of the fragment is in the
    /// kernel; but not while a receive of another tag is posted, whose message may be behind.
    pub(super) fn target(&self, frame: &Frame, stream: Option<usize>) -> Result<Option<Target>, String> {
        let len = frame.len as usize;
        let mut tags = lock(&self.tags);
        let known = tags.named(frame.tag)?;
        if let Some(entry) = known.find(frame.number)? {
            entry.check(frame.tag, frame.total)?;
            return Ok(Some(Target::Posted(entry)));
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
    pub(super) fn is_late(&self, tag: i32) {
        lock(&self.tags).of(tag).late = true;
    }

    /// Takes in a fragment that is read whole.
    pub(super) fn arrived(&self, link: &Arc<Link>, frame: Frame, target: Target) -> Result<(), String> {
        let data = match target {
            Target::Posted(entry) => {
                self.placed(link, &entry, &frame);
                return Ok(());
            }
            Target::Early(data) => data,
        };
        let entry = {
            let mut tags = lock(&self.tags);
            let known = tags.of(frame.tag);
            match known.find(frame.number)? {
                Some(entry) => {
                    known.held -= charge(data.len());
                    entry
                }
                None => {
                    known.early.entry(frame.number).or_default().pieces.push((frame, data));
                    return Ok(());
                }
            }
        };
        self.copy(link, &entry, &frame, &data)
    }

    /// Counts a fragment that is in its posted buffer.
    fn placed(&self, link: &Arc<Link>, entry: &Entry, frame: &Frame) {
        let len = frame.len as usize;
        let whole = entry.add(len, Some(frame.total as usize));
        let mut report = false;
        {
            let mut tags = lock(&self.tags);
            let known = tags.of(frame.tag);
            known.placed += charge(len);
            known.long &= entry.total.load(Ordering::Relaxed) > WHOLE;
            if known.placed - known.reported >= self.window / 4 {
                known.reported = known.placed;
                self.reports.put([Frame::say(Word::Placed, frame.tag, known.placed)]);
                report = true;
            }
            if whole {
                known.received(frame.number);
            }
        }
        if report && link.several() {
            // The stream that the fragment came over may be one that takes nothing any more.
            link.wake_some(1, 0);
        }
        if whole {
            self.finish(link, entry);
        }
    }

    /// Finishes a receive whose message is complete.
    fn finish(&self, link: &Link, entry: &Entry) {
        if link.rdma.is_on() {
            lock(&self.rooms).remove(&entry.id());
        }
        if let Some(request) = link.requests.get(entry.slot) {
            request.received(entry.place, entry.total.load(Ordering::Acquire));
        }
    }

    /// Sends receive credits for a posted receive, if its message may be a long one.
    fn tell(&self, link: &Arc<Link>, entry: &Arc<Entry>) {
        if entry.room <= WHOLE || !link.rdma.any() {
            return;
        }
        lock(&self.rooms).insert(entry.id(), entry.clone());
        link.say(link.rdma.rooms((entry.tag, entry.number), entry.data, entry.room, entry.id()));
    }

    /// Sends receive credits for all posted receives: there is a new queue pair, or some control frames are lost.
    pub(super) fn tell_rooms(&self, link: &Arc<Link>) {
        let tags = lock(&self.tags);
        tags.all.values().flat_map(|tag| tag.posted.iter().flatten()).for_each(|entry| self.tell(link, entry));
    }

    /// Takes in the sender's request for the receive credit of a long message.
    pub(super) fn waits(&self, link: &Arc<Link>, frame: &Frame) -> Result<(), String> {
        let mut tags = lock(&self.tags);
        let known = tags.named(frame.tag)?;
        known.long = true;
        match known.find(frame.number) {
            Ok(Some(entry)) => {
                entry.check(frame.tag, frame.total)?;
                self.tell(link, &entry);
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
    pub(super) fn written(&self, link: &Link, word: u32, len: usize) -> Result<(), String> {
        let (id, index, last) = frame::read_imm(word);
        let entry = lock(&self.rooms).get(&id).cloned();
        let entry = entry.ok_or_else(|| format!("expected a piece for a posted receive, got one for {id}"))?;
        if entry.add(len, last.then_some(index * rdma::PIECE + len)) {
            if let Some(known) = lock(&self.tags).all.get_mut(&entry.tag) {
                known.received(entry.number);
            }
            self.finish(link, &entry);
        }
        Ok(())
    }

    /// Queues the reports of all tags again: a lost stream may have had some.
    pub(super) fn report_again(&self) {
        let tags = lock(&self.tags);
        let placed = tags.all.iter().filter(|(_, tag)| tag.placed > 0);
        self.reports.put(placed.map(|(tag, known)| Frame::say(Word::Placed, *tag, known.placed)));
    }

    /// Gives back the window charge of a fragment that began to come, and will not come whole.
    pub(super) fn forget(&self, frame: &Frame, target: &Target) {
        if let (Target::Early(_), Some(tag)) = (target, lock(&self.tags).all.get_mut(&frame.tag)) {
            tag.held -= charge(frame.len as usize);
        }
    }

    /// The next report to send, if there is one.
    pub(super) fn report(&self) -> Option<Frame> {
        self.reports.take()
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

impl Entry {
    /// Id of the receive's credits: unique among the link's open receives.
    fn id(&self) -> u16 {
        (self.slot * MAX_GROUP + self.place) as u16
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
        if total <= self.room as u64 {
            return Ok(());
        }
        Err(format!(
            "the message of tag {} has {} bytes and its receive has room for {}: do all ranks make the same calls, with the same \
             NCCL_PROTO and NCCL_ALGO?",
            tag, total, self.room
        ))
    }
}

impl Tag {
    /// The receive of a message, if it is posted.
    fn find(&self, number: u64) -> Result<Option<Arc<Entry>>, String> {
        let again = || format!("message {number} was received before");
        let place = number.checked_sub(self.first).ok_or_else(again)?;
        match usize::try_from(place).ok().and_then(|place| self.posted.get(place)) {
            Some(Some(entry)) => Ok(Some(entry.clone())),
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
pub(super) enum Target {
    Posted(Arc<Entry>),
    Early(Vec<u8>),
}
