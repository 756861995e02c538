//! From runs to cells: medians over rounds, the best peer, ratios.

use std::collections::BTreeMap;

use program_kit::stats::median;

use super::args::{OPERATIONS, Part};
use super::program::Role;
use super::rows::Row;

/// One program's run in one round of one part.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    /// Index of the program's column in [`Measured::columns`].
    pub(crate) column: usize,
    pub(crate) round: u32,
    /// Round trip of a cache line before and after, in nanoseconds.
    pub(crate) before: Option<f64>,
    pub(crate) after: Option<f64>,
    pub(crate) rows: Vec<Row>,
}

/// A part's measurements.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) part: Part,
    pub(crate) columns: Vec<Column>,
    pub(crate) runs: Vec<Run>,
    /// Errors.
    pub(crate) notes: Vec<String>,
}

/// One column of a part's tables.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) role: Role,
}

/// One time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cell {
    /// Median over the rounds, microseconds.
    pub(crate) us: f64,
    /// Every round had fewer than three clean repetitions.
    pub(crate) disturbed: bool,
}

/// A row of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) bytes: usize,
    /// In the order of the columns.
    pub(crate) cells: Vec<Option<Cell>>,
    /// Column and microseconds of the fastest peer.
    pub(crate) best: Option<(usize, f64)>,
}

impl Line {
    /// The time in `column`, if there is one.
    pub(crate) fn cell(&self, column: usize) -> Option<Cell> {
        self.cells.get(column).copied().flatten()
    }

    /// The best peer's time over the time in `column`: above 1 the column is faster.
    pub(crate) fn ratio(&self, column: usize) -> Option<f64> {
        Some(self.best?.1 / self.cell(column)?.us)
    }
}

/// A part as tables.
#[derive(Debug, Clone)]
pub(crate) struct Summary {
    pub(crate) part: Part,
    pub(crate) columns: Vec<Column>,
    /// Number of runs.
    pub(crate) runs: usize,
    /// A table for each operation, in the order of [`OPERATIONS`].
    pub(crate) tables: Vec<(&'static str, Vec<Line>)>,
    pub(crate) notes: Vec<String>,
}

impl Summary {
    /// Our columns that are compared with the peers'.
    pub(crate) fn ours(&self) -> impl Iterator<Item = usize> {
        let place = |role| self.columns.iter().position(|c| c.role == role);
        [Role::Ours, Role::Symmetric].into_iter().filter_map(place)
    }
}

/// Geometric mean and smallest of a column's ratios, with the size of the latter.
pub(crate) fn ratios(lines: &[Line], column: usize) -> Option<(f64, f64, usize)> {
    let found: Vec<(f64, usize)> = lines.iter().filter_map(|l| Some((l.ratio(column)?, l.bytes))).collect();
    let mean = geometric_mean(&found.iter().map(|r| r.0).collect::<Vec<_>>())?;
    let (least, bytes) = found.into_iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some((mean, least, bytes))
}

/// The geometric mean of positive values; `None` without values.
fn geometric_mean(values: &[f64]) -> Option<f64> {
    let logarithms = values.iter().map(|v| v.ln()).sum::<f64>();
    (!values.is_empty()).then(|| (logarithms / values.len() as f64).exp())
}

/// Medians and ratios of a part.
pub(crate) fn summary(measured: &Measured) -> Summary {
    let mut times: BTreeMap<(usize, usize), Vec<Vec<&Row>>> = BTreeMap::new();
    let mut notes = measured.notes.clone();
    for run in &measured.runs {
        for row in &run.rows {
            let Some(op) = OPERATIONS.iter().position(|&op| op == row.op) else { continue };
            // Less than one element per rank: nothing was moved.
            if row.bytes == 0 && row.op != "barrier" {
                continue;
            }
            if row.wrong > 0 {
                let name = measured.columns.get(run.column).map_or("?", |c| c.name.as_str());
                notes.push(format!(
                    "{name}: {} elements of {} {} bytes were wrong; left out",
                    row.wrong, row.op, row.bytes
                ));
                continue;
            }
            let columns = times.entry((op, row.bytes)).or_insert_with(|| vec![Vec::new(); measured.columns.len()]);
            if let Some(column) = columns.get_mut(run.column) {
                column.push(row);
            }
        }
    }
    let mut tables: Vec<(&'static str, Vec<Line>)> = Vec::new();
    for ((op, bytes), columns) in times {
        let cells: Vec<Option<Cell>> = columns.iter().map(|rows| cell(rows)).collect();
        let peer = |column: usize| measured.columns.get(column).is_some_and(|c| c.role == Role::Peer);
        let best = cells
            .iter()
            .enumerate()
            .filter_map(|(column, cell)| Some((column, cell.filter(|_| peer(column))?.us)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        let line = Line { bytes, cells, best };
        match tables.last_mut().filter(|(name, _)| *name == OPERATIONS[op]) {
            Some((_, lines)) => lines.push(line),
            None => tables.push((OPERATIONS[op], vec![line])),
        }
    }
    Summary { part: measured.part, columns: measured.columns.clone(), runs: measured.runs.len(), tables, notes }
}

/// The median over the rounds with three clean repetitions or more; over all rounds when no round has them.
fn cell(rows: &[&Row]) -> Option<Cell> {
    let times = |rows: &mut dyn Iterator<Item = &&Row>| rows.map(|r| r.us).collect::<Vec<_>>();
    let clean = times(&mut rows.iter().filter(|r| r.clean >= r.repetitions.min(3)));
    match median(&clean) {
        Some(us) => Some(Cell { us, disturbed: false }),
        None => Some(Cell { us: median(&times(&mut rows.iter()))?, disturbed: true }),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::peers::args::{Buffers, Pages, Transport};

    pub(crate) fn row(op: &str, bytes: usize, us: f64) -> Row {
        let line = format!("{op},f32,out,{bytes},{us},{us},{us},1,7,7,0");
        Row { op: op.to_owned(), dtype: "f32".to_owned(), bytes, us, clean: 7, repetitions: 7, wrong: 0, line }
    }

    fn run(column: usize, round: u32, ns: f64, rows: Vec<Row>) -> Run {
        Run { column, round, before: Some(ns), after: Some(ns), rows }
    }

    pub(crate) fn measured(runs: Vec<Run>) -> Measured {
        let part = Part { transport: Transport::Shm, ranks: 2, pages: Pages::Small, buffers: Buffers::Reused };
        let column = |name: &str, role| Column { name: name.to_owned(), role };
        let columns = vec![
            column("tinynccl", Role::Ours),
            column("tinynccl alloc", Role::Symmetric),
            column("Open MPI", Role::Peer),
            column("MPICH", Role::Peer),
        ];
        Measured { part, columns, runs, notes: Vec::new() }
    }

    pub(crate) fn three_rounds() -> Measured {
        let mut runs = Vec::new();
        for round in 0..3 {
            let noise = f64::from(round);
            for (column, small, large) in [(0, 0.2, 50.0), (2, 0.15, 100.0), (3, 0.3, 80.0)] {
                let rows = vec![
                    row("all_reduce", 8, small + noise),
                    row("all_reduce", 1 << 20, large + noise),
                    row("reduce", 8, small),
                ];
                runs.push(run(column, round, 50.0, rows));
            }
        }
        measured(runs)
    }

    #[test]
    fn medians_best_peer_and_ratios() {
        let summary = summary(&three_rounds());
        assert_eq!(summary.tables.iter().map(|t| t.0).collect::<Vec<_>>(), ["all_reduce", "reduce"]);
        let lines = &summary.tables[0].1;
        assert_eq!(lines[0].bytes, 8);
        assert_eq!(lines[0].cells[0], Some(Cell { us: 1.2, disturbed: false }));
        assert_eq!(lines[0].cells[1], None, "it did not run");
        assert_eq!(lines[0].best, Some((2, 1.15)));
        assert_eq!(lines[1].best, Some((3, 81.0)));
        approx::assert_abs_diff_eq!(lines[1].ratio(0).unwrap(), 81.0 / 51.0, epsilon = 1e-12);
        let (mean, least, bytes) = ratios(lines, 0).unwrap();
        approx::assert_abs_diff_eq!(mean, (1.15 / 1.2 * 81.0 / 51.0f64).sqrt(), epsilon = 1e-12);
        approx::assert_abs_diff_eq!(least, 1.15 / 1.2, epsilon = 1e-12);
        assert_eq!(bytes, 8);
        assert_eq!(ratios(lines, 1), None);
    }

    #[test]
    fn rounds_without_clean_repetitions_do_not_count_beside_others() {
        let far = Row { clean: 1, ..row("reduce", 8, 9.0) };
        let mut runs = vec![run(0, 0, 50.0, vec![far.clone()]), run(0, 1, 50.0, vec![far.clone()])];
        assert_eq!(summary(&measured(runs.clone())).tables[0].1[0].cells[0], Some(Cell { us: 9.0, disturbed: true }));
        runs.push(run(0, 2, 50.0, vec![row("reduce", 8, 1.0)]));
        assert_eq!(summary(&measured(runs)).tables[0].1[0].cells[0], Some(Cell { us: 1.0, disturbed: false }));
    }

    #[test]
    fn wrong_values_and_empty_messages_do_not_count() {
        let mut wrong = row("reduce", 8, 0.1);
        wrong.wrong = 2;
        let runs = vec![
            run(0, 0, 50.0, vec![row("reduce", 8, 1.0), row("all_gather", 0, 1.0), row("barrier", 0, 1.0)]),
            run(2, 0, 50.0, vec![wrong]),
        ];
        let summary = summary(&measured(runs));
        assert_eq!(summary.tables.iter().map(|t| t.0).collect::<Vec<_>>(), ["reduce", "barrier"]);
        assert_eq!(summary.tables[0].1[0].best, None);
        assert!(summary.notes[0].contains("Open MPI: 2 elements of reduce 8 bytes were wrong"), "{:?}", summary.notes);
    }

    #[test]
    fn a_ratio_and_its_inverse_cancel() {
        assert_eq!(geometric_mean(&[]), None);
        approx::assert_abs_diff_eq!(geometric_mean(&[4.0, 0.25]).unwrap(), 1.0, epsilon = 1e-12);
        approx::assert_abs_diff_eq!(geometric_mean(&[2.0, 8.0]).unwrap(), 4.0, epsilon = 1e-12);
    }

    #[test]
    fn cells_that_were_disturbed_in_every_round() {
        let rows: Vec<Row> = [0, 2, 7].into_iter().map(|clean| Row { clean, ..row("reduce", 8, 1.0) }).collect();
        assert!(cell(&rows[..2].iter().collect::<Vec<_>>()).unwrap().disturbed);
        assert!(!cell(&rows.iter().collect::<Vec<_>>()).unwrap().disturbed);
        assert_eq!(cell(&[]), None);
    }
}
