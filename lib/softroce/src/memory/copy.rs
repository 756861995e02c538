//! Copies to and from registered memory, whose bytes the program may look at meanwhile.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::mapped::is_still_mapped;
use super::{GpuMemory, Refusal};

/// Registered bytes that an access was checked for. Valid while the table's lock is held that gave it out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(super) at: *mut u8,
    pub(super) len: usize,
    /// Bytes from `at` to the end of the region.
    pub(super) room: usize,
    /// The GPU whose driver copies to and from there; the region holds it.
    pub(super) gpu: Option<NonNull<GpuMemory>>,
}

// SAFETY: a piece is an address and a length; what it points to is only touched under the table's lock (see `Table`).
unsafe impl Send for Piece {}

impl Piece {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[cfg(test)]
    pub(crate) fn addr(&self) -> *mut u8 {
        self.at
    }

    /// Returns true if the processor has no access to the bytes, which are a GPU's.
    pub(crate) fn is_of_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Fails if the program has unmapped the bytes. Called before they are touched.
    pub(crate) fn check(&self, writes: bool) -> Result<(), Refusal> {
        let there = self.len == 0 || self.gpu.is_some();
        if there || is_still_mapped(self.at as usize, self.len, self.room, writes) {
            Ok(())
        } else {
            Err(Refusal::Unmapped)
        }
    }

    /// # Safety
    /// The table's lock that gave the piece out is held for `'a`.
    unsafe fn gpu<'a>(&self) -> Option<&'a GpuMemory> {
        // SAFETY: the region is in the table for as long as the lock is held.
        self.gpu.map(|gpu| unsafe { gpu.as_ref() })
    }

    /// The bytes, to be read.
    ///
    /// # Safety
    /// The table's lock that gave the piece out is held for `'a`, and the piece is not of a GPU and was checked.
    pub(crate) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: registered, so valid for reads by the promise of the caller that registered it; the lock keeps it so
        // for 'a. The program promises not to write to memory that it has posted; only a peer that acknowledges what
        // has not left yet makes it believe that it may.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

/// Copies `from` to the front of `to`. The last bytes are written last: programs wait for a message by polling them.
/// What goes to a GPU is only then sure to be there when the bytes come that end their message, `ends`.
///
/// # Safety
/// The table's lock that gave `to` out is held, and `to` was checked for writing.
pub(crate) unsafe fn copy_in(to: Piece, from: &[u8], ends: bool) -> Result<(), Refusal> {
    let len = from.len().min(to.len);
    // SAFETY: as the caller promises.
    if let Some(gpu) = unsafe { to.gpu() } {
        return gpu.write(to.at as u64, from.get(..len).unwrap_or_default(), ends);
    }
    to.check(true)?;
    let split = len.saturating_sub(8);
    let (body, tail) = from.get(..len).unwrap_or_default().split_at(split);
    // SAFETY: `len` is within the piece, which is registered for writing; a packet's buffer is no registered memory, so
    // the two do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(body.as_ptr(), to.at, body.len());
        fence(Ordering::Release);
        std::ptr::copy_nonoverlapping(tail.as_ptr(), to.at.add(split), tail.len());
    }
    Ok(())
}

/// Appends the bytes of `from` to `to`.
///
/// # Safety
/// The table's lock that gave `from` out is held.
pub(crate) unsafe fn copy_out(from: Piece, to: &mut Vec<u8>) -> Result<(), Refusal> {
    from.check(false)?;
    to.reserve(from.len);
    // SAFETY: the space was reserved and is initialized by the copy; the source is registered. A copy by pointers, as
    // the program or a peer may write to the source meanwhile.
    unsafe {
        let room = to.as_mut_ptr().add(to.len());
        match from.gpu() {
            Some(gpu) => gpu.read(from.at as u64, room, from.len)?,
            None => std::ptr::copy_nonoverlapping(from.at, room, from.len),
        }
        to.set_len(to.len() + from.len);
    }
    Ok(())
}

/// Changes the word at `at` with `f` in one step, also before the processor's own atomic operations; returns the old
/// one. The word is in the byte order of the machine, as adapters have it.
///
/// # Safety
/// The table's lock that gave `at` out is held, and `at` was checked for atomic operations.
pub(crate) unsafe fn atomic(at: Piece, f: impl Fn(u64) -> Option<u64>) -> Result<u64, Refusal> {
    if at.len != 8 || !at.at.cast::<u64>().is_aligned() {
        return Err(Refusal::Bounds);
    }
    // SAFETY: as the caller promises.
    if let Some(gpu) = unsafe { at.gpu() } {
        return gpu.atomic(at.at as u64, f);
    }
    at.check(true)?;
    // SAFETY: eight registered bytes, aligned.
    let word = unsafe { AtomicU64::from_ptr(at.at.cast()) };
    Ok(word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, f).unwrap_or_else(|unchanged| unchanged))
}
