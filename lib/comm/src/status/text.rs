//! The view as text.

use std::fmt::Write as _;

use super::Finding;
use super::view::{Comm, Rank, Source, State, View, seconds};

/// Most ranks of a communicator that are all shown. Of more there are two of each kind: a list of 1024 is not read.
const ROWS: usize = 16;

/// Returns the whole page: what is odd, then the tables. `verbose`: all ranks, their last calls, and the events.
pub fn page(view: &View, found: &[Finding], verbose: bool) -> String {
    let mut page = String::new();
    if found.is_empty() {
        page.push_str("nothing odd\n");
    }
    for finding in found {
        let _ = writeln!(page, "{}", finding.text);
    }
    page + &tables(view, found, verbose)
}

/// Begins the row of a rank that the others wait for.
pub const MARK: &str = "> ";

/// Returns the tables of [`page`] alone. The rows of missing ranks begin with [`MARK`].
pub fn tables(view: &View, found: &[Finding], verbose: bool) -> String {
    let mut page = String::new();
    for comm in &view.comms {
        let of = |finding: &&Finding| finding.job.as_ref() == Some(&comm.job) && finding.comm == Some(comm.comm);
        let missing: Vec<usize> = found.iter().filter(of).flat_map(|finding| finding.missing.clone()).collect();
        table(&mut page, comm, &missing, verbose);
    }
    for silent in &view.silent {
        let _ = writeln!(page, "\nprocess {} gave no report: {}", silent.pid, silent.why);
    }
    if verbose {
        for process in &view.processes {
            let _ = writeln!(page, "\nprocess {} on {} ({}), events:", process.pid, process.host, process.program);
            for event in &process.events {
                let _ = writeln!(page, "  {} {}", clock(event.at_ms), event.text);
            }
        }
    }
    page
}

fn table(page: &mut String, comm: &Comm, missing: &[usize], verbose: bool) {
    let size = comm.ranks.len();
    let _ = writeln!(page, "\n{}, {size} rank{}", comm.label(), if size == 1 { "" } else { "s" });
    let mut rows = vec![["rank", "process", "state", "since", "call", "waits for"].map(str::to_owned)];
    let shown: Vec<&Rank> = if size <= ROWS || verbose {
        comm.ranks.iter().collect()
    } else {
        let is_missing = |rank: &Rank| missing.contains(&rank.rank);
        let kind = |rank: &Rank| (is_missing(rank), rank.state, rank.standing.as_ref().map(|standing| standing.begun));
        let mut seen = Vec::new();
        let first = |rank: &&Rank| {
            let count = seen.iter().filter(|known| **known == kind(rank)).count();
            seen.push(kind(rank));
            count < 2
        };
        // One that is missed has a row, however many others there are.
        let mut shown: Vec<&Rank> = comm.ranks.iter().filter(first).collect();
        shown.sort_by_key(|rank| !is_missing(rank));
        shown.truncate(ROWS);
        shown.sort_by_key(|rank| rank.rank);
        shown
    };
    rows.extend(shown.iter().map(|rank| row(rank)));
    let widths: Vec<usize> = (0..6).map(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0)).collect();
    let marks = shown.iter().map(|rank| if missing.contains(&rank.rank) { MARK } else { "  " });
    for (row, mark) in rows.iter().zip(std::iter::once("  ").chain(marks)) {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(page, "{mark}{}", cells.join("  ").trim_end());
    }
    if shown.len() < size {
        let _ = writeln!(page, "  and {} more ranks in one of these states (--verbose shows all)", size - shown.len());
    }
    for rank in &shown {
        if let Some(detail) = &rank.detail {
            let _ = writeln!(page, "  rank {}: {detail}", rank.rank);
        }
        if let Some(device) = &rank.device {
            let over = device.finished.map_or_else(|| "unknown".to_owned(), |finished| finished.to_string());
            let (gpu, path, enqueued) = (device.device, &device.path, device.enqueued);
            let _ =
                writeln!(page, "  rank {}: GPU {gpu}, path {path}: {enqueued} calls enqueued, {over} over", rank.rank);
        }
        if rank.state == State::Message || verbose {
            for message in &rank.messages {
                let _ = writeln!(page, "  rank {}: in {}", rank.rank, message.call);
            }
        }
        if verbose && !rank.recent.is_empty() {
            let calls: Vec<String> = rank.recent.iter().map(|call| call.to_string()).collect();
            let _ = writeln!(page, "  rank {}, last calls: {}", rank.rank, calls.join(", "));
        }
    }
}

fn row(rank: &Rank) -> [String; 6] {
    let standing = rank.standing.as_ref();
    let call = standing.and_then(|standing| standing.call.as_ref());
    let call = match (call, rank.state) {
        (_, State::Meets) => rank.meets.as_ref().map_or_else(String::new, |meets| meets.what.clone()),
        (None, _) => "-".to_owned(),
        (Some(call), State::InCall) => call.to_string(),
        (Some(call), _) => format!("after {call}"),
    };
    let heard = if rank.source == Source::Heartbeat { " (heartbeat)" } else { "" };
    [
        rank.rank.to_string(),
        format!("{}@{}", rank.place.pid, rank.place.host),
        format!("{}{heard}", rank.state),
        match (&rank.meets, standing) {
            (Some(meets), _) if rank.state == State::Meets => seconds(meets.waits_ms),
            (_, Some(standing)) => seconds(standing.quiet_ms),
            (_, None) => "-".to_owned(),
        },
        call,
        rank.awaits().map_or_else(|| "-".to_owned(), |peer| format!("rank {peer}")),
    ]
}

/// Milliseconds since 1970 as the time of day in UTC.
fn clock(ms: u64) -> String {
    let s = ms / 1000 % 86_400;
    format!("{:02}:{:02}:{:02} UTC", s / 3600, s / 60 % 60, s % 60)
}
