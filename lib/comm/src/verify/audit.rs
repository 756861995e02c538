//! Sums of what passed over each link in the chosen calls of a run, and their comparison at both ends.

use std::collections::HashMap;
use std::ops::Range;

use super::ledger::{Changed, Ledger};
use super::sums::{Running, blocks, sum};
use super::{Chosen, op};
use tinynccl_plan::error::{Error, Result, Suspect};
use tinynccl_plan::wire::Header;
use tinynccl_transport::{Received, RecvLink, SendLink};

/// Most sums in one message.
const SUMS: usize = 512;

/// A block that passed over a link.
#[derive(Debug, Clone, Copy)]
struct Passed {
    sum: u64,
    /// Address of the memory that it came from or went to.
    at: usize,
    bytes: usize,
}

/// One direction of a link in one call.
#[derive(Default)]
struct Side {
    blocks: Vec<Passed>,
    /// The sums of the message that leaves are among them.
    begun: bool,
    /// The message that comes.
    running: Running,
    /// Blocks whose sums were exchanged.
    told: usize,
    /// Sums on their way.
    words: Vec<u64>,
}

/// Verification of one run: memory, links, and where the calls' buffers are.
#[derive(Default)]
pub(crate) struct Audit {
    rank: usize,
    chosen: Option<Chosen>,
    /// Sums that a message can hold.
    sums: usize,
    pub(crate) ledger: Ledger,
    sides: HashMap<(bool, u32), Side>,
    spans: Vec<(Range<usize>, &'static str)>,
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audit").field("rank", &self.rank).field("chosen", &self.chosen).finish_non_exhaustive()
    }
}

impl Audit {
    pub(crate) fn new(rank: usize, chosen: Chosen, max_message: usize) -> Audit {
        Audit { rank, chosen: Some(chosen), sums: (max_message / 8).clamp(1, SUMS), ..Audit::default() }
    }

    /// True if this call is verified.
    #[inline]
    pub(crate) fn has(&self, header: &Header) -> bool {
        self.chosen.is_some_and(|chosen| chosen.has(header.seq))
    }

    /// Begins a run.
    pub(crate) fn begin(&mut self) {
        self.ledger.clear();
        self.sides.clear();
        self.spans.clear();
    }

    /// Names memory in errors.
    pub(crate) fn name(&mut self, at: *const u8, bytes: usize, name: &'static str) {
        self.spans.push((at.addr()..at.addr() + bytes, name));
    }

    fn place(&self, at: usize) -> (String, u64) {
        match self.spans.iter().find(|(span, _)| span.contains(&at)) {
            Some((span, name)) => ((*name).to_owned(), (at - span.start) as u64),
            None => ("message".to_owned(), 0),
        }
    }

    fn error(&self, header: &Header, suspect: Suspect, at: usize, bytes: usize, sums: [u64; 2]) -> Error {
        let (buffer, offset) = self.place(at);
        let ([expected, got], suspect) = (sums, Box::new(suspect));
        Error::Corrupt { op: op(header), rank: self.rank, suspect, buffer, offset, bytes: bytes as u64, expected, got }
    }

    /// Compares memory with what it was when it was written.
    ///
    /// # Safety
    /// As [`Ledger::check`].
    pub(crate) unsafe fn check(&self, header: &Header, at: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.ledger.check(at.addr(), bytes) }.map_err(|changed| self.changed(header, changed))
    }

    fn changed(&self, header: &Header, changed: Changed) -> Error {
        let suspect = Suspect::Memory { rank: self.rank };
        self.error(header, suspect, changed.at, changed.bytes, [changed.expected, changed.got])
    }

    /// Compares everything that this run wrote or had for an input with what it was then.
    ///
    /// # Safety
    /// The buffers of all its calls must be readable.
    pub(crate) unsafe fn check_all(&self, header: &Header) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.ledger.check(0, usize::MAX) }.map_err(|changed| self.changed(header, changed))
    }

    fn side(&mut self, sends: bool, link: u32) -> &mut Side {
        self.sides.entry((sends, link)).or_default()
    }

    /// A message leaves; again while it is under way.
    pub(crate) fn leaves(&mut self, link: u32, data: &[u8]) {
        if !self.side(true, link).begun {
            let at = data.as_ptr().addr();
            let known = self.ledger.sums(at, data.len());
            let known =
                known.unwrap_or_else(|| blocks(data.len()).map(|(skip, n)| sum(&data[skip..skip + n])).collect());
            let side = self.side(true, link);
            let places = blocks(data.len()).map(|(skip, bytes)| (at + skip, bytes));
            side.blocks.extend(places.zip(known).map(|((at, bytes), sum)| Passed { sum, at, bytes }));
            side.begun = true;
        }
    }

    /// The message has left.
    pub(crate) fn left(&mut self, link: u32) {
        self.side(true, link).begun = false;
    }

    /// A piece of a message has come. `base`: the memory that the whole message went to, or was combined with.
    pub(crate) fn comes(&mut self, link: u32, piece: &[u8], base: *const u8) {
        let Side { blocks, running, .. } = self.side(false, link);
        running.add(piece, |skip, bytes, sum| blocks.push(Passed { sum, at: base.addr() + skip, bytes }));
    }

    /// The message whose pieces came is complete.
    pub(crate) fn came(&mut self, link: u32, base: *const u8) {
        let Side { blocks, running, .. } = self.side(false, link);
        running.end(|skip, bytes, sum| blocks.push(Passed { sum, at: base.addr() + skip, bytes }));
    }

    /// After the call's last message over a link: sends the sums of all of them. False: not yet.
    pub(crate) fn tell(&mut self, header: &Header, index: u32, link: &mut dyn SendLink) -> Result<bool> {
        let Some(side) = self.sides.get_mut(&(true, index)) else { return Ok(true) };
        while side.told < side.blocks.len() {
            let some = &side.blocks[side.told..side.blocks.len().min(side.told + self.sums)];
            if side.words.is_empty() {
                side.words.extend(some.iter().map(|block| block.sum));
            }
            if !link.send_from(&of_sums(header, some.len()), bytemuck::cast_slice(&side.words))? {
                return Ok(false);
            }
            side.told += some.len();
            side.words.clear();
        }
        self.sides.remove(&(true, index));
        Ok(true)
    }

    /// After the call's last message over a link: compares the sums of all of them with the sender's. False: not yet.
    ///
    /// # Errors
    /// [`Error::Corrupt`]: a block differs. Also a message of another call.
    pub(crate) fn hear(
        &mut self,
        header: &Header,
        index: u32,
        link: &mut dyn RecvLink,
        kind: &str,
        peer: usize,
    ) -> Result<Heard> {
        let Some(side) = self.sides.get_mut(&(false, index)) else { return Ok(Heard::All) };
        let mut wrong = None;
        while side.told < side.blocks.len() && wrong.is_none() {
            let some = &side.blocks[side.told..side.blocks.len().min(side.told + self.sums)];
            side.words.resize(some.len(), 0);
            match link.recv_into(&of_sums(header, some.len()), bytemuck::cast_slice_mut(&mut side.words))? {
                Received::Pending => return Ok(Heard::NotYet),
                Received::Mismatch(theirs) => return Ok(Heard::Other(theirs)),
                Received::Done => {}
            }
            wrong = some.iter().zip(&side.words).find(|(ours, theirs)| ours.sum != **theirs).map(|(a, b)| (*a, *b));
            side.told += some.len();
            side.words.clear();
        }
        self.sides.remove(&(false, index));
        match wrong {
            None => Ok(Heard::All),
            Some((block, expected)) => {
                let path = format!("{kind}, {}", link.peer().address);
                let suspect = Suspect::Link { from: peer, to: self.rank, path };
                Err(self.error(header, suspect, block.at, block.bytes, [expected, block.sum]))
            }
        }
    }
}

/// Outcome of [`Audit::hear`].
#[derive(Debug)]
pub(crate) enum Heard {
    All,
    NotYet,
    /// A message of another call.
    Other(Header),
}

/// Header of a message of sums.
fn of_sums(header: &Header, sums: usize) -> Header {
    Header { algorithm: Header::SUMS, len: (8 * sums) as u32, ..*header }
}
