//! Memory that a program may still use: the kernel ends a process that takes more, without a message.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Memory that processes started from here may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Source of the limit: the machine, or a control group's file.
    pub by: String,
}

/// A program needs more memory than there is.
#[derive(Debug)]
pub struct Lack {
    /// Owner of the memory, as the subject of the sentence: "2 ranks".
    pub who: String,
    /// Bytes that it needs.
    pub needed: u64,
    /// Memory that there is.
    pub room: Room,
    /// Options that make it less.
    pub less: &'static str,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lack { who, needed, room: Room { bytes, by }, less } = self;
        let [needed, bytes] = [needed, bytes].map(|&n| n as f64 / f64::from(1 << 30));
        write!(f, "{who} would need {needed:.2} GiB of memory, {bytes:.2} GiB are there ({by}): {less} needs less")
    }
}

impl std::error::Error for Lack {}

/// Checks that `needed` bytes are there for `who`; where the system does not report its memory, they are. `less` names
/// the options that make it less.
///
/// # Errors
/// They are not.
pub fn suffices(who: impl fmt::Display, needed: u64, less: &'static str) -> Result<(), Lack> {
    match room(Path::new("/")) {
        Some(room) if needed > room.bytes => Err(Lack { who: who.to_string(), needed, room, less }),
        _ => Ok(()),
    }
}

/// The least that the machine and each of our control groups (both versions) leave.
fn room(root: &Path) -> Option<Room> {
    let machine = machine(&read(&root.join("proc/meminfo"))?);
    let groups = groups(root, &read(&root.join("proc/self/cgroup")).unwrap_or_default());
    machine.into_iter().chain(groups).min_by_key(|room| room.bytes)
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Memory that the kernel can give without ending a process: swap counts, though no one would measure there.
fn machine(meminfo: &str) -> Option<Room> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    let bytes = (field("MemAvailable")? + field("SwapFree").unwrap_or(0)) << 10;
    Some(Room { bytes, by: "MemAvailable and SwapFree of this machine".to_owned() })
}

/// The limits of our control groups and of those around them, as `/proc/self/cgroup` names them.
fn groups(root: &Path, list: &str) -> Vec<Room> {
    let mut rooms = Vec::new();
    for line in list.lines() {
        let Some((controllers, path)) = line.split_once(':').and_then(|(_, rest)| rest.split_once(':')) else {
            continue;
        };
        let (mount, limit, used) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max", "memory.current"),
            list if list.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let mount = root.join(mount);
        // In a container the path may be the host's; then the container's own group is at the mount.
        let path = Path::new(path.trim_start_matches('/'));
        let folders: Vec<PathBuf> = path.ancestors().map(|path| mount.join(path)).collect();
        rooms.extend(folders.iter().filter_map(|folder| group(folder, limit, used)));
    }
    rooms
}

fn group(folder: &Path, limit: &str, used: &str) -> Option<Room> {
    let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
    let most = number(limit)?;
    // Files that were read count as used, and are given up first.
    let files = read(&folder.join("memory.stat")).unwrap_or_default();
    let of = |name: &str| files.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let cache = of("total_inactive_file ").or_else(|| of("inactive_file ")).unwrap_or(0);
    let bytes = most.saturating_sub(number(used)?.saturating_sub(cache));
    Some(Room { bytes, by: folder.join(limit).display().to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file system with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn found(files: &[(&str, &str)]) -> Option<(u64, String)> {
        let root = system(files);
        let room = room(root.path())?;
        Some((room.bytes, room.by.replace(&root.path().display().to_string(), "")))
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 8192 kB\nMemAvailable:    4096 kB\nSwapFree:  1024 kB\n");

    #[test]
    fn the_least_of_all_limits_counts() {
        assert_eq!(found(&[MEMINFO]).unwrap(), (5 << 20, "MemAvailable and SwapFree of this machine".to_owned()));
        assert_eq!(found(&[]), None);
        // Version 2: the group itself has no limit, the one around it has.
        let two = [
            MEMINFO,
            ("proc/self/cgroup", "0::/jobs/ours\n"),
            ("sys/fs/cgroup/jobs/ours/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/memory.max", "3000000\n"),
            ("sys/fs/cgroup/jobs/memory.current", "1000000\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 400000\n"),
        ];
        assert_eq!(found(&two).unwrap(), (2_400_000, "/sys/fs/cgroup/jobs/memory.max".to_owned()));
        // Version 1, in a container, which does not have the path that the host knows.
        let one = [
            MEMINFO,
            ("proc/self/cgroup", "4:cpu,memory:/docker/abc\n1:name=systemd:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n"),
        ];
        assert_eq!(found(&one).unwrap(), (1_600_000, "/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned()));
        // Without a limit version 1 has a number above all memory.
        let none = [
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
        ];
        assert_eq!(found(&none).unwrap().0, 5 << 20);
    }

    #[test]
    fn this_machine_has_some_memory_and_not_all() {
        assert!(suffices("a test", 1, "nothing").is_ok());
        let lack = suffices("2 ranks", u64::MAX, "a smaller -e").unwrap_err().to_string();
        assert!(lack.starts_with("2 ranks would need ") && lack.ends_with(": a smaller -e needs less"), "{lack}");
    }
}
