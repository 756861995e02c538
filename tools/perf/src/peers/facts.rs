//! The machine and the programs, for the head of the page.

use std::fs;
use std::path::Path;
use std::process::Command;

use program_kit::machine::processor;

/// Names and values.
pub(crate) fn facts(programs: &Path) -> Vec<(String, String)> {
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut add = |name: &str, value: Option<String>| {
        facts.push((name.to_owned(), value.filter(|v| !v.is_empty()).unwrap_or_else(|| "unknown".to_owned())));
    };
    let read = |path: &str| Some(fs::read_to_string(path).ok()?.trim().to_owned());
    add("Date", output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]));
    add("Revision", output("git", &["describe", "--always", "--exclude=*", "--dirty= with changes"]));
    add("Command", Some(std::env::args().collect::<Vec<_>>().join(" ")));
    add("Processor", Some(processor()));
    add("Cores", std::thread::available_parallelism().ok().map(|n| n.to_string()));
    add("Caches of core 0", Some(caches(Path::new("/sys/devices/system/cpu/cpu0/cache"))));
    add("Memory", read("/proc/meminfo").and_then(|text| field(&text, "MemTotal")));
    add("Kernel", read("/proc/sys/kernel/osrelease"));
    add("Transparent huge pages", read("/sys/kernel/mm/transparent_hugepage/enabled"));
    add("Load at the start", read("/proc/loadavg"));
    add("Compiler", output("rustc", &["--version"]));
    // Written by scripts/compare-peers: a name and a version on each line.
    let versions = fs::read_to_string(programs.join("versions")).unwrap_or_default();
    for (name, version) in versions.lines().filter_map(|line| line.split_once(": ")) {
        add(name, Some(version.trim().to_owned()));
    }
    facts
}

/// Returns the standard output of a command, trimmed; `None` if it cannot be run or fails.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The first value of `name: value`.
fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// `L1 Data 32K, L2 Unified 512K, …`
fn caches(folder: &Path) -> String {
    let mut found: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let folder = entry.ok()?.path();
            let read = |name: &str| Some(fs::read_to_string(folder.join(name)).ok()?.trim().to_owned());
            Some(format!("L{} {} {}", read("level")?, read("type")?, read("size")?))
        })
        .collect();
    found.sort();
    found.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_nothing_is_left_empty() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("versions"), "MPICH: 4.0.2\nnonsense\n").unwrap();
        let facts = facts(folder.path());
        assert_eq!(facts.last(), Some(&("MPICH".to_owned(), "4.0.2".to_owned())));
        assert!(facts.iter().all(|(_, value)| !value.is_empty()));
    }

    #[test]
    fn caches_by_level() {
        let folder = tempfile::tempdir().unwrap();
        for (index, level, kind, size) in [("index3", "3", "Unified", "32768K"), ("index0", "1", "Data", "32K")] {
            let folder = folder.path().join(index);
            fs::create_dir(&folder).unwrap();
            for (name, value) in [("level", level), ("type", kind), ("size", size)] {
                fs::write(folder.join(name), format!("{value}\n")).unwrap();
            }
        }
        assert_eq!(caches(folder.path()), "L1 Data 32K, L3 Unified 32768K");
        assert_eq!(field("a: 1\nmodel name\t: CPU 9\n", "model name").as_deref(), Some("CPU 9"));
    }
}
