//! Schedules in other projects' files: MSCCL's XML and mscclpp's JSON execution plans.
//!
//! | file | idea |
//! |---|---|
//! | this one | the four calls |
//! | `msccl` | reader and writer of MSCCL's XML |
//! | `mscclpp` | reader and writer of mscclpp's plans |
//! | `threads` | what both have in common once they are read |
//! | `run` | what each chunk holds, and where that lies in a schedule |
//! | `order` | the order of steps, and the dependencies that keep it |
//! | `lanes` | threadblocks that depend on each other become lanes |
//! | `tests` | schedules of the library there and back; files by hand; files that are wrong |
//!
//! Both formats cut a buffer into chunks and have threadblocks beside each other. Nothing that a reader decides is
//! trusted: what it makes is a [`Schedule`], which the verifier has proved, or an error.

mod lanes;
mod msccl;
mod mscclpp;
mod order;
mod run;
#[cfg(test)]
mod tests;
mod threads;

use super::Schedule;
use crate::error::{Error, Result};
use crate::wire::Collective;

impl Schedule {
    /// Reads an algorithm of MSCCL (`<algo>` of its XML), and proves it.
    ///
    /// Threadblocks that depend on each other (`depid`, `deps`) become one lane, in an order in which all ranks can
    /// run. Of an algorithm in place (`inplace="1"`) the schedule has a form out of place as well. Protocol, name and
    /// limits of bytes mean nothing here. The root of a broadcast or a reduce is that of the attribute `root`, which
    /// [`Schedule::to_msccl`] writes; without it, the rank with which the algorithm is right.
    ///
    /// ```
    /// use tinynccl_plan::schedule::Schedule;
    ///
    /// // Rank 0 sends to rank 1; in place it has the result from the start.
    /// let schedule = Schedule::from_msccl(r#"
    ///   <algo name="pair" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="2" coll="broadcast" inplace="1">
    ///   <gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0"><tb id="0" send="1" recv="-1" chan="0">
    ///   <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    ///   </tb></gpu>
    ///   <gpu id="1" i_chunks="1" o_chunks="1" s_chunks="0"><tb id="0" send="-1" recv="0" chan="0">
    ///   <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    ///   </tb></gpu></algo>"#)?;
    /// assert_eq!((schedule.shape().collective.name(), schedule.shape().root), ("broadcast", 0));
    /// assert_eq!(Schedule::from_msccl(&schedule.to_msccl(true)?)?, schedule);
    /// # Ok::<(), tinynccl_plan::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the line, or with rank, threadblock and step: text that is no such XML, a
    /// collective that MSCCL calls `custom`, a step that reads what was not written or sums an input twice, a message
    /// that is missing or left over, accesses that nothing orders, dependencies in a circle, or threadblocks that
    /// depend on each other and use their links in an order that one lane cannot keep. Else the verifier's.
    pub fn from_msccl(text: &str) -> Result<Schedule> {
        let (mut plan, root) = msccl::read::read(text)?;
        let roots = match root {
            Some(root) => root..root + 1,
            None if plan.shape.collective.has_root() => 0..plan.shape.ranks,
            None => 0..1,
        };
        let mut first = None;
        for root in roots {
            plan.shape.root = root;
            match lanes::schedule(&plan) {
                Ok(schedule) => return Ok(schedule),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or_else(|| Error::invalid(msccl::NAME, "no rank can be the root")))
    }

    /// Writes the schedule as an algorithm of MSCCL, for calls in place (`in_place`) or not: MSCCL has a file for each.
    ///
    /// A threadblock has one peer to send to and one to receive from, so a lane with several becomes several, and
    /// memory that they share is ordered by dependencies. Scratch memory has the size of the whole call there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: MSCCL has no name for the collective, or the schedule is wrong in place.
    pub fn to_msccl(&self, in_place: bool) -> Result<String> {
        self.allowed(msccl::NAME, in_place)?;
        msccl::write::write(self, in_place)
    }

    /// Reads an execution plan of mscclpp (JSON), and proves it.
    ///
    /// mscclpp is one-sided: a threadblock writes to and reads from another rank's memory, and signals. What a signal,
    /// a packet or a barrier makes known to a threadblock becomes a message to it: a `put` is sent where it stands and
    /// received at the first wait behind its signal; what is read from another rank is sent where that rank last
    /// signalled. A `pipeline` is its steps once: windows are its iterations. `reduce_op` is that of the call.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with rank, threadblock and operation: text that is no such plan, operations of a
    /// switch (`glres`, `gstore`, `gstorepkt`), data that is used before a signal says that it is there, and what
    /// [`Schedule::from_msccl`] refuses.
    pub fn from_mscclpp(text: &str) -> Result<Schedule> {
        lanes::schedule(&mscclpp::read::read(text)?)
    }

    /// Writes the schedule as an execution plan of mscclpp, for calls in place (`in_place`) or not.
    ///
    /// A lane is a threadblock, a message a `put` into the receiver's scratch memory and a `signal`. Each message has a
    /// place of its own, so that a sender waits only once, for the receiver to have begun.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: mscclpp has no name for the collective, or the schedule is wrong in place.
    pub fn to_mscclpp(&self, in_place: bool) -> Result<String> {
        self.allowed(mscclpp::NAME, in_place)?;
        mscclpp::write::write(self, in_place)
    }

    fn allowed(&self, format: &'static str, in_place: bool) -> Result<()> {
        match self.in_place() {
            Err(error) if in_place => Err(Error::invalid(format, format!("in place the schedule is wrong: {error}"))),
            _ => Ok(()),
        }
    }
}

/// The collective that a file names, among those that its format has.
fn collective(format: &'static str, names: &[(&str, Collective)], name: &str) -> Result<Collective> {
    let found = names.iter().find(|(known, _)| *known == name).map(|known| known.1);
    found.ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|known| known.0).collect();
        let detail = format!("the collective is {name:?}, of which no result is known; expected {}", known.join(", "));
        Error::invalid(format, detail)
    })
}

/// The name of a collective in a format.
fn name_of(format: &'static str, names: &[(&'static str, Collective)], of: Collective) -> Result<&'static str> {
    let found = names.iter().find(|(_, known)| *known == of).map(|known| known.0);
    found.ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|known| known.1.name()).collect();
        Error::invalid(format, format!("it has no {of}, only {}", known.join(", ")))
    })
}
