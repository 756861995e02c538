//! Who carries gradients: a communicator, or a process group over any backend.

use crate::comm::Comm;
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;
use crate::process_group::{ProcessGroup, Work};
use crate::trace::Tracer;

/// What data parallelism needs of the ranks. Made of `&Comm` or of `&ProcessGroup`; gradients lie on the host, which backend
/// nccl does not carry.
#[derive(Debug, Clone, Copy)]
pub enum Carrier<'c> {
    /// This library.
    Comm(&'c Comm),
    /// The backend of the group.
    Group(&'c ProcessGroup),
}

impl<'c> From<&'c Comm> for Carrier<'c> {
    fn from(comm: &'c Comm) -> Carrier<'c> {
        Carrier::Comm(comm)
    }
}

impl<'c> From<&'c ProcessGroup> for Carrier<'c> {
    fn from(group: &'c ProcessGroup) -> Carrier<'c> {
        Carrier::Group(group)
    }
}

impl Carrier<'_> {
    /// Our rank.
    pub fn rank(&self) -> usize {
        match self {
            Carrier::Comm(comm) => comm.rank(),
            Carrier::Group(group) => group.rank(),
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        match self {
            Carrier::Comm(comm) => comm.size(),
            Carrier::Group(group) => group.size(),
        }
    }

    /// [`Comm::all_reduce_in_place`].
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        match self {
            Carrier::Comm(comm) => comm.all_reduce_in_place(buffer, op),
            Carrier::Group(group) => group.all_reduce(buffer, op),
        }
    }

    /// [`Comm::all_reduce_async`].
    pub fn all_reduce_async<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Result<Work<Vec<T>>> {
        match self {
            Carrier::Comm(comm) => comm.all_reduce_async(buffer, op).map(Work::from),
            Carrier::Group(group) => group.all_reduce_async(buffer, op),
        }
    }

    /// [`Comm::broadcast`].
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        match self {
            Carrier::Comm(comm) => comm.broadcast(buffer, root),
            Carrier::Group(group) => group.broadcast(buffer, root),
        }
    }

    /// [`Comm::all_gather`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        match self {
            Carrier::Comm(comm) => comm.all_gather(input, output),
            Carrier::Group(group) => group.all_gather(input, output),
        }
    }

    pub(super) fn trace(&self) -> Option<&Tracer> {
        match self {
            Carrier::Comm(comm) => comm.trace(),
            Carrier::Group(group) => group.comm().trace(),
        }
    }
}
