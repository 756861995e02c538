//! Kind of the pages on which a buffer lies, as the kernel reports it.
//!
//! Source: Linux `include/uapi/linux/fs.h` and `Documentation/admin-guide/mm/pagemap.rst`, `PAGEMAP_SCAN`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};

/// Argument of `PAGEMAP_SCAN`: `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Result of `PAGEMAP_SCAN`: `struct page_region`.
#[repr(C)]
#[derive(Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610u32 as libc::Ioctl;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// Returns true if the first run of huge pages in `data` is at least half of it, by one system call on this process's
/// page tables; false where the kernel does not report that (before Linux 6.7).
pub(crate) fn is_huge(data: &[u8]) -> bool {
    static PAGEMAP: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let open = || rustix::fs::open("/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
    let Some(pagemap) = PAGEMAP.get_or_init(open) else { return false };
    let page = rustix::param::page_size() as u64;
    let start = data.as_ptr() as u64 / page * page;
    let mut region = Region::default();
    let mut arg = ScanArg {
        size: size_of::<ScanArg>() as u64,
        flags: 0,
        start,
        end: (data.as_ptr() as u64 + data.len() as u64).next_multiple_of(page),
        walk_end: 0,
        vec: (&raw mut region) as u64,
        vec_len: 1,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_HUGE,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_HUGE,
    };
    // SAFETY: the kernel reads and writes `arg`, and writes one `Region`; the range is only looked up.
    let regions = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
    regions == 1 && 2 * (region.end - region.start) >= data.len() as u64
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::huge::HUGE_PAGE;
    use crate::mapping::Mapping;

    #[test]
    fn huge_pages_are_told_from_small_ones() {
        // On the heap or the stack, less than a huge page of it.
        assert!(!is_huge(&[0; 100]));
        let memory = Mapping::anonymous(2 * HUGE_PAGE).unwrap();
        // SAFETY: the mapping is ours alone.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.base().as_ptr(), memory.len()) };
        // Not touched: no pages at all.
        assert!(!is_huge(bytes));
        bytes.fill(1);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let range = format!("{:x}-", memory.base().as_ptr() as usize);
        let ours = smaps.split_once(&range).map_or("", |(_, rest)| rest);
        let huge = ours.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
        let huge: usize = huge.and_then(|text| text.trim().strip_suffix(" kB")).map_or(0, |kib| kib.parse().unwrap());
        if is_huge(bytes) {
            assert!(huge > 0, "smaps shows none");
            assert!(bytes.chunks(40_000).filter(|part| is_huge(part)).count() * 40_000 >= huge << 9);
        } else {
            println!("SKIPPED: huge pages: the kernel does not tell, or gave {huge} KiB of them");
        }
    }
}
