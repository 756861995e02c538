//! Description of a machine that a measured model depends on: the processor, its caches, the kernel.

use std::fs;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::{Deserialize, Serialize};

use super::Caches;

/// A machine as far as speeds are concerned. It survives a reboot, and differs between machines that share a home
/// directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Model name of the processor.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Cache sizes.
    pub caches: Caches,
    /// Kernel release and architecture: its scheduler and its TCP are part of what is measured.
    pub kernel: String,
    /// Identity of the installed system (`/etc/machine-id`), empty where there is none.
    pub machine: String,
}

impl Host {
    /// The machine we run on; read once per process, but for the cores.
    pub fn here() -> Host {
        static HERE: OnceLock<Host> = OnceLock::new();
        Host { cores: Cores::here().most, ..HERE.get_or_init(Host::read).clone() }
    }

    fn read() -> Host {
        let uname = rustix::system::uname();
        let kernel = format!("{} {}", uname.release().to_string_lossy(), uname.machine().to_string_lossy());
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Host {
            processor: processor(&text("/proc/cpuinfo")).to_owned(),
            cores: Cores::here().most,
            caches: caches(|index, what| text(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{what}"))),
            kernel,
            machine: text("/etc/machine-id").trim().to_owned(),
        }
    }
}

/// The cores that a process may use. Travels between ranks: those of a host may be bound to different cores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cores {
    /// Their numbers, as bits of 64-bit words.
    mask: Vec<u64>,
    /// Number of them that run at once: fewer than there are, where a container limits the time.
    pub most: usize,
}

impl Cores {
    /// Ours.
    pub fn here() -> Cores {
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        let mut mask = Vec::new();
        if let Ok(set) = sched_getaffinity(None) {
            for core in (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)) {
                mask.resize(mask.len().max(core / 64 + 1), 0);
                mask[core / 64] |= 1u64 << (core % 64);
            }
        }
        Cores { mask, most }
    }

    /// Their numbers.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = usize> {
        let bits = |(word, bits): (usize, &u64)| {
            let bits = *bits;
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| 64 * word + bit)
        };
        self.mask.iter().enumerate().flat_map(bits)
    }

    /// Returns the number of cores that processes with these cores have together.
    pub fn together<'a>(all: impl Iterator<Item = &'a Cores>) -> usize {
        let (mut mask, mut limit) = (Vec::new(), usize::MAX);
        for cores in all {
            mask.resize(mask.len().max(cores.mask.len()), 0u64);
            mask.iter_mut().zip(&cores.mask).for_each(|(all, own)| *all |= own);
            // A limit on time holds for the container, and so for all of its processes.
            if cores.most < count(&cores.mask) || cores.mask.is_empty() {
                limit = limit.min(cores.most);
            }
        }
        match count(&mask) {
            0 if limit == usize::MAX => 1,
            0 => limit,
            n => n.min(limit),
        }
    }
}

fn count(mask: &[u64]) -> usize {
    mask.iter().map(|word| word.count_ones() as usize).sum()
}

/// The first `model name` of /proc/cpuinfo; some architectures have none.
fn processor(cpuinfo: &str) -> &str {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, name)| name.trim())
}

/// Cache sizes from sysfs: `read(index, file)` gives a file's text, empty when there is none.
fn caches(read: impl Fn(usize, &str) -> String) -> Caches {
    let mut found = [0usize; 4];
    for index in 0..8 {
        let (level, kind, size) = (read(index, "level"), read(index, "type"), read(index, "size"));
        if kind.trim() == "Instruction" {
            continue;
        }
        if let (Ok(level @ 1..=3), Some(bytes)) = (level.trim().parse::<usize>(), bytes(size.trim())) {
            found[level] = found[level].max(bytes);
        }
    }
    let [_, l1, l2, l3] = found;
    let l2 = [l2, l1].into_iter().find(|&bytes| bytes > 0).unwrap_or(Caches::TYPICAL.l2);
    // Without a shared cache, memory comes right after the core's own.
    let l3 = if l3 > 0 || found[2] > 0 { l3.max(l2) } else { Caches::TYPICAL.l3.max(l2) };
    Caches { l2, l3 }
}

/// `512K`, `32768K`, `8M`.
fn bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: usize = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit).filter(|&n| n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_cores_and_caches() {
        let here = Host::here();
        assert!(here.cores > 0 && here.caches.l2 > 0 && here.caches.l3 >= here.caches.l2, "{here:?}");
        assert_eq!(here, Host::here());
    }

    #[test]
    fn ranks_bound_to_different_cores_have_all_of_them() {
        let cores = |mask: &[u64], most: usize| Cores { mask: mask.to_vec(), most };
        let together = |all: &[Cores]| Cores::together(all.iter());
        assert_eq!(together(&[cores(&[1], 1), cores(&[2], 1)]), 2);
        assert_eq!(together(&[cores(&[1], 1), cores(&[1], 1)]), 1);
        assert_eq!(together(&[cores(&[0xf], 4), cores(&[0xf0, 1], 5)]), 9);
        assert_eq!(together(&[cores(&[0xff], 2), cores(&[0xff], 2)]), 2, "a container with two cores' time");
        assert_eq!((together(&[cores(&[], 3)]), together(&[])), (3, 1));
        assert_eq!(cores(&[0b101, 1 << 63], 2).numbers().collect::<Vec<_>>(), [0, 2, 127]);
        let here = Cores::here();
        assert!(together(std::slice::from_ref(&here)) >= 1 && here.most >= 1);
    }

    #[test]
    fn caches_as_sysfs_tells_them() {
        let table =
            [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "512K"), ("3", "Unified", "32768K")];
        let machine = |rows: &'static [(&str, &str, &str)]| {
            caches(move |index, what| {
                let Some(row) = rows.get(index) else { return String::new() };
                format!(
                    "{}\n",
                    [row.0, row.1, row.2][["level", "type", "size"].iter().position(|w| *w == what).unwrap()]
                )
            })
        };
        let rows: &'static _ = Box::leak(Box::new(table));
        assert_eq!(machine(rows), Caches { l2: 512 << 10, l3: 32 << 20 });
        assert_eq!(machine(&rows[..3]), Caches { l2: 512 << 10, l3: 512 << 10 }, "no shared cache");
        assert_eq!(machine(&[]), Caches::TYPICAL);
        assert_eq!(machine(&[("2", "Unified", "lots")]), Caches::TYPICAL);
    }

    #[test]
    fn processors_by_name() {
        assert_eq!(processor("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: x\n"), "AMD EPYC");
        assert_eq!(processor("CPU implementer : 0x41\n"), "unknown");
    }
}
