//! Cores and memory, and the kernel's limits on them.

use std::path::Path;

use rustix::process::{Resource, getpid, getrlimit};
use serde::Serialize;

use super::{Roots, text};

/// The host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Host {
    /// Kernel release.
    pub(crate) kernel: String,
    pub(crate) cores: Cores,
    pub(crate) memory: Memory,
    pub(crate) shm: Option<Shm>,
    pub(crate) huge_pages: HugePages,
    pub(crate) other_processes: OtherProcesses,
}

/// Cores on which ranks can run at once.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Cores {
    /// Cores of the machine that are online.
    pub(crate) online: Option<usize>,
    /// Cores that this process may use, by affinity and quota.
    pub(crate) usable: usize,
    /// Cores' worth of CPU time that the control group allows.
    pub(crate) quota: Option<f64>,
}

/// Bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Memory {
    pub(crate) total: Option<u64>,
    pub(crate) available: Option<u64>,
    /// Limit of the control group.
    pub(crate) limit: Option<u64>,
    /// Limit of locked memory, which RDMA registrations count against; `None`: no limit.
    pub(crate) memlock: Option<u64>,
}

/// `/dev/shm`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Shm {
    pub(crate) size: u64,
    pub(crate) free: u64,
}

/// Pages of 2 MiB.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct HugePages {
    /// Transparent ones for a process's own memory: always, madvise, never.
    pub(crate) transparent: Option<String>,
    /// Transparent ones for shared memory: always, within_size, advise, never, deny, force.
    pub(crate) transparent_shared: Option<String>,
    /// Free pages of the system's pool.
    pub(crate) pool_free: Option<u64>,
}

/// Permission to read another process's memory; long messages between ranks of a host use that.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct OtherProcesses {
    /// Yama: 0 any of the same user, 1 one's children, 2 with CAP_SYS_PTRACE, 3 none; `None` where the kernel has no
    /// Yama.
    pub(crate) ptrace_scope: Option<u8>,
    /// The call exists and is not filtered.
    pub(crate) process_vm_readv: bool,
    /// CAP_SYS_PTRACE.
    pub(crate) may_trace_all: bool,
}

impl OtherProcesses {
    /// Ranks are siblings, started by one launcher.
    pub(crate) fn may_read_siblings(&self) -> bool {
        self.process_vm_readv
            && match self.ptrace_scope {
                None | Some(0) => true,
                Some(1 | 2) => self.may_trace_all,
                Some(_) => false,
            }
    }
}

impl Host {
    pub(crate) fn read(roots: &Roots) -> Host {
        let group = text(roots.proc.join("self/cgroup")).and_then(|text| own_group(&text)).unwrap_or_default();
        // A group's limits hold for all groups inside it; in a container, the visible root is the container's group.
        let of_group = |file: &str| {
            let root = roots.sys.join("fs/cgroup");
            text(root.join(group.trim_start_matches('/')).join(file)).or_else(|| text(root.join(file)))
        };
        let meminfo = text(roots.proc.join("meminfo")).unwrap_or_default();
        let huge =
            |file: &str| text(roots.sys.join("kernel/mm/transparent_hugepage").join(file)).and_then(|t| chosen(&t));
        Host {
            kernel: text(roots.proc.join("sys/kernel/osrelease")).unwrap_or_default(),
            cores: Cores {
                online: text(roots.sys.join("devices/system/cpu/online")).and_then(|t| count(&t)),
                usable: std::thread::available_parallelism().map_or(1, usize::from),
                quota: of_group("cpu.max").and_then(|t| quota(&t)),
            },
            memory: Memory {
                total: kilobytes(&meminfo, "MemTotal"),
                available: kilobytes(&meminfo, "MemAvailable"),
                limit: of_group("memory.max").and_then(|t| t.parse().ok()),
                memlock: getrlimit(Resource::Memlock).current,
            },
            shm: shm(&roots.dev.join("shm")),
            huge_pages: HugePages {
                transparent: huge("enabled"),
                transparent_shared: huge("shmem_enabled"),
                pool_free: field(&meminfo, "HugePages_Free").and_then(|t| t.parse().ok()),
            },
            other_processes: OtherProcesses {
                ptrace_scope: text(roots.proc.join("sys/kernel/yama/ptrace_scope")).and_then(|t| t.parse().ok()),
                process_vm_readv: reads_own_memory(),
                may_trace_all: text(roots.proc.join("self/status")).is_some_and(|t| has_ptrace(&t)),
            },
        }
    }
}

/// Processors in a list like `0-3,8,10-11`.
pub(super) fn count(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            last.checked_sub(first)?.checked_add(1)
        })
        .try_fold(0usize, |sum, range| sum.checked_add(range?))
}

/// `MAX PERIOD` in microseconds; `max` is no limit.
fn quota(cpu_max: &str) -> Option<f64> {
    let (most, period) = cpu_max.split_once(' ')?;
    let (most, period): (f64, f64) = (most.parse().ok()?, period.trim().parse().ok()?);
    (most > 0.0 && period > 0.0 && most.is_finite() && period.is_finite()).then_some(most / period)
}

/// The group of version 2: the line `0::/path`.
fn own_group(cgroup: &str) -> Option<String> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// The value of a line `NAME: VALUE`.
fn field<'a>(meminfo: &'a str, name: &str) -> Option<&'a str> {
    meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn kilobytes(meminfo: &str, name: &str) -> Option<u64> {
    field(meminfo, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The word in brackets of `always [madvise] never`.
fn chosen(choices: &str) -> Option<String> {
    Some(choices.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// CAP_SYS_PTRACE (19) among the effective capabilities of `/proc/self/status`.
fn has_ptrace(status: &str) -> bool {
    let bits = field(status, "CapEff").and_then(|hex| u64::from_str_radix(hex, 16).ok());
    bits.is_some_and(|bits| bits & (1 << 19) != 0)
}

fn shm(path: &Path) -> Option<Shm> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(Shm { size: stat.f_blocks * stat.f_frsize, free: stat.f_bavail * stat.f_frsize })
}

/// Returns true if `process_vm_readv` works on this process's own memory: containers may filter the call.
fn reads_own_memory() -> bool {
    let (from, mut to) = (0x7469_6e79_u32, 0u32);
    let local = libc::iovec { iov_base: (&raw mut to).cast(), iov_len: size_of::<u32>() };
    let remote = libc::iovec { iov_base: (&raw const from).cast_mut().cast(), iov_len: size_of::<u32>() };
    // SAFETY: one word of ours is read, and one of ours is written.
    let got = unsafe { libc::process_vm_readv(getpid().as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
    got == size_of::<u32>() as isize && from == to
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_container_with_limits() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for (path, contents) in [
            ("proc/self/cgroup", "0::/job\n"),
            ("proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n"),
            ("proc/meminfo", "MemTotal:  2048 kB\nMemAvailable: 1024 kB\nHugePages_Free:   3\n"),
            ("proc/sys/kernel/osrelease", "6.1.0\n"),
            ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
            ("sys/fs/cgroup/job/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/memory.max", "1048576\n"),
            ("sys/devices/system/cpu/online", "0-7\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n"),
            ("dev/shm/x", ""),
        ] {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), contents).unwrap();
        }
        let host = Host::read(&Roots { proc: at("proc"), sys: at("sys"), dev: at("dev") });
        assert_eq!((host.cores.online, host.cores.quota), (Some(8), Some(1.5)));
        assert_eq!((host.memory.total, host.memory.available), (Some(2 << 20), Some(1 << 20)));
        assert_eq!(host.memory.limit, Some(1 << 20), "of the root that it sees, where its group has none");
        assert_eq!(host.huge_pages.transparent.as_deref(), Some("madvise"));
        assert_eq!(host.huge_pages.transparent_shared.as_deref(), Some("never"));
        assert_eq!(host.huge_pages.pool_free, Some(3));
        assert_eq!(host.kernel, "6.1.0");
        assert!(host.shm.is_some());
        assert!(host.other_processes.may_trace_all && host.other_processes.ptrace_scope == Some(1));
    }

    #[test]
    fn a_machine_that_tells_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = folder.path().join("nowhere");
        let host = Host::read(&Roots { proc: nowhere.clone(), sys: nowhere.clone(), dev: nowhere });
        assert_eq!((host.cores.online, host.cores.quota, host.shm, host.memory.limit), (None, None, None, None));
        assert!(host.cores.usable > 0);
    }

    #[test]
    fn who_may_read_a_sibling() {
        let of = |scope, may_trace_all| OtherProcesses { ptrace_scope: scope, process_vm_readv: true, may_trace_all };
        assert!(of(None, false).may_read_siblings() && of(Some(0), false).may_read_siblings());
        assert!(!of(Some(1), false).may_read_siblings() && of(Some(1), true).may_read_siblings());
        assert!(!of(Some(3), true).may_read_siblings());
        assert!(!OtherProcesses { process_vm_readv: false, ..of(None, true) }.may_read_siblings(), "filtered");
    }

    proptest! {
        #[test]
        fn a_list_of_processors_is_counted(ranges in prop::collection::vec((0usize..500, 0usize..20), 1..8)) {
            let list: Vec<String> = ranges.iter().map(|(first, more)| match more {
                0 => first.to_string(),
                _ => format!("{first}-{}", first + more),
            }).collect();
            prop_assert_eq!(count(&list.join(",")), Some(ranges.iter().map(|(_, more)| more + 1).sum()));
        }

        #[test]
        fn a_quota_is_a_ratio(most in 1u32.., period in 1u32..) {
            prop_assert_eq!(quota(&format!("{most} {period}")), Some(f64::from(most) / f64::from(period)));
            prop_assert_eq!(quota(&format!("max {period}")), None);
        }

        /// Whatever the kernel of the future writes.
        #[test]
        fn no_text_is_a_panic(text in any::<String>()) {
            let _ = (count(&text), quota(&text), own_group(&text), kilobytes(&text, "MemTotal"), chosen(&text), has_ptrace(&text));
        }
    }
}
