//! The raw values: a line of CSV for every line of every run, written and read back.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, anyhow, bail};

use super::args::Part;
use super::program::Role;
use super::results::{Column, Measured, Run};
use super::rows::{self, HEADING};

/// The columns before the fields of [`HEADING`].
const KEY: &str = "part,program,round,ns_before,ns_after";

/// Every line of every run.
pub(crate) fn write<'a>(parts: impl IntoIterator<Item = &'a Measured>) -> String {
    let mut text = format!("{KEY},{HEADING}\n");
    let ns = |ns: Option<f64>| ns.map_or(String::new(), |ns| format!("{ns:.0}"));
    for measured in parts {
        let key = measured.part.key();
        for run in &measured.runs {
            let name = &measured.columns[run.column].name;
            for row in &run.rows {
                let _ =
                    writeln!(text, "{key},{name},{},{},{},{}", run.round + 1, ns(run.before), ns(run.after), row.line);
            }
        }
    }
    text
}

/// The parts of a file that [`write()`] made. Programs without a line and notes are not in it.
pub(crate) fn read(text: &str) -> Result<Vec<Measured>> {
    let mut lines = text.lines().enumerate();
    let heading = format!("{KEY},{HEADING}");
    if lines.next().is_none_or(|(_, line)| line != heading) {
        bail!("line 1: expected the heading {heading}");
    }
    let mut parts: Vec<Measured> = Vec::new();
    for (number, line) in lines {
        value(line, &mut parts).with_context(|| format!("line {}: {line}", number + 1))?;
    }
    Ok(parts)
}

fn value(line: &str, parts: &mut Vec<Measured>) -> Result<()> {
    let fields: Vec<&str> = line.splitn(6, ',').collect();
    let &[key, name, round, before, after, row] = fields.as_slice() else { bail!("expected {KEY},{HEADING}") };
    let part = Part::from_key(key).with_context(|| format!("{key} is no part"))?;
    let round = round.parse::<u32>().ok().and_then(|n| n.checked_sub(1)).context("round")?;
    let ns = |text: &str| match text {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|e| anyhow!("nanoseconds {text}: {e}")),
    };
    let place = parts.iter().position(|p| p.part == part).unwrap_or_else(|| {
        parts.push(Measured { part, columns: Vec::new(), runs: Vec::new(), notes: Vec::new() });
        parts.len() - 1
    });
    let measured = &mut parts[place];
    let column = measured.columns.iter().position(|c| c.name == name).unwrap_or_else(|| {
        measured.columns.push(Column { name: name.to_owned(), role: Role::of(name) });
        measured.columns.len() - 1
    });
    let (before, after) = (ns(before)?, ns(after)?);
    // The lines of a run follow each other.
    if measured.runs.last().is_none_or(|run| (run.column, run.round) != (column, round)) {
        measured.runs.push(Run { column, round, before, after, rows: Vec::new() });
    }
    let row = rows::row(row)?;
    measured.runs.last_mut().context("pushed above")?.rows.push(row);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::plot;
    use crate::peers::results::{summary, tests::three_rounds};

    #[test]
    fn a_file_that_was_written_is_read_back_and_draws_the_same_plot() {
        let mut other = three_rounds();
        other.part = Part::from_key("tcp-4-huge-fresh").unwrap();
        other.runs.retain(|run| run.column == 2);
        let text = write([&three_rounds(), &other]);
        let [first, second] = &read(&text).unwrap()[..] else { panic!("two parts:\n{text}") };
        assert_eq!(
            plot::svg(&summary(first)).unwrap().unwrap(),
            plot::svg(&summary(&three_rounds())).unwrap().unwrap()
        );
        assert_eq!(second.part, other.part);
        assert_eq!(
            second.columns.iter().map(|c| (c.name.as_str(), c.role)).collect::<Vec<_>>(),
            [("Open MPI", Role::Peer)]
        );
        assert_eq!(second.runs.len(), 3);
        assert_eq!(write([first, second]), text);
    }

    #[test]
    fn what_is_no_such_file_is_refused_with_its_line() {
        let good = write([&three_rounds()]);
        let second = good.lines().nth(1).unwrap();
        let refused = |text: String| format!("{:#}", read(&text).unwrap_err());
        assert!(refused(String::new()).starts_with("line 1: expected the heading part,program,"));
        for (from, to, why) in [
            ("shm-2-4k-reused", "shm-2-4k", "shm-2-4k is no part"),
            (",1,50,50,", ",0,50,50,", "round"),
            (",50,50,", ",x,50,", "nanoseconds x"),
            (",1,7,7,0", ",1,7", "expected 11 fields, got 9"),
        ] {
            let bad = good.replacen(second, &second.replacen(from, to, 1), 1);
            let error = refused(bad);
            assert!(error.starts_with("line 2: ") && error.contains(why), "{error}");
        }
    }
}
