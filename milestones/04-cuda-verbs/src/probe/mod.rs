//! GPUDirect RDMA: which memory can the RDMA device use for a GPU's buffer? Three ways are tried, best first.
//!
//! 1. [`dmabuf`]: the GPU's driver exports the buffer as a dmabuf, the RDMA device's driver imports it
//!    (`cuMemGetHandleForAddressRange`, `ibv_reg_dmabuf_mr`). Upstream Linux, no extra module.
//! 2. [`peer_memory`]: `ibv_reg_mr` on the GPU's address, which the module nvidia_peermem resolves. Older, and only with
//!    a kernel part (ib_core) that has peer-memory clients.
//! 3. [`staging`]: pinned memory of the CPU, with a copy on each side. Always works.
//!
//! The order is that of NVIDIA's "GPUDirect RDMA" manual and of NCCL's net/ib plugin. What the stages ask stands behind
//! two traits, so that every answer of a kernel can be played in a test.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::Result;

use crate::pinned::Pinned;
use crate::why::Why;

pub mod dmabuf;
pub mod peer_memory;
pub mod staging;

/// The three ways, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// The buffer itself, by a dmabuf.
    Dmabuf,
    /// The buffer itself, by its address.
    PeerMemory,
    /// Pinned memory beside it.
    Staging,
}

impl Stage {
    /// In the order in which they are tried.
    pub const ALL: [Stage; 3] = [Stage::Dmabuf, Stage::PeerMemory, Stage::Staging];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Stage::Dmabuf => "dmabuf",
            Stage::PeerMemory => "peer memory",
            Stage::Staging => "staging",
        })
    }
}

/// What a stage found.
#[derive(Debug)]
pub enum Attempt<M> {
    /// It works: this is the memory, and how it was had.
    Taken(Path<M>, String),
    /// It does not work here.
    NotTaken(Why),
}

/// The memory that the wire uses.
#[derive(Debug)]
pub enum Path<M> {
    /// The buffer itself.
    Direct(M),
    /// Slots of pinned memory; registered when the wire is RDMA.
    Staged(Arc<Pinned>, Option<M>),
}

/// A dmabuf: memory of one driver that another one may use, as a file descriptor.
#[derive(Debug)]
pub struct Export {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Where the buffer begins in it.
    pub offset: u64,
    /// Who exported it, for people.
    pub source: String,
}

/// The buffer, as far as the probe must know it.
pub trait Memory {
    /// Bytes.
    fn len(&self) -> usize;

    /// True when it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of its first byte, as the peer names it.
    fn address(&self) -> u64;

    /// Exports it as a dmabuf, or says why not.
    fn export(&self) -> Result<Export, Why>;

    /// An address that only the GPU's driver can resolve; or why it has none.
    fn device_pointer(&self) -> Result<u64, Why>;

    /// `len` bytes of CPU memory that the GPU copies to and from without a detour.
    fn pinned(&self, len: usize) -> Result<Pinned>;

    /// What must live as long as a registration of the buffer.
    fn owner(&self) -> Arc<dyn Any + Send + Sync>;
}

/// An RDMA device, as far as the probe asks it. Errors are errnos.
pub trait Device {
    /// A registration.
    type Mr;

    /// Its name.
    fn name(&self) -> &str;

    /// What `ibv_reg_dmabuf_mr` says to the descriptor -1: EBADF when the driver can do it, EOPNOTSUPP or alike when not.
    fn ask_dmabuf(&self) -> io::Error;

    /// `ibv_reg_dmabuf_mr` of `range.1` bytes at `range.0`.
    fn reg_dmabuf_mr(
        &self,
        fd: BorrowedFd<'_>,
        range: (u64, usize),
        address: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Self::Mr>;

    /// `ibv_reg_mr`.
    fn reg_mr(&self, address: u64, len: usize, owner: Arc<dyn Any + Send + Sync>) -> io::Result<Self::Mr>;
}

/// What the probe asks: buffer, device, modules.
#[derive(Debug)]
pub struct Probe<'a, B: ?Sized, D> {
    /// The buffer.
    pub buffer: &'a B,
    /// The device, or why there is none.
    pub device: Result<&'a D, Why>,
    /// The module that resolves a GPU's addresses, if it is loaded.
    pub peer_module: Option<&'static str>,
    /// Bytes of the staging slots together.
    pub staging: usize,
}

/// One line of the report: a stage and what came of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// Which.
    pub stage: Stage,
    /// How it was taken, or why not; nothing when it was not tried.
    pub outcome: Option<Result<String, Why>>,
}

/// What the stages said, in order, and the first that works.
#[derive(Debug)]
pub struct Outcome<M> {
    /// One line per stage.
    pub lines: Vec<Line>,
    /// The stage that was taken and its memory; nothing when the only stage that was allowed does not work.
    pub taken: Option<(Stage, Path<M>)>,
}

/// Tries the stages in order until one works; only `forced`, if it is given.
///
/// # Errors
/// Staging fails: there is no way left.
// EXERCISE 1 (The probe): try the stages of `Stage::ALL` in order until one works, only the one that is forced if
// there is one, and note a line for each.
pub fn run<B: Memory + ?Sized, D: Device>(probe: &Probe<'_, B, D>, forced: Option<Stage>) -> Result<Outcome<D::Mr>> {
    let mut outcome = Outcome { lines: Vec::new(), taken: None };
    for stage in Stage::ALL {
        let skip = outcome.taken.is_some() || forced.is_some_and(|only| only != stage);
        let attempt = match stage {
            _ if skip => None,
            Stage::Dmabuf => Some(dmabuf::attempt(probe)),
            Stage::PeerMemory => Some(peer_memory::attempt(probe)),
            Stage::Staging => Some(staging::attempt(probe)?),
        };
        outcome.lines.push(match attempt {
            None => Line { stage, outcome: None },
            Some(Attempt::NotTaken(why)) => Line { stage, outcome: Some(Err(why)) },
            Some(Attempt::Taken(path, how)) => {
                outcome.taken = Some((stage, path));
                Line { stage, outcome: Some(Ok(how)) }
            }
        });
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests;
