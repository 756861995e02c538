//! The library, milestone by milestone: the files that each one introduces, and the learner's own version of them.

use std::path::Path;

use anyhow::{Context as _, Result};

use crate::course::{STEPS, Step};

/// A part of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The milestone that introduces it.
    pub step: u8,
    /// A file or folder of the checkout.
    pub path: &'static str,
    /// Purpose of it.
    pub what: &'static str,
    /// Functions of the milestone that are the learner's version of its idea; empty if there are none.
    pub own: &'static str,
}

const fn part(step: u8, path: &'static str, what: &'static str, own: &'static str) -> Part {
    Part { step, path, what, own }
}

/// All parts, in the order of the course.
pub const PARTS: &[Part] = &[
    part(
        1,
        "lib/transport/src/tcp",
        "messages over TCP: frames, short reads and writes, credit",
        "read_full, write_full, decode",
    ),
    part(1, "lib/sys/src/backoff.rs", "waits that spin, yield and sleep", ""),
    part(
        2,
        "lib/transport/src/verbs/sys",
        "libibverbs' objects: queue pairs, memory regions, completions",
        "to_rtr, await_completion",
    ),
    part(2, "lib/transport/src/verbs/options.rs", "which devices, ports and GIDs the links take", "rank"),
    part(2, "lib/transport/src/verbs/link/exchange.rs", "what two queue pairs must know of each other", "parse"),
    part(2, "lib/softroce-verbs/src", "libibverbs' names over the card in user space", ""),
    part(2, "lib/softroce/src", "the card in user space: RoCEv2 over UDP", ""),
    part(
        3,
        "lib/cuda/src/driver",
        "CUDA's driver, loaded at run time; kernels compiled at run time",
        "difference, target",
    ),
    part(
        4,
        "lib/transport/src/memory",
        "memory that several transports name: registered, of a GPU, of the host",
        "send, receive",
    ),
    part(
        5,
        "lib/transport/src/verbs/link",
        "one-sided writes into the peer's ring, with immediate data",
        "write_with_imm, request, aim",
    ),
    part(6, "lib/transport/src/fabric.rs", "the contract of a transport and its links", "push, take_in, deliver"),
    part(6, "lib/transport/src/bootstrap", "the rendezvous: ranks find each other by a store", ""),
    part(6, "lib/transport/src/accept", "one listener for all connections of a process", ""),
    part(6, "lib/transport/src/endpoint", "the transports of a process, and the choice between them", ""),
    part(6, "lib/transport/src/shm", "messages through shared memory", ""),
    part(6, "lib/transport/src/inproc", "messages between threads", ""),
    part(6, "lib/transport/src/wait.rs", "sleep on all links at once", ""),
    part(6, "lib/sys/src", "settings, secrets, signals, forks: this process alone", ""),
    part(6, "lib/src/launch", "starts the ranks of a program on this host", ""),
    part(6, "lib/comm/src/start", "from a rendezvous to a communicator; split", ""),
    part(6, "lib/comm/src/state", "the state of a communicator, its deadline, its first failure", ""),
    part(
        7,
        "lib/plan/src/algorithm",
        "schedules as pure functions: ring, tree, direct and others",
        "reduce_scatter, all_gather, steps",
    ),
    part(7, "lib/plan/src/schedule", "steps, and the verifier that proves them", "steps"),
    part(
        7,
        "lib/plan/src/simulate",
        "the same schedules on machines that need not exist; bounds and packed trees",
        "order, trees",
    ),
    part(7, "lib/comm/src/executor", "runs a schedule over links", "all_reduce"),
    part(7, "lib/comm/src/reduce", "sums of all types, with SIMD", ""),
    part(7, "lib/comm/src/calls", "the collectives as methods", ""),
    part(7, "lib/plan/src/wire.rs", "the header of each message, by which ranks that disagree are found", ""),
    part(7, "lib/plan/src/dtype.rs", "element types and operators", ""),
    part(7, "lib/plan/src/float8.rs", "8-bit floats", ""),
    part(7, "lib/plan/src/call.rs", "a call as a value", ""),
    part(7, "lib/plan/src/error.rs", "the error type: operation, ranks, expected, got, next step", ""),
    part(7, "lib/transport/src/wrap", "links that are slow or break, for tests", ""),
    part(
        8,
        "lib/transport/src/verbs",
        "RDMA as a transport: credit, stripes over queue pairs",
        "reserve, credit, free, receives",
    ),
    part(9, "lib/cuda/src/peer", "kernels that write into the other GPUs' memory", "one_shot"),
    part(9, "lib/cuda/src/kernels", "the kernels, in CUDA C++", "one_shot"),
    part(9, "lib/cuda/src", "device communicators: start, calls, paths, hosts", ""),
    part(9, "lib/plan/src/device.rs", "memory of a device as an argument", ""),
    part(10, "lib/plan/src/topology", "the cost model, and the choice of the algorithm", "time, choose"),
    part(10, "lib/comm/src/engine", "routes, plans that are kept, the run of a call", ""),
    part(10, "lib/comm/src/topology", "measured machines and networks", ""),
    part(10, "lib/comm/src/symmetric", "memory that all ranks map: one-shot and two-shot", ""),
    part(10, "lib/comm/src/trace", "timelines of a run", ""),
    part(10, "lib/comm/src/verify", "wrong bits are found on their way", ""),
    part(10, "lib/transport/src/explore.rs", "which way reaches a peer", ""),
    part(10, "lib/transport/src/beacon.rs", "a sign of life of each process", ""),
    part(11, "bindings/python/src", "the library as a module of Python", "start, arrays, tensors"),
    part(12, "bindings/python/python/tinynccl/torch", "a backend of torch.distributed", "wrap, identical"),
    part(12, "lib/src/process_group", "one interface over this library, NCCL and MPI", ""),
    part(13, "lib/src/ddp", "gradients in buckets, averaged beside backward", "step, backward"),
    part(14, "lib/cuda/src/calls", "calls in a stream, in groups and in graphs", "backward"),
    part(16, "lib/comm/src/membership", "groups that lose and gain ranks: agreement, growth", "step"),
    part(16, "lib/comm/src/survive.rs", "revoke, agree, shrink", ""),
    part(16, "lib/comm/src/join.rs", "newcomers with a ticket", ""),
    part(16, "lib/src/shared_state", "equal state on all ranks after a change of members", ""),
    part(16, "lib/comm/src/status", "a running job seen from outside", ""),
    part(16, "lib/transport/src/rails", "several network cards, one of which may fail", ""),
    part(16, "lib/transport/src/seal", "encryption", ""),
    part(16, "lib/transport/src/relay", "ranks without a common network", ""),
];

/// The parts that a milestone introduces; all of them without one.
pub fn of(step: Option<&Step>) -> Vec<Part> {
    let mut parts: Vec<Part> = PARTS.iter().copied().filter(|p| step.is_none_or(|s| s.number == p.step)).collect();
    parts.sort_by_key(|p| p.step);
    parts
}

/// The words for a milestone without a part of its own.
const NOTHING: &str = "nothing new: it uses what the milestones before it have introduced";

/// The section [`SECTION`] of a milestone's README.
pub fn section(step: &Step) -> String {
    let command = format!("`cargo xtask library {:02}`", step.number);
    let parts = of(Some(step));
    if parts.is_empty() {
        return format!("\nThis milestone adds {NOTHING}.\n\n");
    }
    let mut out = format!(
        "\nThe parts of the library that this milestone introduces, and your functions that do the same in small\n\
         ({command} prints them with lines of code):\n\n| Part | Purpose | Yours |\n|---|---|---|\n"
    );
    for p in parts {
        let own: Vec<String> =
            p.own.split(", ").filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
        out += &format!("| [`{0}`](../../{0}) | {1} | {2} |\n", p.path, p.what, own.join(", "));
    }
    out + "\n"
}

/// Heading of the section that [`section`] gives.
pub const SECTION: &str = "In the library";

/// A list to read, with the lines of code of each part.
///
/// # Errors
/// A file cannot be read.
pub fn shown(root: &Path, step: Option<&Step>) -> Result<String> {
    let mut out = String::new();
    let mut last = 0;
    if let Some(step) = step.filter(|step| of(Some(step)).is_empty()) {
        return Ok(format!("{}\n  {NOTHING}\n", step.folder()));
    }
    for p in of(step) {
        if p.step != last {
            let name = STEPS.iter().find(|s| s.number == p.step).map_or_else(String::new, Step::folder);
            out += &format!("{name}\n");
            last = p.step;
        }
        out += &format!("  {:<42} {:>6}  {}\n", p.path, lines(&root.join(p.path))?, p.what);
        if !p.own.is_empty() {
            out += &format!("  {:<42} {:>6}  yours: {}\n", "", "", p.own);
        }
    }
    Ok(out)
}

/// Lines of the source files below a path, of more precise parts too.
fn lines(path: &Path) -> Result<usize> {
    let place = || format!("reading {}", path.display());
    if path.is_dir() {
        let mut all = 0;
        for entry in std::fs::read_dir(path).with_context(place)? {
            let entry = entry.with_context(place)?;
            if entry.file_name() != "__pycache__" {
                all += lines(&entry.path())?;
            }
        }
        return Ok(all);
    }
    let code = path.extension().is_some_and(|e| ["rs", "cu", "cuh", "py"].iter().any(|known| e == *known));
    if !code {
        return Ok(0);
    }
    Ok(std::fs::read_to_string(path).with_context(place)?.lines().count())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::course::checkout;

    #[test]
    fn every_part_of_the_library_has_its_milestone() {
        let covered = |path: &Path| PARTS.iter().any(|p| path.starts_with(p.path));
        for folder in ["lib/src", "lib/cuda/src", "lib/comm/src", "lib/transport/src", "lib/sys/src", "lib/plan/src"] {
            for entry in std::fs::read_dir(checkout().join(folder)).unwrap() {
                let path = PathBuf::from(folder).join(entry.unwrap().file_name());
                let glue = ["lib.rs", "declared.rs", "fuzzing.rs", "info.rs", "linger.rs", "forward.rs"];
                let is_glue = glue.iter().any(|name| path.ends_with(name));
                assert!(is_glue || covered(&path), "{}: which milestone introduces it? See PARTS", path.display());
            }
        }
        for p in PARTS.iter().copied() {
            assert!(checkout().join(p.path).exists(), "{} is not there", p.path);
        }
    }

    /// `UPDATE_DOCS=1 cargo test -p xtask readmes_list` writes the sections anew.
    #[test]
    fn readmes_list_the_parts() {
        for step in &STEPS {
            let path = step.solution(&checkout()).join("README.md");
            let text = std::fs::read_to_string(&path).unwrap();
            let wanted = section(step);
            let found = crate::readme::section(&text, SECTION);
            if std::env::var_os("UPDATE_DOCS").is_some() && found != Some(&wanted) {
                let own = "## Do it yourself\n";
                let old = found.map_or(String::new(), |body| format!("## {SECTION}\n{body}"));
                let new = text.replacen(&format!("{old}{own}"), &format!("## {SECTION}\n{wanted}{own}"), 1);
                std::fs::write(&path, new).unwrap();
            } else {
                let stale = "is stale: UPDATE_DOCS=1 cargo test -p xtask readmes_list";
                assert_eq!(found, Some(wanted.as_str()), "{}: {SECTION} {stale}", path.display());
            }
        }
    }

    #[test]
    fn a_milestone_without_parts_says_so() {
        let step = STEPS.iter().find(|s| of(Some(s)).is_empty()).unwrap();
        assert_eq!(shown(&checkout(), Some(step)).unwrap(), format!("{}\n  {NOTHING}\n", step.folder()));
        assert!(section(step).contains(NOTHING));
    }

    #[test]
    fn the_learners_own_functions_are_in_the_milestone() {
        let mut found = 0;
        for p in PARTS.iter().copied() {
            let step = STEPS.iter().find(|s| s.number == p.step).unwrap();
            let exercises = crate::exercise::of(step, &step.solution(&checkout())).unwrap();
            for name in p.own.split(", ").filter(|name| !name.is_empty()) {
                assert!(exercises.iter().any(|e| e.function == name), "{}: no exercise `{name}`", step.folder());
                found += 1;
            }
        }
        assert!(found >= 20, "{found}");
        let out = shown(&checkout(), Step::find("7").ok().as_ref()).unwrap();
        assert!(
            out.starts_with("07-allreduce-tcp\n  lib/plan/src/algorithm ") && out.contains("yours: steps"),
            "{out}"
        );
    }
}
