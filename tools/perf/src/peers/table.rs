//! The Markdown page.

use std::fmt::Write as _;

use program_kit::size;
use program_kit::stats::median;

use super::Entry;
use super::args::Args;
use super::results::{Cell, Line, Summary, ratios};
use super::stream::{Rates, WRITES};
use crate::table;

/// The machine, the versions, the method, and what ran.
pub(super) fn head<'a>(
    args: &Args,
    facts: &[(String, String)],
    entries: impl Iterator<Item = &'a Entry> + Clone,
) -> String {
    let mut text = String::from("# Collectives beside other libraries\n\n| | |\n|---|---|\n");
    for (name, value) in facts {
        let _ = writeln!(text, "| {name} | {} |", value.replace('|', "\\|"));
    }
    let mut versions: Vec<&String> = entries.clone().filter_map(|entry| entry.version.as_ref()).collect();
    versions.sort();
    versions.dedup();
    for version in versions {
        let _ = writeln!(text, "| Peer says | {} |", version.replace('\t', " "));
    }
    let _ = write!(
        text,
        "\nEvery program ran once in each round, {} rounds if no note below says less, in turn; rank r on core r modulo the number of cores. A time is the median over the \
         rounds; in each round it is the median over repetitions of calls back to back, each after a barrier, of the slowest \
         rank's mean. Sizes as nccl-tests: all_gather, reduce_scatter and all_to_all in total bytes. Ratios are the best \
         peer's time over ours: above 1 we are faster. `~`: most repetitions were disturbed by other programs. pingpong is there and \
         back. MPI has no bf16 and this Gloo reduces none, so bf16 is ours alone and counts in no ratio.\n\n",
        args.rounds
    );
    text += "What ran, with the first part's command of each:\n\n";
    let mut said: Vec<(&str, &str)> = Vec::new();
    for Entry { program, .. } in entries {
        if !said.contains(&(program.name, program.what)) {
            said.push((program.name, program.what));
            let _ = writeln!(text, "- {}: {}. `{}`", program.name, program.what, program.line());
        }
    }
    text + "\n"
}

/// A heading, a table that sums up, and a table for each operation.
pub(super) fn part(summary: &Summary) -> String {
    let mut text = format!("## {}{}\n\n", summary.part.to_string()[..1].to_uppercase(), &summary.part.to_string()[1..]);
    let _ = writeln!(
        text,
        "{} runs. Times are those of repetitions in which no rank lost its core and, with two ranks, both cores were near each \
         other; `~`: no round had three of them.\n",
        summary.runs
    );
    text += &totals(summary);
    for (op, lines) in &summary.tables {
        let _ = writeln!(text, "### {op}, {}\n", summary.part);
        text += &operation(summary, op, lines);
    }
    for note in &summary.notes {
        let _ = writeln!(text, "- {note}");
    }
    if !summary.notes.is_empty() {
        text.push('\n');
    }
    text
}

/// Ratios of our columns: geometric mean, smallest, and where they are below 1.
fn totals(summary: &Summary) -> String {
    let mut text = String::from(
        "| operation | column | geometric mean of ratios | smallest | at bytes | sizes below 1.0 |\n|---|---|---|---|---|---|\n",
    );
    let mut any = false;
    for (op, lines) in &summary.tables {
        for column in summary.ours() {
            let Some((mean, least, bytes)) = ratios(lines, column) else { continue };
            any = true;
            let below: Vec<String> = lines
                .iter()
                .filter(|line| line.ratio(column).is_some_and(|r| r < 1.0))
                .map(|line| size::show(line.bytes))
                .collect();
            let below = if below.is_empty() { "none".to_owned() } else { below.join(" ") };
            let name = &summary.columns[column].name;
            let _ = writeln!(text, "| {op} | {name} | {mean:.2} | {least:.2} | {} | {below} |", size::show(bytes));
        }
    }
    if any { text + "\n" } else { String::new() }
}

fn operation(summary: &Summary, op: &str, lines: &[Line]) -> String {
    // Columns without a single value say nothing.
    let shown: Vec<usize> = (0..summary.columns.len()).filter(|&c| lines.iter().any(|l| l.cell(c).is_some())).collect();
    let ours: Vec<usize> = summary.ours().filter(|column| shown.contains(column)).collect();
    let mut heading = vec!["bytes".to_owned()];
    heading.extend(shown.iter().map(|&c| format!("{} µs", summary.columns[c].name)));
    heading.push("best peer".to_owned());
    for &column in &ours {
        heading.push(format!("best / {}", summary.columns[column].name));
        heading.push(format!("{} GB/s", summary.columns[column].name));
    }
    let mut text = table::head(&heading) + "\n";
    for line in lines {
        let mut fields = vec![size::show(line.bytes)];
        fields.extend(shown.iter().map(|&c| time(line.cell(c))));
        fields.push(line.best.map_or("-".to_owned(), |(column, _)| summary.columns[column].name.clone()));
        for &column in &ours {
            fields.push(line.ratio(column).map_or("-".to_owned(), ratio));
            let us = line.cell(column).map(|cell| cell.us);
            let rate = |us| line.bytes as f64 / us / 1000.0 * table::bus_factor(op, summary.part.ranks as usize);
            fields.push(us.map_or("-".to_owned(), |us| format!("{:.2}", rate(us))));
        }
        text += &(table::row(&fields) + "\n");
    }
    text + "\n"
}

/// A ratio; bold where the peer is ahead.
fn ratio(value: f64) -> String {
    // Rounding must not hide that the peer is ahead.
    let text = if (0.995..1.0).contains(&value) { "0.99".to_owned() } else { format!("{value:.2}") };
    if value < 1.0 { format!("**{text}**") } else { text }
}

/// Microseconds with the digits that say something; `~` where the machine was busy with something else.
fn time(cell: Option<Cell>) -> String {
    let Some(Cell { us, disturbed }) = cell else { return "-".to_owned() };
    let digits = if us < 10.0 { 2 } else { usize::from(us < 1000.0) };
    format!("{}{us:.digits$}", if disturbed { "~" } else { "" })
}

/// The rates of a TCP stream, and the notes of all parts.
pub(super) fn streams(streams: &[Rates], notes: &[String]) -> String {
    let mut text = String::new();
    if let Some(ours) = median(&streams.iter().map(|s| s.ours).collect::<Vec<_>>()) {
        text += "## One TCP stream on loopback, 128 MiB, GB/s\n\n| program | GB/s | ours / theirs |\n|---|---|---|\n";
        let _ = writeln!(text, "| tinynccl send and recv | {ours:.2} | |");
        for (i, write) in WRITES.iter().enumerate() {
            let rates: Vec<f64> = streams.iter().filter_map(|s| s.theirs.get(i).copied()).collect();
            if let Some(theirs) = median(&rates) {
                let _ = writeln!(text, "| iperf3 -l {write} | {theirs:.2} | {:.2} |", ours / theirs);
            }
        }
        text.push('\n');
    }
    for note in notes {
        let _ = writeln!(text, "- {note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::results::{summary, tests::three_rounds};

    #[test]
    fn layout() {
        let text = part(&summary(&three_rounds()));
        let expected = [
            "## Shared memory, 2 ranks, 4 KiB pages, reused buffers",
            "9 runs. Times are those of repetitions in which no rank lost its core and, with two ranks, both cores were near each other; `~`: no round had three of them.",
            "| all_reduce | tinynccl | 1.23 | 0.96 | 8 | 8 |",
            "### all_reduce, shared memory, 2 ranks, 4 KiB pages, reused buffers",
            "| bytes | tinynccl µs | Open MPI µs | MPICH µs | best peer | best / tinynccl | tinynccl GB/s |",
            "|---|---|---|---|---|---|---|",
            "| 8 | 1.20 | 1.15 | 1.30 | Open MPI | **0.96** | 0.01 |",
            "| 1M | 51.0 | 101.0 | 81.0 | MPICH | 1.59 | 20.56 |",
        ];
        for line in expected {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        for table in text.split("\n\n").filter(|t| t.starts_with('|')) {
            let columns: Vec<usize> = table.lines().map(|l| l.matches('|').count()).collect();
            assert!(columns.iter().all(|&n| n == columns[0]), "{table}");
        }
    }

    #[test]
    fn numbers() {
        let cell = |us, disturbed| time(Some(Cell { us, disturbed }));
        assert_eq!([cell(0.154, false), cell(12.34, true), cell(12345.6, false)], ["0.15", "~12.3", "12346"]);
        assert_eq!([ratio(0.999), ratio(1.0), ratio(0.5)], ["**0.99**", "1.00", "**0.50**"]);
        assert_eq!(time(None), "-");
    }
}
