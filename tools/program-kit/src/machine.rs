//! The machine that a program measures.

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processor as the kernel names it, with family and model: virtual machines give many processors one name.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    named(&text).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn named(cpuinfo: &str) -> Option<String> {
    let field = |name: &str| {
        let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields
            .map(|(found, value)| (found.trim(), value.trim()))
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    };
    let numbers = field("cpu family").zip(field("model"));
    let numbers = numbers.map(|(family, model)| format!(", family {family} model {model}")).unwrap_or_default();
    Some(format!("{}{numbers}", field("model name")?))
}

/// The cores that the calling thread may use.
///
/// # Errors
/// The kernel does not say.
pub fn cores() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("asking for the cores")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

/// Pins the calling thread to a core. Threads that it starts afterwards inherit the core; threads started before keep
/// theirs.
///
/// # Errors
/// The kernel refuses.
pub fn pin(core: usize) -> Result<()> {
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).with_context(|| format!("pinning to core {core}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_has_a_name_and_numbers() {
        let text = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n";
        assert_eq!(named(text).unwrap(), "AMD EPYC, family 25 model 17");
        assert_eq!(named("model name : A\n").unwrap(), "A");
        assert_eq!(named(""), None);
        assert!(!processor().is_empty());
    }

    #[test]
    fn a_pinned_thread_may_use_one_core() {
        let core = *cores().unwrap().last().unwrap();
        let pinned = std::thread::spawn(move || pin(core).and_then(|()| cores()));
        assert_eq!(pinned.join().unwrap().unwrap(), [core]);
        assert!(std::thread::spawn(|| pin(CpuSet::MAX_CPU - 1)).join().unwrap().is_err(), "no machine has so many");
    }
}
