//! Checks that the processor can access memory that is about to be registered. A kernel's RDMA device pins its pages
//! and fails with `EFAULT` otherwise; this one would find out when it copies, and take the program down.
//!
//! A GPU's memory is the common case: it has addresses in the process, and the processor may not use them.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;

/// Returns true if all of `at..at + len` is mapped for reading, and with `writes` for writing, or if the system gives
/// no answer.
pub(crate) fn is_accessible(at: usize, len: usize, writes: bool) -> bool {
    let Ok(maps) = File::open("/proc/self/maps") else { return true };
    let until = at.saturating_add(len);
    match asked(&maps, at, until, writes) {
        Ok(answer) => answer,
        // A kernel before 6.11.
        Err(_) => covers(BufReader::new(maps), at, until, writes),
    }
}

thread_local! {
    /// Range that this thread has found accessible in its time slice: from, until, and true if for writing.
    static FOUND: Cell<(usize, usize, bool)> = const { Cell::new((0, 0, false)) };
}

/// Bytes that are looked at ahead: the next packets of a message mostly follow.
const AHEAD: usize = 64 << 10;

/// Begins a time slice of this thread: what it found before may have been unmapped since.
pub(crate) fn begin_turn() {
    FOUND.set((0, 0, false));
}

/// Returns true if the `len` bytes from `at` on, which the RDMA device is about to touch, are still mapped; it may
/// touch up to `room`. A program that unmaps memory which it has registered would be taken down by its device
/// otherwise. Pages that were never touched are there after this.
pub(crate) fn is_still_mapped(at: usize, len: usize, room: usize, writes: bool) -> bool {
    let (from, until, wrote) = FOUND.get();
    if from <= at && at + len <= until && (wrote || !writes) {
        return true;
    }
    let ahead = AHEAD.min(room).max(len);
    let Some(found) = [ahead, len].into_iter().find(|len| populates(at, *len, writes)) else { return false };
    FOUND.set((at, at + found, writes));
    true
}

/// Populates the pages through the kernel; `false` where they cannot be accessed.
fn populates(at: usize, len: usize, writes: bool) -> bool {
    // The smallest there is: an address is a multiple of larger ones as well, or the kernel says `EINVAL`.
    const PAGE: usize = 4096;
    let start = at & !(PAGE - 1);
    let advice = if writes { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    loop {
        // SAFETY: the call touches pages as the program itself would, and fails where it cannot.
        if unsafe { libc::madvise(start as *mut _, at + len - start, advice) } == 0 {
            return true;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // No right to it, a device's memory, or a kernel before 5.14.
            Some(libc::EINVAL) => return is_accessible(at, len, writes),
            _ => return false,
        }
    }
}

/// A query of the mapping at an address and its answer, `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    allowed: u64,
    /// Page size, file and name.
    others: [u64; 7],
}

/// Queries the kernel for one mapping after the other: a process may have thousands, and to read their lines takes
/// microseconds for each.
///
/// # Errors
/// The system's error where the kernel has no such query.
fn asked(maps: &File, mut from: usize, until: usize, writes: bool) -> io::Result<bool> {
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;
    // _IOWR('f', 17, struct procmap_query)
    const ASK: u64 = 3 << 30 | (size_of::<Query>() as u64) << 16 | (b'f' as u64) << 8 | 17;
    let needed = if writes { READABLE | WRITABLE } else { READABLE };
    while from < until {
        let mut query = Query { size: size_of::<Query>() as u64, address: from as u64, ..Query::default() };
        // SAFETY: the query has the size that it names, and lives until the call returns.
        if unsafe { libc::ioctl(maps.as_raw_fd(), ASK as _, &raw mut query) } != 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ENOENT) { Ok(false) } else { Err(error) };
        }
        if query.allowed & needed != needed {
            return Ok(false);
        }
        from = query.end as usize;
    }
    Ok(true)
}

/// Returns true if lines of mappings in the order of their addresses, `7f00-7f80 rw-p ...`, cover `from..until` with
/// the access.
fn covers(maps: impl BufRead, mut from: usize, until: usize, writes: bool) -> bool {
    for line in maps.lines().map_while(Result::ok) {
        if from >= until {
            break;
        }
        let Some((range, rest)) = line.split_once(' ') else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)) else { continue };
        if end <= from {
            continue;
        }
        let allowed = rest.starts_with("rw") || rest.starts_with('r') && !writes;
        if start > from || !allowed {
            return false;
        }
        from = end;
    }
    from >= until
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str =
        "1000-3000 rw-p 00000000 00:00 0\n3000-4000 r--p 00000000 00:00 0 [x]\n5000-6000 ---p 0 00:00 0\n";

    #[test]
    fn a_range_is_covered_by_mappings_without_a_gap() {
        let covers = |from, until, writes| covers(MAPS.as_bytes(), from, until, writes);
        assert!(covers(0x1000, 0x3000, true) && covers(0x1800, 0x4000, false) && covers(0x2000, 0x2000, true));
        assert!(!covers(0x2fff, 0x3001, true), "the second may only be read");
        assert!(!covers(0x3000, 0x4001, false), "a gap");
        assert!(!covers(0x800, 0x1001, false) && !covers(0x6000, 0x6001, false), "not mapped");
        assert!(!covers(0x5000, 0x5001, false), "no access");
    }

    #[test]
    fn memory_that_is_unmapped_is_noticed_in_the_next_turn() {
        const PAGE: usize = 4096;
        // SAFETY: pages of this test's own, which nothing is made of.
        unsafe {
            let (all, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let pages = libc::mmap(std::ptr::null_mut(), 4 * PAGE, all, private, -1, 0);
            let at = pages as usize;
            let there = |page: usize, writes| is_still_mapped(at + page * PAGE + 8, 16, (4 - page) * PAGE - 8, writes);
            assert!(there(0, false) && there(0, true) && there(3, true));
            assert_eq!(libc::munmap(pages.byte_add(PAGE), PAGE), 0);
            assert_eq!(libc::mprotect(pages.byte_add(2 * PAGE), PAGE, libc::PROT_READ), 0);
            assert_eq!(libc::mprotect(pages.byte_add(3 * PAGE), PAGE, libc::PROT_NONE), 0);
            begin_turn();
            assert!(there(0, true), "in spite of what follows");
            assert!(!there(1, false) && !there(1, true), "unmapped");
            assert!(there(2, false) && !there(2, true), "to be read alone");
            assert!(!there(3, false) && !is_still_mapped(at + 3 * PAGE - 8, 16, 16, false), "no access");
            assert_eq!(libc::munmap(pages, 4 * PAGE), 0);
            begin_turn();
        }
    }

    #[test]
    fn our_own_memory_is_accessible_and_reserved_addresses_are_not() {
        let bytes = vec![0u8; 3 << 20];
        assert!(is_accessible(bytes.as_ptr() as usize, bytes.len(), true));
        assert!(!is_accessible(1, 1, false));
        // Both queries.
        let maps = || File::open("/proc/self/maps").expect("/proc");
        let code = our_own_memory_is_accessible_and_reserved_addresses_are_not as fn() as usize;
        let ours = (bytes.as_ptr() as usize, bytes.len());
        for (at, len) in [ours, (code, 1), (1, 1), (ours.0, 1 << 46), (ours.0, 0)] {
            for writes in [false, true] {
                let lines = covers(BufReader::new(maps()), at, at + len, writes);
                assert_eq!(is_accessible(at, len, writes), lines, "{at:x}, {len:x} bytes, writes: {writes}");
                if let Ok(answer) = asked(&maps(), at, at + len, writes) {
                    assert_eq!(answer, lines, "{at:x}, {len:x} bytes, writes: {writes}");
                }
            }
        }
    }
}
