//! Steps of calls that `TINYNCCL_VERIFY` chose: what each of them reads and writes is compared and summed.

use super::lane::{Stage, Stop};
use super::links::Links;
use super::part::{Part, mismatch};
use super::plan::{Instruction, Place};
use super::{Buffers, Task};
use crate::verify::{Audit, Heard};
use tinynccl_plan::error::Result;

/// Notes where the buffers of the chosen `tasks` are, and the sums of their inputs, before a run.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn begin(tasks: &[Task<'_>], scratch: &[u64], audit: &mut Audit) {
    audit.begin();
    audit.name(scratch.as_ptr().cast(), size_of_val(scratch), "scratch memory");
    for task in tasks {
        if !audit.has(&task.header) {
            continue;
        }
        let (plan, Buffers { input, output }) = (task.plan, task.buffers);
        let mut end = 0;
        for lane in &plan.lanes {
            let inputs = plan.instructions[lane.instructions.clone()].iter().filter_map(|instruction| {
                let place = instruction.step.read().filter(|place| place.is_input())?;
                Some((place, instruction.parts.clone()))
            });
            for (place, parts) in inputs {
                for (window, part) in (0..lane.windows).flat_map(|w| parts.clone().map(move |part| (w, part))) {
                    let range = lane.partition.part(window, part);
                    let at = (place.segment_offset + range.start) * plan.elem;
                    let bytes = range.len() * plan.elem;
                    end = end.max(at + bytes);
                    // SAFETY: by the caller, the part lies inside the input.
                    unsafe { audit.ledger.wrote(input.add(at), bytes) };
                }
            }
        }
        audit.name(output, plan.output_bytes, "output");
        audit.name(input, end, "input");
    }
}

/// After a run: all that its chosen calls wrote, and inputs that they left alone, are what they were.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn end(tasks: &[Task<'_>], audit: &Audit) -> Result<()> {
    match tasks.iter().find(|task| audit.has(&task.header)) {
        // SAFETY: by the caller.
        Some(task) => unsafe { audit.check_all(&task.header) },
        None => Ok(()),
    }
}

impl<const VERIFIED: bool> Part<'_, VERIFIED> {
    /// Offset and length in bytes of each part of this message.
    fn cuts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.instruction.parts.clone().map(|part| {
            let range = self.partition.part(self.window, part);
            ((range.start - self.start) * self.plan.elem, range.len() * self.plan.elem)
        })
    }

    // Each of these is called where `VERIFIED` is true.

    /// Checks that a step reads what was written there, or what was there before the call.
    ///
    /// # Safety
    /// As [`super::run`].
    #[cold]
    pub(super) unsafe fn compare(&self, place: Place, audit: Option<&mut Audit>) -> Result<(), Stop> {
        let Some(audit) = audit else { return Ok(()) };
        // SAFETY: by the caller.
        unsafe { audit.check(&self.header, self.at(place), self.bytes())? };
        Ok(())
    }

    /// A step has written here.
    ///
    /// # Safety
    /// As [`super::run`].
    #[cold]
    pub(super) unsafe fn wrote(&self, place: Place, audit: Option<&mut Audit>) {
        if let Some(audit) = audit {
            // SAFETY: by the caller.
            let at = unsafe { self.at(place) };
            for (skip, bytes) in self.cuts() {
                // SAFETY: by the caller; a part of this one.
                unsafe { audit.ledger.wrote(at.add(skip), bytes) };
            }
        }
    }

    /// A message is about to leave from here.
    #[cold]
    pub(super) fn leaves(&self, data: &[u8], to: u32, audit: Option<&mut Audit>) {
        if let Some(audit) = audit {
            audit.leaves(to, data);
        }
    }

    /// A message has left, and its source is what it was.
    ///
    /// # Safety
    /// As [`super::run`].
    #[cold]
    pub(super) unsafe fn has_left(&self, src: Place, to: u32, audit: Option<&mut Audit>) -> Result<(), Stop> {
        let Some(audit) = audit else { return Ok(()) };
        audit.left(to);
        // SAFETY: by the caller.
        unsafe { self.compare(src, Some(audit)) }
    }

    /// A piece of the message from this link lies here; it belongs to the memory at `base`.
    #[cold]
    pub(super) fn comes(&self, from: u32, piece: &[u8], base: *const u8, audit: Option<&mut Audit>) {
        if let Some(audit) = audit {
            audit.comes(from, piece, base);
        }
    }

    /// The message from this link is complete.
    #[cold]
    pub(super) fn came(&self, from: u32, base: *const u8, audit: Option<&mut Audit>) {
        if let Some(audit) = audit {
            audit.came(from, base);
        }
    }

    /// After an instruction: exchanges the sums of links that the call does not use again. False: not done yet.
    #[cold]
    pub(super) fn exchange_sums(&self, stage: &mut Stage, links: &mut Links) -> Result<bool, Stop> {
        let Instruction { step, last_send, last_recv, .. } = self.instruction;
        let (to, from) = (step.to().filter(|_| *last_send), step.from().filter(|_| *last_recv));
        let Links { audit, sends, recvs, .. } = links;
        let Some(audit) = audit else { return Ok(true) };
        if let Some(to) = to.filter(|_| !stage.told) {
            stage.told = audit.tell(&self.header, to, &mut *sends[to as usize])?;
            if !stage.told {
                return Ok(false);
            }
        }
        let Some(from) = from else { return Ok(true) };
        let link = &mut *recvs[from as usize];
        let (kind, peer) = (links.kinds[from as usize], links.peers[from as usize]);
        match audit.hear(&self.header, from, link, kind, peer)? {
            Heard::All => Ok(true),
            Heard::NotYet => Ok(false),
            Heard::Other(theirs) => Err(mismatch(from, &self.header, theirs, links)),
        }
    }
}
