//! The report for people.

use std::fmt::Write;

use course_kit::python::Interpreter;

use super::Facts;
use super::host::Host;
use super::milestones::{MPI, Milestone, OPTIONS, Verdict};
use super::nccl::Place;
use super::rdma::Port;

/// The whole report. Without `verbose`, reasons are cut to their first part, and searches to their result.
pub(crate) fn text(facts: &Facts, milestones: &[Milestone], verbose: bool) -> String {
    let mut out = String::new();
    host(&mut out, &facts.host);
    heading(&mut out, "Network interfaces");
    for i in &facts.interfaces {
        let kind = if i.loopback { ", loopback" } else { "" };
        let mtu = i.mtu.map_or(String::new(), |mtu| format!(", MTU {mtu}"));
        let speed = i.speed.map_or(String::new(), |speed| format!(", {speed} Mbit/s"));
        let addresses = if i.addresses.is_empty() { "no address".to_owned() } else { i.addresses.join(", ") };
        line(&mut out, &i.name, &format!("{}{kind}{mtu}{speed}: {addresses}", i.state));
    }
    rdma(&mut out, facts);
    heading(&mut out, "GPUs");
    line(&mut out, "driver", &either(&facts.cuda.driver, verbose));
    for (number, gpu) in facts.cuda.gpus.iter().enumerate() {
        let peers: Vec<String> = gpu.peers.iter().map(usize::to_string).collect();
        let peers =
            if peers.is_empty() { "no other GPU's memory".to_owned() } else { format!("GPU {}", peers.join(", ")) };
        let (major, minor) = gpu.capability;
        let what = format!("{}, capability {major}.{minor}, {}; reaches {peers}", gpu.name, bytes(gpu.memory as u64));
        line(&mut out, &format!("GPU {number}"), &what);
    }
    line(&mut out, "NVRTC", &either(&facts.cuda.nvrtc, verbose));
    nccl(&mut out, facts, verbose);
    software(&mut out, facts, verbose);
    table(&mut out, milestones);
    summary(&mut out, facts, milestones);
    if !verbose {
        let _ = writeln!(out, "`doctor --verbose` has the places that were looked at, and the reasons in full.");
    }
    out
}

fn heading(out: &mut String, text: &str) {
    let _ = writeln!(out, "\n{text}");
}

fn line(out: &mut String, name: &str, what: &str) {
    let _ = writeln!(out, "  {name:<16} {what}");
}

fn either(found: &Result<String, String>, verbose: bool) -> String {
    match found {
        Ok(text) => text.clone(),
        Err(why) => format!("no: {}", reason(why, verbose)),
    }
}

/// Shortens a reason to the missing part; `verbose` keeps what was tried and where it comes from.
fn reason(why: &str, verbose: bool) -> &str {
    let end = [": ", "; ", " (", ", tried"].iter().filter_map(|mark| why.find(mark)).min();
    why.get(..end.filter(|_| !verbose).unwrap_or(why.len())).unwrap_or(why)
}

fn host(out: &mut String, host: &Host) {
    let _ = writeln!(out, "Host");
    line(out, "kernel", &host.kernel);
    let online = host.cores.online.map_or(String::new(), |n| format!(" of {n} online"));
    let quota = host.cores.quota.map_or(String::new(), |q| format!(", a quota of {q:.1}"));
    line(out, "cores", &format!("{} for us{online}{quota}; more ranks than that share them", host.cores.usable));
    let memory = &host.memory;
    let some = |value: Option<u64>| value.map_or("?".to_owned(), bytes);
    let limit =
        memory.limit.map_or(String::new(), |limit| format!(", limited to {} by the control group", bytes(limit)));
    line(out, "memory", &format!("{} available of {}{limit}", some(memory.available), some(memory.total)));
    let locked = memory.memlock.map_or("without limit".to_owned(), |limit| format!("up to {}", bytes(limit)));
    line(out, "locked memory", &format!("{locked}; RDMA registers 3 MiB per peer and channel (ulimit -l)"));
    let shm = host.shm.map_or("not there".to_owned(), |shm| {
        format!(
            "{} free of {}; NCCL, MPI and PyTorch need it, tinynccl does not (memfd)",
            bytes(shm.free),
            bytes(shm.size)
        )
    });
    line(out, "/dev/shm", &shm);
    let pages = &host.huge_pages;
    let or = |word: &Option<String>| word.clone().unwrap_or_else(|| "?".to_owned());
    let what = format!(
        "transparent: {}, for shared memory: {}; {} free in the pool",
        or(&pages.transparent),
        or(&pages.transparent_shared),
        pages.pool_free.map_or("?".to_owned(), |n| n.to_string())
    );
    line(out, "huge pages", &what);
    let others = &host.other_processes;
    let scope = others.ptrace_scope.map_or("no Yama".to_owned(), |scope| format!("ptrace_scope {scope}"));
    let may = match (others.may_read_siblings(), others.process_vm_readv) {
        (true, _) => "a rank may read another's memory: long messages are copied once",
        (false, true) => "a rank may not read another's memory: long messages are copied twice",
        (false, false) => "process_vm_readv is not allowed: long messages are copied twice",
    };
    line(out, "process memory", &format!("{may} ({scope})"));
}

fn rdma(out: &mut String, facts: &Facts) {
    heading(out, "RDMA devices");
    if facts.rdma.devices.is_empty() {
        line(
            out,
            "none",
            "the card in user space stands for one; scripts/rxe-vm.sh has the kernel's, in a virtual machine",
        );
    }
    for device in &facts.rdma.devices {
        for Port { number, state, link_layer, rate, gids } in &device.ports {
            line(out, &device.name, &format!("port {number}: {state}, {link_layer}, {rate}"));
            for gid in gids {
                let ip = gid.gid.to_ipv4_mapped().map_or_else(|| gid.gid.to_string(), |ip| ip.to_string());
                let on = gid.interface.as_ref().map_or(String::new(), |name| format!(" on {name}"));
                let skipped = if gid.is_usable(link_layer) { "" } else { "; not taken unless asked for" };
                line(out, "", &format!("GID {}: {ip}, {}{on}{skipped}", gid.index, gid.kind));
            }
        }
    }
    if !facts.rdma.devices.is_empty() && !facts.rdma.uverbs {
        line(
            out,
            "",
            "no /dev/infiniband/uverbs*: programs cannot open them (in a container: --device=/dev/infiniband)",
        );
    }
}

fn nccl(out: &mut String, facts: &Facts, verbose: bool) {
    heading(out, "NCCL libraries: ours, then others in the order of the search");
    for place in &facts.nccl_libraries {
        match &place.opened {
            Ok(opened) => {
                line(out, &opened.version(), &opened.file.display().to_string());
                line(out, "", &opened.judgement());
            }
            Err(why) if verbose => line(out, "no", &format!("{}: {why}", place.asked.display())),
            Err(_) => {}
        }
    }
    let run = format!("`{} run -- COMMAND` starts a program over it", crate::run::this_program());
    match facts.nccl_libraries.iter().find(|place| place.ours) {
        Some(Place { opened: Ok(_), .. }) => line(out, "ours", &format!("the first: {run}")),
        Some(Place { asked, opened: Err(why), .. }) => {
            line(out, "ours", &format!("{} cannot be loaded: {why}", asked.display()));
        }
        None => line(out, "ours", &format!("not built: `{}`; then {run}", crate::run::BUILD)),
    }
    if facts.nccl_libraries.iter().all(|place| place.ours || place.opened.is_err()) {
        line(out, "NVIDIA's", "none found: pip install nvidia-nccl-cu13");
    }
}

fn software(out: &mut String, facts: &Facts, verbose: bool) {
    let found = &facts.software;
    heading(out, "Software");
    let python = |python: &Result<Interpreter, String>| match python {
        Ok(python) => {
            let part = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".to_owned());
            let (torch, numpy) = (part(&python.torch), part(&python.numpy));
            format!("{} ({}), torch {torch}, numpy {numpy}", python.version, python.program.display())
        }
        Err(why) => format!("no: {}", reason(why, verbose)),
    };
    line(out, "Python", &python(&found.python));
    if found.torch != found.python {
        line(out, "with torch", &python(&found.torch));
    }
    let mpi = match &found.mpirun {
        Some(program) => format!("{} ({})", program.version, program.path.display()),
        None => "no mpirun on the PATH".to_owned(),
    };
    let mpicc = if found.mpicc.is_some() { "" } else { "; no mpicc, so the feature mpi cannot be built" };
    line(out, "MPI", &format!("{mpi}{mpicc}"));
    let qemu = found.qemu.as_ref().map_or("no qemu-system-x86_64 on the PATH".to_owned(), |p| p.display().to_string());
    line(out, "QEMU", &qemu);
    let lacks = found.verbs_lacks.join(", ");
    line(out, "feature verbs", if lacks.is_empty() { "what it is built with is here" } else { &lacks });
}

fn table(out: &mut String, milestones: &[Milestone]) {
    heading(out, "Milestones");
    for m in milestones {
        let verdict = match m.verdict {
            Verdict::Runs => "runs",
            Verdict::Fallback => "fallback",
            Verdict::Cannot => "cannot",
        };
        let _ = writeln!(out, "  {:02} {:<17} {verdict:<9} {}", m.number, m.name, m.how);
        if let Some(mend) = m.mend {
            let _ = writeln!(out, "  {:<31}-> {mend}", "");
        }
    }
}

/// Writes the number of milestones that run, what each option of scripts/setup.sh would add, and where to begin.
fn summary(out: &mut String, facts: &Facts, milestones: &[Milestone]) {
    let of = |verdict| milestones.iter().filter(|m| m.verdict == verdict).count();
    let (runs, fallback, cannot) = (of(Verdict::Runs), of(Verdict::Fallback), of(Verdict::Cannot));
    let _ = writeln!(out, "\n{runs} milestones run here, {fallback} with a fallback, {cannot} not.");
    let mut missing = Vec::new();
    for option in OPTIONS {
        let numbers: Vec<String> =
            milestones.iter().filter(|m| m.mend == Some(option)).map(|m| format!("{:02}", m.number)).collect();
        if !numbers.is_empty() {
            let what = if option == MPI { "mpirun for" } else { "what is missing for" };
            missing.push(format!("{option}, as root: {what} {}", numbers.join(", ")));
        }
    }
    if facts.software.mdbook.is_none() {
        missing.push("scripts/setup.sh --book: mdbook, for `scripts/book.sh serve`".to_owned());
    }
    for line in missing {
        let _ = writeln!(out, "  {line}");
    }
    let _ = writeln!(
        out,
        "Next: `cargo xtask next`, the milestone to go on with; `cargo run -p labs -- list`, failures to hunt."
    );
}

/// Bytes for people.
fn bytes(n: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.into_iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", n as f64 / unit as f64),
        None => format!("{n} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!([0, 1023, 64 << 20, 3 << 29].map(bytes), ["0 B", "1023 B", "64.0 MiB", "1.5 GiB"]);
    }
}
