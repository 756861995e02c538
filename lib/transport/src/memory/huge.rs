//! Huge pages for memory that consists of them: fewer page faults and fewer misses of the address cache.
//!
//! 1. The system's pool, `/proc/sys/vm/nr_hugepages`, where an administrator has put pages aside: memory of a memfd
//!    only.
//! 2. Transparent huge pages: the kernel finds them when the memory is touched, where
//!    `/sys/kernel/mm/transparent_hugepage/shmem_enabled` (memfd) or `enabled` (private memory) lets it.
//! 3. Else pages of 4 KiB.
//!
//! The one in use is logged at level debug. Source: Linux `Documentation/admin-guide/mm/{hugetlbpage,transhuge}.rst`.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;
use rustix::mm::Advice;

/// Bytes of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";

/// Returns true if memory of `len` bytes consists of whole huge pages.
pub(crate) fn is_whole(len: usize) -> bool {
    len >= HUGE_PAGE && len.is_multiple_of(HUGE_PAGE)
}

/// A memfd, still empty, whose pages come from the pool, if that has enough for `len` bytes. It may have fewer when the
/// memory is mapped: mapping takes them all, or fails.
pub(crate) fn from_pool(len: usize) -> Option<OwnedFd> {
    if !is_whole(len) || in_pool() < len / HUGE_PAGE {
        return None;
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    rustix::fs::memfd_create("tinynccl", flags)
        .map_err(|e| log::debug!("{len} bytes of shared memory: a memfd of huge pages: {e}"))
        .ok()
}

/// Pages of the pool that are free and not reserved.
fn in_pool() -> usize {
    let count = |name: &str| -> Option<usize> {
        std::fs::read_to_string(format!("{POOL}/{name}_hugepages")).ok()?.trim().parse().ok()
    };
    count("free").unwrap_or(0).saturating_sub(count("resv").unwrap_or(0))
}

/// Asks for transparent huge pages for a mapping, `shared` or private, of whole huge pages.
pub(crate) fn advise(base: NonNull<u8>, len: usize, shared: bool) {
    // SAFETY: the range is a mapping that the caller has just made; this advice changes no contents.
    let advised = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
    if log::log_enabled!(log::Level::Debug) {
        let (kind, file) = if shared { ("shared", "shmem_enabled") } else { ("private", "enabled") };
        let policy = std::fs::read_to_string(format!("{TRANSPARENT}/{file}")).unwrap_or_default();
        let policy = policy.split(['[', ']']).nth(1).unwrap_or("unknown");
        let outcome = match (advised, policy) {
            (Err(e), _) => format!("pages of 4 KiB ({e})"),
            (Ok(()), "never" | "deny") => format!("pages of 4 KiB ({file} is {policy})"),
            (Ok(()), _) => format!("transparent huge pages ({file} is {policy})"),
        };
        log::debug!("{len} bytes of {kind} memory: {outcome}");
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::mapping::Mapping;

    const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

    /// Pages added to the system's pool, until dropped.
    struct Added {
        before: usize,
    }

    impl Added {
        /// `None` when it is not for us to change.
        fn pages(pages: usize) -> Option<Added> {
            let before: usize = std::fs::read_to_string(RESERVED).ok()?.trim().parse().ok()?;
            std::fs::write(RESERVED, (before + pages).to_string()).ok()?;
            Some(Added { before })
        }
    }

    impl Drop for Added {
        fn drop(&mut self) {
            let _ = std::fs::write(RESERVED, self.before.to_string());
        }
    }

    fn page_size(fd: impl AsFd) -> usize {
        rustix::fs::fstat(fd).unwrap().st_blksize as usize
    }

    /// Writes to the first and the last byte of one end, and reads them at the other.
    fn shares(len: usize) -> OwnedFd {
        let (here, fd) = Mapping::memfd(len).unwrap();
        let there = Mapping::of_peer(&fd, len).unwrap();
        for at in [0, len - 1] {
            // SAFETY: within both mappings, which nobody else uses.
            unsafe {
                assert_eq!(there.base().add(at).read(), 0);
                here.base().add(at).write(7);
                assert_eq!(there.base().add(at).read(), 7);
            }
        }
        fd
    }

    #[test]
    fn only_whole_huge_pages_ask_for_them() {
        assert!(!is_whole(0) && !is_whole(HUGE_PAGE - 4096) && !is_whole(HUGE_PAGE + 4096));
        assert!(is_whole(HUGE_PAGE) && is_whole(3 * HUGE_PAGE));
        assert!(from_pool(HUGE_PAGE / 2).is_none());
    }

    /// Both paths one after the other: the pool is the whole system's.
    #[test]
    fn memory_comes_from_the_pool_when_that_has_enough() {
        // More than there can be.
        assert!(from_pool((in_pool() + (1 << 20)) * HUGE_PAGE).is_none());
        let len = 2 * HUGE_PAGE;
        let free = in_pool();
        let added = if free < 2 { Added::pages(2) } else { None };
        if in_pool() >= 2 {
            assert_eq!(page_size(shares(len)), HUGE_PAGE);
            assert_eq!(page_size(shares(HUGE_PAGE + 4096)), 4096);
        } else {
            println!("SKIPPED: memory from the pool: {free} free huge pages, and {RESERVED} gave no more");
        }
        drop(added);
        if in_pool() == 0 {
            assert_eq!(page_size(shares(len)), 4096);
        }
    }
}
