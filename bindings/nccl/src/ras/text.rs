//! A look as text: the sections and the columns of NCCL's, and below them the sentences of ours.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use tinynccl::status::text;
use tinynccl::status::view::{Comm, Rank, State};

use super::look::{Look, driver_version, error, nccl_version, reports};

/// The page of `STATUS`; `verbose`: with every rank, its last calls, and the events.
pub(super) fn page(look: &Look, verbose: bool) -> String {
    let mut page = String::new();
    let release = env!("CARGO_PKG_VERSION");
    let _ = writeln!(page, "NCCL version {} (tinynccl {release})", nccl_version());
    let _ = writeln!(page, "CUDA driver version {}\n", driver_version());
    heading(&mut page, "Job summary");
    let ranks = || look.view.comms.iter().flat_map(|comm| &comm.ranks);
    let nodes: BTreeSet<&str> = ranks().map(|rank| rank.place.host.as_str()).collect();
    let processes: BTreeSet<(&str, u32)> = ranks().map(|rank| (rank.place.host.as_str(), rank.place.pid)).collect();
    let gpus: BTreeSet<(&str, usize)> =
        ranks().filter_map(|rank| Some((rank.place.host.as_str(), rank.device.as_ref()?.device))).collect();
    let _ = writeln!(page, "  Nodes  Processes         GPUs\n(total)    (total)      (total)");
    let _ = writeln!(page, "{:>7}  {:>9}  {:>11}\n", nodes.len(), processes.len(), gpus.len());
    heading(&mut page, &format!("Communicators... ({:.3}s)", look.took.as_secs_f64()));
    if look.view.comms.is_empty() {
        page.push_str("No communicator data collected!\n");
    } else {
        page.push_str("Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n");
        page.push_str("    #  in group  per comm  per node  per comm  in group\n");
        for (number, comm) in look.view.comms.iter().enumerate() {
            row(&mut page, number, comm);
        }
    }
    page.push('\n');
    heading(&mut page, "Errors");
    for finding in &look.findings {
        let _ = writeln!(page, "{}\n", finding.text);
    }
    heading(&mut page, "Warnings");
    for silent in &look.view.silent {
        let _ = writeln!(page, "process {} gave no report: {}", silent.pid, silent.why);
    }
    if verbose {
        page.push_str(&text::tables(&look.view, &look.findings, true));
    }
    page
}

fn heading(page: &mut String, title: &str) {
    let line = "=".repeat(title.split("...").next().unwrap_or(title).len());
    let _ = writeln!(page, "{title}\n{line}\n");
}

fn row(page: &mut String, number: usize, comm: &Comm) {
    let nodes: BTreeSet<&str> = comm.ranks.iter().map(|rank| rank.place.host.as_str()).collect();
    let of = |node: &str| comm.ranks.iter().filter(|rank| rank.place.host == node).count();
    let (least, most) = nodes.iter().fold((usize::MAX, 0), |(a, b), node| (a.min(of(node)), b.max(of(node))));
    let each = if least == most { most.to_string() } else { format!("{least}-{most}") };
    let size = comm.ranks.len();
    let here: Vec<&Rank> = comm.ranks.iter().filter(|rank| reports(rank)).collect();
    let status = if here.iter().all(|rank| rank.state == State::Closed) { "FINALIZE" } else { "RUNNING" };
    let _ = writeln!(
        page,
        "{number:>5}  {:>8}  {:>8}  {each:>8}  {size:>8}  {:>8}  {status:>8}  {:>6}",
        1,
        nodes.len(),
        here.len(),
        error(comm)
    );
}
