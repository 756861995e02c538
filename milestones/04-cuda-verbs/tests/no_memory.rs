//! The kernel's own answer to stage 2 for an address without process memory behind it. To the kernel, a GPU's buffer
//! looks like any other device's. The address is that of a PCI device's registers (a BAR), mapped from sysfs.
//!
//! Needs the feature `verbs`, an RDMA device, a PCI device and root: `scripts/verbs-tests.sh no-memory`. Otherwise the
//! test reports that it is skipped.

use std::any::Any;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Parser as _;
use cuda_verbs::cli::Cli;
use cuda_verbs::pinned::Pinned;
use cuda_verbs::probe::{Attempt, Device as _, Export, Memory, Probe, peer_memory};
use cuda_verbs::rdma;
use cuda_verbs::why::Why;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: usize = 4096;

/// The first page of a PCI device's registers. The test only needs its address and never accesses it.
struct Registers {
    address: usize,
    file: PathBuf,
}

impl Registers {
    /// The first BAR of any PCI device that can be mapped; x86 I/O port ranges cannot.
    fn find() -> Result<Registers> {
        let mut refused = Vec::new();
        for device in std::fs::read_dir("/sys/bus/pci/devices")? {
            let device = device?.path();
            for file in (0..6).map(|bar| device.join(format!("resource{bar}"))).filter(|file| file.exists()) {
                match Registers::map(&file) {
                    Ok(address) => return Ok(Registers { address, file }),
                    Err(error) => refused.push(format!("{}: {error}", file.display())),
                }
            }
        }
        bail!("no PCI device's BAR can be mapped: {refused:?}")
    }

    fn map(file: &PathBuf) -> io::Result<usize> {
        let file = File::options().read(true).write(true).open(file)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping wherever the kernel likes, over nothing of ours.
        let start = unsafe { mmap(ptr::null_mut(), PAGE, protection, MapFlags::SHARED, file.as_fd(), 0) }?;
        Ok(start.addr())
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and without any reference into it.
        let _ = unsafe { munmap(ptr::without_provenance_mut(self.address), PAGE) };
    }
}

impl Memory for Registers {
    fn len(&self) -> usize {
        PAGE
    }

    fn address(&self) -> u64 {
        self.address as u64
    }

    fn export(&self) -> Result<Export, Why> {
        Err(Why::new("not asked", ""))
    }

    fn device_pointer(&self) -> Result<u64, Why> {
        Ok(self.address())
    }

    fn pinned(&self, _: usize) -> Result<Pinned> {
        bail!("not asked")
    }

    fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(())
    }
}

#[test]
fn the_kernel_finds_no_pages_behind_a_devices_registers() {
    let here = rdma::open(&Cli::parse_from(["cuda-verbs"]).choice).expect("no device was asked for");
    let ready = here.map_err(|why| why.to_string()).and_then(|rdma| {
        let registers = Registers::find().map_err(|error| error.to_string())?;
        Ok((rdma, registers))
    });
    let (rdma, registers) = match ready {
        Ok(ready) => ready,
        Err(why) => {
            assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {why}");
            // Not through a macro, whose output the test harness would capture.
            let _ = writeln!(io::stderr(), "SKIPPED: registration of what is no memory: {why}");
            return;
        }
    };
    let refusal = rdma.reg_mr(registers.address(), PAGE, registers.owner()).expect_err("these are no pages of ours");
    assert_eq!(refusal.raw_os_error(), Some(libc::EFAULT), "{}: {refusal}", registers.file.display());

    let probe = Probe { buffer: &registers, device: Ok(&rdma), peer_module: None, staging: PAGE };
    let Attempt::NotTaken(why) = peer_memory::attempt(&probe) else { panic!("registered what is no memory") };
    assert!(why.reason.contains("EFAULT (14, Bad address): no pages of this process"), "{why}");
    assert!(why.next.starts_with("`modprobe nvidia_peermem`"), "{why}");

    // The same call succeeds on memory of this process, so the kernel refused the address.
    let mut pages = vec![0u8; 2 * PAGE];
    let granted = rdma.reg_mr(pages.as_mut_ptr().addr() as u64, pages.len(), Arc::new(()));
    drop(granted.expect("ordinary memory is registered"));
    let _ = writeln!(io::stderr(), "{}: {why}", registers.file.display());
}
