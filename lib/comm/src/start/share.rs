//! Memory that all ranks of a communicator map: the first rank makes a memfd, the others open it through `/proc`.
//!
//! Links pass descriptors over their Unix sockets, but the shared region is needed before any pair of ranks has a link.
//! A process may open another process's descriptor as `/proc/PID/fd/N` if it may read that process (`ptrace(2)`,
//! "PTRACE_MODE_READ_FSCREDS"). If that fails, all ranks learn it and continue without a shared region.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::state::control::{Control, exchange};
use tinynccl_plan::error::{Error, Result};
use tinynccl_transport::mapping::Mapping;

/// A rank's message about the memory called `key`. Every rank states the size that it wants.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Offer {
    bytes: usize,
    /// Process and descriptor, from the first rank.
    fd: Option<(u32, i32)>,
}

/// The result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Answer {
    trouble: Option<String>,
}

/// `bytes` of shared, zeroed memory on every rank of `members`, all of them on this host; `None`, on all ranks, when
/// one of them cannot have it. `ended` is that of `Sharing::collect`.
pub(super) fn between_processes(
    control: &dyn Control,
    key: &str,
    members: &[usize],
    bytes: usize,
    ended: &dyn Fn() -> bool,
) -> Result<Option<Arc<Mapping>>> {
    let first = members.first() == Some(&control.rank());
    let mut trouble = None;
    let mut note = |e: Error| trouble = Some(e.to_string());
    let made = if first { Mapping::memfd(bytes).map_err(&mut note).ok() } else { None };
    let fd = made.as_ref().map(|(_, fd)| (std::process::id(), fd.as_raw_fd()));
    let offers: Vec<Offer> = exchange(control, key, members, &Offer { bytes, fd }, ended)?;
    agree(members, &offers.iter().map(|o| o.bytes).collect::<Vec<_>>(), control.rank())?;
    let memory = match (made, offers.first().and_then(|o| o.fd)) {
        // The descriptor stays open until all have answered.
        (Some((memory, fd)), _) => Some((memory, Some(fd))),
        (None, Some((pid, fd))) => open(pid, fd, bytes).map_err(&mut note).ok().map(|memory| (memory, None)),
        (None, None) => None,
    };
    let answer = Answer { trouble: trouble.or_else(|| memory.is_none().then(|| "no memory".to_owned())) };
    let answers: Vec<Answer> = exchange(control, &format!("{key}-mapped"), members, &answer, ended)?;
    for (rank, answer) in answers.iter().enumerate() {
        if let Some(trouble) = &answer.trouble {
            log::debug!("no shared memory '{key}': rank {rank}: {trouble}");
            return Ok(None);
        }
    }
    Ok(memory.map(|(memory, _fd)| Arc::new(memory)))
}

/// All ranks want the same size.
pub(super) fn agree(members: &[usize], bytes: &[usize], rank: usize) -> Result<()> {
    let first = bytes.first().copied().unwrap_or(0);
    match bytes.iter().position(|&b| b != first) {
        None => Ok(()),
        Some(other) => Err(Error::invalid(
            "shared memory",
            format!(
                "rank {} wants {first} bytes, rank {} wants {}: expected the same on all ranks (seen by rank {rank})",
                members[0], members[other], bytes[other]
            ),
        )),
    }
}

fn open(pid: u32, fd: i32, bytes: usize) -> Result<Mapping> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let file = File::options().read(true).write(true).open(&path).map_err(|e| Error::io("shared memory", &path, &e))?;
    Mapping::of_peer(&OwnedFd::from(file), bytes)
}
