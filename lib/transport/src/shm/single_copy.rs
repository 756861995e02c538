//! Payloads that stay where they are until the receiver pulls them: one copy instead of two.
//!
//! The sender's line has the address of the payload in its own memory; the receiver reads it from there with
//! `process_vm_readv(2)` and frees the line. The sender counts as flushed once the last zero-copy line is freed, and
//! the memory must not change before. Only the payload ring is left out: lines, their order, credit and the words that
//! order them are those of every message. (Open MPI calls the method "smsc/cma", MPICH and UCX "CMA", cross-memory
//! attach.)
//!
//! # When it pays
//! The system call pins the sender's pages one by one. That is cheap where they are huge, so the sender looks
//! ([`pagemap::is_huge`]). Where they are small it costs more than the second copy between cores that are near each
//! other, and half as much between cores that are far apart, whose every line crosses twice on the way through the
//! ring: that is measured when a communicator starts ([`ZeroCopyFrom`]). One copy keeps one core busy, two copies two:
//! a large message on small pages goes by zero copy only where both ranks send.
//!
//! # Permission
//! The kernel lets a process read another's memory if it may trace it: the same user, and nothing like Yama's
//! `ptrace_scope` or a container's filter against it. So the receiver tries it while the link is made, on a nonce, and
//! reports whether it worked; where it did not, everything goes through the ring. The nonce is read again along with
//! every payload, by the same call and so from the same memory: a process that ended and left its number to another is
//! noticed.
//!
//! # Revoking
//! A sender that fails before its memory is pulled closes the link before it gives the memory back to its owner
//! (`revoke`). The receiver looks for that after it has read, so it may read anything but never takes it for a message.
//! It reads through the kernel between threads of one process, too: a plain copy could meet memory that is unmapped.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::memory::pagemap;
use tinynccl_sys::config;
use tinynccl_sys::sync::{AtomicU32, Words};

/// Least length, by measuring: below it two cores that are near each other are faster with two copies (65 KiB: 5
/// against 7 us; 256 KiB: 20 against 17), and cores that are far apart lose little.
const WORTH: usize = 128 << 10;
/// Most bytes on small pages that go by zero copy one way. (Far cores: 1 MiB there and back 130 to 190 us by zero copy
/// and 220 through the ring, 2 MiB 460 to 520 and 430, 32 MiB 12,000 and 6,800.)
const ONE_WAY: usize = 1 << 20;

/// The least payload on ordinary pages that goes by zero copy; one for all links of a rank, which learn it when it was
/// measured.
#[derive(Debug, Clone)]
pub(crate) struct ZeroCopyFrom(Arc<AtomicUsize>);

impl Default for ZeroCopyFrom {
    /// No payload on ordinary pages goes by zero copy.
    fn default() -> ZeroCopyFrom {
        ZeroCopyFrom(Arc::new(AtomicUsize::new(usize::MAX)))
    }
}

impl ZeroCopyFrom {
    pub(crate) fn set(&self, bytes: usize) {
        self.0.store(bytes, Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Settings for pulling large payloads from the sender's memory, and the process that it belongs to.
#[derive(Debug, Clone)]
pub(crate) struct SingleCopy {
    /// The peer's process id as we see it; 0: we cannot see it.
    pub(crate) pid: i32,
    /// Payloads that we send by zero copy; [`config::SingleCopy::Off`]: none, and we do not pull either.
    pub(crate) choice: config::SingleCopy,
    /// Least length of a payload on small pages that goes by zero copy, where the choice is ours.
    pub(crate) ordinary: ZeroCopyFrom,
}

/// Last answer whether a payload is worth zero copy, and what it depended on. It may take a system call to find out, so
/// an answer counts for several messages from the same place.
#[derive(Debug, Default)]
pub(super) struct Worth {
    of: Option<(usize, usize, bool, usize)>,
    worth: bool,
    uses: u32,
}

/// Times that an answer about the pages of a buffer is used again: it decides about speed alone.
const SAME: u32 = 100;

/// The sender's nonce in shared memory, and the receiver's answer. Written while the link is made, before the first
/// message.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Probe {
    /// Address of the sender's nonce, and the nonce.
    nonce: Words<3>,
    can_pull: AtomicU32,
}

/// A number that only this process has at this address.
fn nonce() -> &'static [u64; 2] {
    static NONCE: OnceLock<[u64; 2]> = OnceLock::new();
    NONCE.get_or_init(|| {
        let mut bytes = [0u8; 16];
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes, flags) {
            Ok(16) => bytemuck::cast(bytes),
            // All zero: no receiver accepts it.
            _ => [0; 2],
        }
    })
}

impl Probe {
    #[cfg(all(test, loom))]
    pub(super) fn new() -> Probe {
        Probe { nonce: Words::new(), can_pull: AtomicU32::new(0) }
    }

    /// Writes our nonce and its address. Called by the sender.
    pub(super) fn introduce(&self) {
        let nonce = nonce();
        self.nonce.store([nonce.as_ptr() as u64, nonce[0], nonce[1]]);
    }

    /// Returns true if the receiver has answered that it can pull. Called by the sender.
    pub(super) fn can_pull(&self) -> bool {
        self.can_pull.load(Ordering::Relaxed) != 0
    }
}

impl SingleCopy {
    /// Everything goes through the ring.
    pub(crate) fn off() -> SingleCopy {
        SingleCopy { pid: 0, choice: config::SingleCopy::Off, ordinary: ZeroCopyFrom::default() }
    }

    /// Returns true if payloads may go by zero copy at all.
    pub(super) fn is_on(&self) -> bool {
        self.choice != config::SingleCopy::Off
    }

    /// Returns true if a payload is worth zero copy; remembers the answer in `known`.
    pub(super) fn takes(&self, data: &[u8], two_way: bool, known: &mut Worth) -> bool {
        let of = Some((data.as_ptr() as usize, data.len(), two_way, self.ordinary.get()));
        if known.of == of && known.uses < SAME {
            known.uses += 1;
        } else {
            *known = Worth { of, worth: self.is_worth(data, two_way), uses: 0 };
        }
        known.worth
    }

    fn is_worth(&self, data: &[u8], two_way: bool) -> bool {
        match self.choice {
            config::SingleCopy::Auto => {
                let ordinary = data.len() >= self.ordinary.get() && (two_way || data.len() <= ONE_WAY);
                ordinary || data.len() >= WORTH && pagemap::is_huge(data)
            }
            config::SingleCopy::Off => false,
            config::SingleCopy::From(bytes) => data.len() >= bytes,
        }
    }

    /// Returns the reader of the sender's memory, if reading it works, and records in `probe` that it does. Called by
    /// the receiver.
    pub(super) fn reader(&self, probe: &Probe) -> Option<Reader> {
        if !self.is_on() {
            return None;
        }
        let [address, first, second] = probe.nonce.load();
        let reader = Reader { pid: self.pid, address, nonce: [first, second] };
        match reader.probe() {
            Ok(()) => {
                probe.can_pull.store(1, Ordering::Relaxed);
                Some(reader)
            }
            Err(why) => {
                log::debug!("process {}: its memory cannot be read ({why}): messages are copied twice", self.pid);
                None
            }
        }
    }
}

/// Reads another process's memory.
#[derive(Debug)]
pub(super) struct Reader {
    pid: i32,
    address: u64,
    nonce: [u64; 2],
}

impl Reader {
    /// As if that process had ended and another one had its number.
    #[cfg(all(test, not(loom)))]
    pub(super) fn of_another(&self) -> Reader {
        Reader { nonce: [1, 2], ..*self }
    }

    fn probe(&self) -> Result<(), String> {
        if self.pid == 0 || self.nonce == [0; 2] {
            return Err("it has not said who it is".to_owned());
        }
        // SAFETY: nothing is written.
        unsafe { self.read(self.address, std::ptr::NonNull::dangling().as_ptr(), 0) }
    }

    /// The model's ranks are threads, and loom is to see that their memory is read.
    #[cfg(loom)]
    pub(super) unsafe fn read(&self, from: u64, to: *mut u8, len: usize) -> Result<(), String> {
        // SAFETY: by the caller; the sender's memory is that of a thread of the model.
        unsafe { tinynccl_sys::sync::copy(from as *const u8, to, len) };
        Ok(())
    }

    /// Copies `len` bytes at `from` in the peer's memory to `to`. On an error, part of them may have been written.
    ///
    /// # Safety
    /// `to` must be valid for writes of `len` bytes.
    #[cfg(not(loom))]
    pub(super) unsafe fn read(&self, from: u64, to: *mut u8, len: usize) -> Result<(), String> {
        let mut nonce = [0u64; 2];
        let mut done = 0;
        loop {
            let local = [
                libc::iovec { iov_base: nonce.as_mut_ptr().cast(), iov_len: size_of_val(&nonce) },
                libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done },
            ];
            let remote = [
                libc::iovec { iov_base: self.address as *mut libc::c_void, iov_len: size_of_val(&nonce) },
                libc::iovec { iov_base: from.wrapping_add(done as u64) as *mut libc::c_void, iov_len: len - done },
            ];
            // SAFETY: `nonce` and, by the caller, the rest of `to` may be written; addresses of the other process are
            // checked by the kernel.
            let got = unsafe { libc::process_vm_readv(self.pid, local.as_ptr(), 2, remote.as_ptr(), 2, 0) };
            if got < 0 {
                let e = std::io::Error::last_os_error();
                return Err(format!("reading {len} bytes of the memory of process {}: {e}", self.pid));
            }
            let got = got as usize;
            if got < size_of_val(&nonce) || nonce != self.nonce {
                return Err(format!("process {} is another one now", self.pid));
            }
            // Short where a page is missing: the next read, which begins there, gets the error.
            done += got - size_of_val(&nonce);
            if done >= len {
                return Ok(());
            }
            if got == size_of_val(&nonce) {
                return Err(format!("process {} has not got the {len} bytes that it announced", self.pid));
            }
        }
    }
}
