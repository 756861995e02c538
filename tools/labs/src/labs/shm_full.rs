//! Shared memory in a file of /dev/shm that is too small, as containers have it.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use tinynccl::{Comm, launch};

use crate::ranks::{Announced, Job, refused, unshare};

const SHM: &str = "/dev/shm";
const SEGMENT: &str = "/dev/shm/labs-segment";
/// Bytes that /dev/shm holds in this lab, and bytes that the job needs.
const HOLDS: u64 = 1 << 20;
const WANTED: usize = 8 << 20;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Run the mended version: the library, whose shared memory is not a file of /dev/shm.
    #[arg(long)]
    fixed: bool,
    /// Reserve the segment before it is used, as NCCL does.
    #[arg(long, conflicts_with = "fixed")]
    reserve: bool,
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    if !launch::is_rank() {
        small_shm()?;
    }
    let job = Job::new(2, 10, |e| matches!(e, tinynccl::Error::PeerLost { peer: 0, .. }));
    let job = job.with(&[("TINYNCCL_TRANSPORT", "shm")]);
    let job = if options.reserve { job } else { job.killed_by(Signal::BUS) };
    job.run(|comm| share(&comm, options))
}

/// Puts an empty tmpfs of 1 MiB over /dev/shm, for this process and its children alone.
fn small_shm() -> Result<()> {
    unshare(UnshareFlags::NEWNS, "a mount namespace of our own")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|e| refused("keeping our mounts to ourselves", e))?;
    let size = CString::new(format!("size={HOLDS}")).context("mount options")?;
    mount("tmpfs", SHM, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, size.as_c_str())
        .map_err(|e| refused("mounting a small /dev/shm", e))?;
    println!("/dev/shm holds {} KiB here", HOLDS >> 10);
    Ok(())
}

/// Rank 0 hands 8 MiB to rank 1.
fn share(comm: &Comm, options: &Options) -> Result<()> {
    let rank = comm.rank();
    if options.fixed {
        let mut data = vec![if rank == 0 { 7u8 } else { 0 }; WANTED];
        comm.broadcast_in_place(&mut data, 0)?;
        ensure!(data.iter().all(|&byte| byte == 7), "rank {rank}: other bytes than rank 0 sent");
        println!("rank {rank}: {} MiB are here, {SHM} is untouched", WANTED >> 20);
        return Ok(());
    }
    if rank == 0 {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(SEGMENT)?;
        if options.reserve {
            // Takes the pages now: an error instead of a signal later.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, WANTED as u64).map_err(|e| {
                let free = rustix::fs::statvfs(SHM).map_or(0, |s| s.f_bavail * s.f_frsize);
                Announced(format!("rank 0: reserving {WANTED} bytes of {SEGMENT}: {e}; {SHM} has {free} bytes free"))
            })?;
        }
        // This alone succeeds whatever the size: a file with a hole.
        rustix::fs::ftruncate(&file, WANTED as u64)?;
        println!("rank 0: {SEGMENT} has {} bytes", file.metadata()?.len());
        fill(&file)?;
        println!("rank 0: all of it is written");
    }
    comm.barrier()?;
    Ok(())
}

/// Writes to every page of the file's mapping.
fn fill(file: &File) -> Result<()> {
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), WANTED, flags, MapFlags::SHARED, file.as_fd(), 0) }?;
    for page in (0..WANTED).step_by(4096) {
        // SAFETY: inside of the mapping. The kernel sends SIGBUS when it has no page for it: that is the lab.
        unsafe { base.cast::<u8>().add(page).write_volatile(7) };
    }
    Ok(())
}
