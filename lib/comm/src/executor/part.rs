//! One instruction in one window: how each primitive moves its bytes.

use std::ptr;
use std::slice;

use super::Buffers;
use super::lane::{Stage, Stop};
use super::links::Links;
use super::operand::{combine, finish, reduce_and_stream};
use super::plan::{Instruction, Place, Plan};
use crate::reduce::{Operand, stream};
use tinynccl_plan::error::Error;
use tinynccl_plan::schedule::{Buf, Partition, Step};
use tinynccl_plan::wire::Header;
use tinynccl_transport::{Received, ZeroCopy};

/// One instruction in one window: the part that it works on, in the memory of its task. The code of calls that are not
/// verified has none of the questions.
pub(super) struct Part<'a, const VERIFIED: bool> {
    pub(super) plan: &'a Plan,
    pub(super) instruction: &'a Instruction,
    /// The cut that it is a part of, and the window.
    pub(super) partition: &'a Partition,
    pub(super) window: usize,
    /// Header of its message, in or out.
    pub(super) header: Header,
    pub(super) buffers: Buffers,
    pub(super) scratch: *mut u8,
    /// Element range of the part within a segment, and where it lies in scratch memory.
    pub(super) start: usize,
    pub(super) start_in_scratch: usize,
    pub(super) len: usize,
}

impl<const VERIFIED: bool> Part<'_, VERIFIED> {
    /// Address of the part at `place`.
    ///
    /// # Safety
    /// The buffers must be as large as the plan says.
    #[inline]
    pub(super) unsafe fn at(&self, place: Place) -> *mut u8 {
        let (base, start) = match place.buf {
            Buf::Input => (self.buffers.input.cast_mut(), self.start),
            Buf::Output => (self.buffers.output, self.start),
            Buf::Scratch => (self.scratch, self.start_in_scratch),
        };
        // SAFETY: by the caller, the part lies inside the buffer.
        unsafe { base.add((place.segment_offset + start) * self.plan.elem) }
    }

    /// The part at `place` as an operand.
    ///
    /// # Safety
    /// As [`Part::at`].
    #[inline]
    unsafe fn operand(&self, place: Place) -> Operand {
        // SAFETY: forwarded from the caller.
        Operand { at: unsafe { self.at(place) }, input: place.is_input() }
    }

    /// The part at `place` as a slice.
    ///
    /// # Safety
    /// As [`Part::at`]; the slice must not outlive the link call it is made for.
    #[inline]
    unsafe fn view<'m>(&self, place: Place) -> &'m [u8] {
        // SAFETY: by the caller.
        unsafe { slice::from_raw_parts(self.at(place), self.bytes()) }
    }

    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.len * self.plan.elem
    }

    /// One instruction; `true` when it is complete. Otherwise `stage` says what it waits for.
    ///
    /// # Safety
    /// As [`super::run`].
    // Forced inline: its two callers are `advance` with and without a recorder, and the compiler would inline it into
    // neither.
    #[inline(always)]
    pub(super) unsafe fn perform(&self, stage: &mut Stage, links: &mut Links) -> Result<bool, Stop> {
        let Part { plan, instruction, len, .. } = *self;
        // SAFETY: by the caller, every part lies inside its buffer; slices made from it live only for the one link call
        // they are passed to; payloads and slots have `header.len` bytes once the headers agree.
        unsafe {
            match instruction.step {
                Step::Send { to, src } => self.send(src, to, links),
                Step::Recv { from, dst } => self.recv(from, dst, links),
                Step::Copy { src, dst } => {
                    if VERIFIED {
                        self.compare(src, links.audit.as_deref_mut())?;
                    }
                    match plan.scale(src.is_input()) {
                        Some(scale) => scale.apply(self.at(src), self.at(dst), len),
                        None => copy(self.at(src), self.at(dst), self.bytes()),
                    }
                    if VERIFIED {
                        self.wrote(dst, links.audit.as_deref_mut());
                    }
                    Ok(true)
                }
                Step::Reduce { dst, .. } if !instruction.operands.is_empty() => {
                    let operands: Vec<*const u8> =
                        instruction.operands.iter().map(|&place| self.at(place).cast_const()).collect();
                    if VERIFIED {
                        for &place in &instruction.operands {
                            self.compare(place, links.audit.as_deref_mut())?;
                        }
                    }
                    if let Some(exact) = &plan.exact {
                        exact.sum(&operands, self.at(dst), len);
                    }
                    if VERIFIED {
                        self.wrote(dst, links.audit.as_deref_mut());
                    }
                    Ok(true)
                }
                Step::Reduce { src, dst, last } => {
                    let out = self.at(dst);
                    if VERIFIED {
                        self.compare(src, links.audit.as_deref_mut())?;
                        self.compare(dst, links.audit.as_deref_mut())?;
                    }
                    combine(plan, self.operand(src), Operand::product(out), out, None, len);
                    finish(plan, last, out, len);
                    if VERIFIED {
                        self.wrote(dst, links.audit.as_deref_mut());
                    }
                    Ok(true)
                }
                Step::RecvReduceCopy { from, src, dst, last } => self.recv_reduce(from, src, dst, last, links),
                Step::RecvCopySend { from, to, dst } => {
                    if !stage.received {
                        stage.received = self.recv(from, dst, links)?;
                    }
                    Ok(stage.received && self.send(dst, to, links)?)
                }
                Step::RecvReduceSend { from, to, src } => {
                    let (payload, slot) = match self.both(from, to, src, stage, links)? {
                        Some(pair) => pair,
                        None => return Ok(false),
                    };
                    combine(plan, self.operand(src), instruction.received(payload), slot, None, len);
                    if VERIFIED {
                        self.leaves(slice::from_raw_parts(slot, self.bytes()), to, links.audit.as_deref_mut());
                    }
                    self.pass_on(from, to, links)
                }
                Step::RecvReduceCopySend { from, to, src, dst, last } => {
                    let divides = last && plan.average.division.is_some();
                    let link = &mut links.sends[to as usize];
                    let takes = |link: &mut dyn ZeroCopy| link.takes(self.view(dst));
                    if divides
                        || link.sends_from_caller(self.bytes())
                        || plan.zero_copy && instruction.may_zero_copy && link.zero_copy().is_some_and(takes)
                    {
                        if !stage.received {
                            stage.received = self.recv_reduce(from, src, dst, last, links)?;
                        }
                        return Ok(stage.received && self.send(dst, to, links)?);
                    }
                    let (payload, slot) = match self.both(from, to, src, stage, links)? {
                        Some(pair) => pair,
                        None => return Ok(false),
                    };
                    let (mine, other, out) = (self.operand(src), instruction.received(payload), self.at(dst));
                    if plan.streams && !ptr::eq(mine.at, out) {
                        reduce_and_stream(plan, mine, other, Some(slot), out, len);
                    } else {
                        combine(plan, mine, other, out, Some(slot), len);
                    }
                    if VERIFIED {
                        self.wrote(dst, links.audit.as_deref_mut());
                        self.leaves(self.view(dst), to, links.audit.as_deref_mut());
                    }
                    self.pass_on(from, to, links)
                }
            }
        }
    }

    /// Sends the part at `src`.
    ///
    /// # Safety
    /// As [`super::run`].
    #[inline]
    unsafe fn send(&self, src: Place, to: u32, links: &mut Links) -> Result<bool, Stop> {
        // SAFETY: forwarded from the caller.
        unsafe {
            if !VERIFIED {
                return self.hand_over(src, to, links);
            }
            self.leaves(self.view(src), to, links.audit.as_deref_mut());
            let sent = self.hand_over(src, to, links)?;
            if sent {
                self.has_left(src, to, links.audit.as_deref_mut())?;
            }
            Ok(sent)
        }
    }

    /// Sends the part at `src`; by zero copy if no step overwrites it before the link is done with it. The
    /// receiver scales what is an input.
    ///
    /// # Safety
    /// As [`super::run`].
    #[inline]
    unsafe fn hand_over(&self, src: Place, to: u32, links: &mut Links) -> Result<bool, Stop> {
        let Part { plan, instruction, .. } = *self;
        // SAFETY: by the caller.
        let data = unsafe { self.view(src) };
        let two_way = links.two_way;
        let link = &mut links.sends[to as usize];
        if plan.zero_copy
            && let Some(link) = link.zero_copy()
        {
            let apart = || {
                let (input, output) = (data.as_ptr().addr(), self.buffers.output.addr());
                input >= output.saturating_add(plan.output_bytes) || output >= input + data.len()
            };
            // A wait for a device (`awaits`) always ends. A wait for the peer might not, so no step may depend on one.
            let awaitable = instruction.may_zero_copy && !link.receiver_pulls();
            let stays = match src.buf {
                Buf::Input => apart() || awaitable && self.buffers.input == self.buffers.output.cast_const(),
                Buf::Output => awaitable,
                Buf::Scratch => false,
            };
            if stays {
                // SAFETY: the caller keeps the buffers until `run` returns, which waits for the links to be flushed or
                // revokes the memory that they read. Until then the program writes to this part only after the link is
                // flushed (`awaits`).
                return Ok(unsafe { link.send(&self.header, data, two_way) }?);
            }
        }
        Ok(link.send_from(&self.header, data)?)
    }

    /// # Safety
    /// As [`super::run`].
    #[inline]
    unsafe fn recv(&self, from: u32, dst: Place, links: &mut Links) -> Result<bool, Stop> {
        let Part { plan, instruction, len, .. } = *self;
        let link = &mut links.recvs[from as usize];
        let scale = plan.scale(instruction.receives_input);
        // SAFETY: by the caller.
        let to = unsafe { self.at(dst) };
        let received = if plan.streams && scale.is_none() && link.shows_in_place() && !link.must_pull() {
            // SAFETY: by the caller; a link gives the pieces of `header.len` bytes.
            let mut write =
                |offset: usize, piece: &[u8]| unsafe { stream::copy(to.add(offset), piece.as_ptr(), piece.len()) };
            link.recv_chunks(&self.header, &mut write)?
        } else {
            // SAFETY: by the caller; nothing else refers to this memory during the call.
            link.recv_into(&self.header, unsafe { slice::from_raw_parts_mut(to, self.bytes()) })?
        };
        match received {
            Received::Done => {
                // SAFETY: by the caller.
                unsafe {
                    if VERIFIED {
                        self.comes(from, self.view(dst), to, links.audit.as_deref_mut());
                        self.came(from, to, links.audit.as_deref_mut());
                    }
                    if let Some(scale) = scale {
                        scale.apply(to, to, len);
                    }
                    if VERIFIED {
                        self.wrote(dst, links.audit.as_deref_mut());
                    }
                }
                Ok(true)
            }
            Received::Pending => Ok(false),
            Received::Mismatch(theirs) => Err(mismatch(from, &self.header, theirs, links)),
        }
    }

    /// # Safety
    /// As [`super::run`].
    #[inline]
    unsafe fn recv_reduce(
        &self,
        from: u32,
        src: Place,
        dst: Place,
        last: bool,
        links: &mut Links,
    ) -> Result<bool, Stop> {
        let Part { plan, instruction, .. } = *self;
        // SAFETY: by the caller.
        let (mine, out, elem) = unsafe { (self.operand(src), self.at(dst), self.plan.elem) };
        let streams = last && plan.streams && plan.average.division.is_none() && !ptr::eq(mine.at, out);
        let Links { recvs, audit, .. } = &mut *links;
        let mut audit = if VERIFIED { audit.as_deref_mut() } else { None };
        let mut intact = Ok(());
        let mut combine = |offset: usize, payload: &[u8]| {
            if let Some(audit) = audit.as_deref_mut() {
                if offset == 0 {
                    // SAFETY: by the caller.
                    intact = unsafe { self.compare(src, Some(audit)) };
                }
                audit.comes(from, payload, out);
            }
            let n = payload.len() / elem;
            // SAFETY: by the caller; a link gives the pieces of `header.len` bytes, each once, at offsets that suit any
            // element.
            unsafe {
                let (mine, other, out) = (mine.skip(offset), instruction.received(payload.as_ptr()), out.add(offset));
                if streams {
                    reduce_and_stream(plan, mine, other, None, out, n);
                    return;
                }
                combine(plan, mine, other, out, None, n);
                finish(plan, last, out, n);
            }
        };
        let received = recvs[from as usize].recv_chunks(&self.header, &mut combine)?;
        intact?;
        match received {
            Received::Done => {
                if VERIFIED {
                    self.came(from, out, links.audit.as_deref_mut());
                    // SAFETY: by the caller.
                    unsafe { self.wrote(dst, links.audit.as_deref_mut()) };
                }
                Ok(true)
            }
            Received::Pending => Ok(false),
            Received::Mismatch(theirs) => Err(mismatch(from, &self.header, theirs, links)),
        }
    }

    /// The incoming payload, for `src`, and an outgoing slot of the same size, once both are there.
    ///
    /// # Safety
    /// As [`super::run`].
    #[inline]
    unsafe fn both(
        &self,
        from: u32,
        to: u32,
        src: Place,
        stage: &mut Stage,
        links: &mut Links,
    ) -> Result<Option<(*const u8, *mut u8)>, Stop> {
        stage.needs_slot = false;
        let Links { sends, recvs, audit, .. } = &mut *links;
        let Some((theirs, payload)) = recvs[from as usize].peek()? else { return Ok(None) };
        if !self.header.agrees_with(&theirs) {
            return Err(mismatch(from, &self.header, theirs, links));
        }
        let Some(slot) = sends[to as usize].reserve()? else {
            stage.needs_slot = true;
            return Ok(None);
        };
        fits(slot.len(), payload.len())?;
        // SAFETY: by the caller.
        unsafe {
            if VERIFIED {
                self.compare(src, audit.as_deref_mut())?;
                let base = self.at(src);
                self.comes(from, payload, base, audit.as_deref_mut());
                self.came(from, base, audit.as_deref_mut());
            }
        }
        Ok(Some((payload.as_ptr(), slot.as_mut_ptr())))
    }

    /// Ends a fused step: frees the incoming slot and commits the outgoing one.
    #[inline]
    fn pass_on(&self, from: u32, to: u32, links: &mut Links) -> Result<bool, Stop> {
        links.recvs[from as usize].release()?;
        links.sends[to as usize].commit(&self.header)?;
        if VERIFIED && let Some(audit) = &mut links.audit {
            audit.left(to);
        }
        Ok(true)
    }
}

/// A slot holds any part by construction of the partition; two links may differ only by misconfiguration.
#[inline]
fn fits(slot: usize, message: usize) -> Result<(), Stop> {
    if slot < message {
        let detail = format!("a slot of {slot} bytes cannot hold a message of {message}");
        return Err(Stop::Error(Error::invalid("link", detail)));
    }
    Ok(())
}

#[cold]
pub(super) fn mismatch(from: u32, ours: &Header, theirs: Header, links: &Links) -> Stop {
    Stop::Mismatch { peer: links.peer(from as usize), ours: *ours, theirs }
}

/// # Safety
/// Both valid for `bytes`; equal or disjoint.
#[inline]
unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
    if !ptr::eq(src, dst) {
        // SAFETY: by the caller.
        unsafe { ptr::copy_nonoverlapping(src, dst, bytes) };
    }
}
