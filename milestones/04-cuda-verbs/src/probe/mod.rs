//! GPUDirect RDMA: which memory can the RDMA device use for a GPU's buffer? The probe tries three paths, best first.
//!
//! 1. [`dmabuf`]: the GPU's driver exports the buffer as a dmabuf, the RDMA device's driver imports it
//!    (`cuMemGetHandleForAddressRange`, `ibv_reg_dmabuf_mr`). Upstream Linux, no extra module.
//! 2. [`peer_memory`]: `ibv_reg_mr` on the GPU's address, which the module nvidia_peermem resolves. Older, and
//!    works only with an RDMA core (ib_core) that supports peer-memory clients.
//! 3. [`staging`]: pinned CPU memory, with a copy on each side. Always works.
//!
//! The order is that of NVIDIA's "GPUDirect RDMA" manual and of NCCL's net/ib plugin. The stages use two traits, so
//! that tests can simulate every answer of a kernel.

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

/// The three paths, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// The buffer itself, through a dmabuf.
    Dmabuf,
    /// The buffer itself, by its address.
    PeerMemory,
    /// Pinned memory beside the buffer.
    Staging,
}

impl Stage {
    /// In the order of the attempts.
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

/// The result of a stage.
#[derive(Debug)]
pub enum Attempt<M> {
    /// It works: the memory, and a description of the path.
    Taken(Path<M>, String),
    /// It does not work here.
    NotTaken(Why),
}

/// The memory for the wire.
#[derive(Debug)]
pub enum Path<M> {
    /// The buffer itself.
    Direct(M),
    /// Slots of pinned memory; registered when the wire is RDMA.
    Staged(Arc<Pinned>, Option<M>),
}

/// A dmabuf: one driver's memory for use by another driver, as a file descriptor.
#[derive(Debug)]
pub struct Export {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Offset of the buffer in the dmabuf.
    pub offset: u64,
    /// Name of the exporter, for display.
    pub source: String,
}

/// The buffer, as the probe sees it.
pub trait Memory {
    /// Bytes.
    fn len(&self) -> usize;

    /// True when it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of its first byte in the peer's requests.
    fn address(&self) -> u64;

    /// Exports it as a dmabuf, or gives the reason why it cannot.
    fn export(&self) -> Result<Export, Why>;

    /// An address that only the GPU's driver can resolve, or the reason why there is none.
    fn device_pointer(&self) -> Result<u64, Why>;

    /// The reason why no RDMA device can read and write the GPU's memory over PCIe, if there is one.
    fn gpudirect(&self) -> Result<(), Why> {
        Ok(())
    }

    /// `len` bytes of CPU memory that the GPU copies to and from directly.
    fn pinned(&self, len: usize) -> Result<Pinned>;

    /// The owner that must live as long as a registration of the buffer.
    fn owner(&self) -> Arc<dyn Any + Send + Sync>;
}

/// An RDMA device, as the probe sees it. Errors are errnos.
pub trait Device {
    /// A registration.
    type Mr;

    /// Its name.
    fn name(&self) -> &str;

    /// True for a device in user space, which has no path to the GPU over PCIe.
    fn is_in_user_space(&self) -> bool;

    /// The bytes' path between the buffer and the wire once the device registered the buffer itself.
    fn direct(&self) -> &'static str {
        if self.is_in_user_space() {
            "a card in user space, for which the driver or the processor copies the bytes of each packet"
        } else {
            "no copy through the CPU"
        }
    }

    /// The errno of `ibv_reg_dmabuf_mr` for the descriptor -1: EBADF when the driver supports dmabufs, EOPNOTSUPP or a
    /// similar code when it does not.
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

/// The probe's inputs: buffer, device, modules.
#[derive(Debug)]
pub struct Probe<'a, B: ?Sized, D> {
    /// The buffer.
    pub buffer: &'a B,
    /// The device, or the reason why there is none.
    pub device: Result<&'a D, Why>,
    /// The module that resolves a GPU's addresses, if it is loaded.
    pub peer_module: Option<&'static str>,
    /// Total size of the staging slots.
    pub staging: usize,
}

/// One line of the report: a stage and its result.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// The stage.
    pub stage: Stage,
    /// Details if the stage was taken, else the reason why not; `None` if the probe did not try it.
    pub outcome: Option<Result<String, Why>>,
}

/// The stages' results in order, and the first stage that works.
#[derive(Debug)]
pub struct Outcome<M> {
    /// One line per stage.
    pub lines: Vec<Line>,
    /// The taken stage and its memory; `None` when the only allowed stage does not work.
    pub taken: Option<(Stage, Path<M>)>,
}

/// Tries the stages in order until one works, or only `forced` if given.
///
/// # Errors
/// Staging fails, so no path is left.
// EXERCISE 1 (The probe): try the stages of `Stage::ALL` in order until one works, or only the forced one if there is
// one, and add a report line for each.
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
