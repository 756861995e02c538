//! The table, with nccl-tests' columns, so that scripts that parse its output can parse ours.

use crate::case::{Case, Layout};
use crate::row::Measured;

/// Heading of the columns.
pub(crate) fn heading() -> String {
    let place = |title: &str| format!("{title:^30}");
    [
        format!("#{:46}  {}  {}", "", place("out-of-place"), place("in-place")),
        format!(
            "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}  {columns}  {columns}",
            "size",
            "count",
            "type",
            "redop",
            "root",
            columns = format_args!("{:>8} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong")
        ),
        format!(
            "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}  {units}  {units}",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            units = format_args!("{:>8} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "")
        ),
    ]
    .join("\n")
}

/// Title of a block: the collective, which is the program's name in nccl-tests.
pub(crate) fn title(case: &Case) -> String {
    format!("#\n# {}", case.name())
}

/// One row.
pub(crate) fn row(case: &Case, layout: Layout, out: Option<&Measured>, in_place: Option<&Measured>) -> String {
    let op = case.op.map_or("none", |op| op.name());
    let root = case.root.map_or("-1".to_owned(), |root| root.to_string());
    format!(
        "{:>12}  {:>12}  {:>8}  {op:>6}  {root:>6}  {}  {}",
        case.bytes(layout),
        layout.count,
        case.dtype.name(),
        place(out),
        place(in_place)
    )
}

fn place(measured: Option<&Measured>) -> String {
    let Some(m) = measured else { return format!("{:>8} {:>7} {:>7} {:>6}", "N/A", "N/A", "N/A", "N/A") };
    let wrong = m.wrong.map_or("N/A".to_owned(), |n| n.to_string());
    format!("{:>8} {:>7.2} {:>7.2} {wrong:>6}", time(m.timing.median), m.algbw, m.busbw)
}

/// Microseconds with four significant digits.
fn time(seconds: f64) -> String {
    let us = seconds * 1e6;
    match us {
        _ if us >= 10_000.0 => format!("{us:.0}"),
        _ if us >= 100.0 => format!("{us:.1}"),
        _ => format!("{us:.2}"),
    }
}

/// Totals over all rows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Totals {
    /// Wrong elements.
    pub(crate) wrong: u64,
    /// True once a row has been checked.
    pub(crate) checked: bool,
    busbw: f64,
    measured: usize,
}

impl Totals {
    /// Adds one place of one row.
    pub(crate) fn add(&mut self, measured: &Measured) {
        self.wrong = self.wrong.saturating_add(measured.wrong.unwrap_or(0));
        self.checked |= measured.wrong.is_some();
        self.busbw += measured.busbw;
        self.measured += 1;
    }

    /// Mean of the bus bandwidth column, GB/s.
    pub(crate) fn average(&self) -> f64 {
        self.busbw / self.measured.max(1) as f64
    }

    /// The closing lines.
    pub(crate) fn summary(&self) -> String {
        let verdict = match (self.checked, self.wrong) {
            (false, _) => "N/A (not checked)".to_owned(),
            (true, 0) => "0 OK".to_owned(),
            (true, n) => format!("{n} FAILED"),
        };
        format!("# Out of bounds values : {verdict}\n# Avg bus bandwidth    : {:.4}\n#", self.average())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Timing;
    use tinynccl::wire::Collective;
    use tinynccl::{DType, ReduceOp};

    fn measured(wrong: Option<u64>, busbw: f64) -> Measured {
        let timing = Timing { median: 12.346e-6, min: 1e-6, max: 2e-5, iterations: 10, repetitions: 7, clean: 7 };
        Measured { timing, algbw: 1.5, busbw, wrong }
    }

    #[test]
    fn rows_have_the_columns_of_nccl_tests() {
        let case = Case {
            collective: Collective::AllReduce,
            way: crate::case::Way::Ring,
            dtype: DType::F32,
            op: Some(ReduceOp::Sum),
            root: None,
        };
        let line = row(&case, case.layout(1024, 2), Some(&measured(Some(0), 1.5)), None);
        let fields: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            fields,
            ["1024", "256", "f32", "sum", "-1", "12.35", "1.50", "1.50", "0", "N/A", "N/A", "N/A", "N/A"]
        );
        for heading in heading().lines().skip(1) {
            assert_eq!(heading.len(), line.len(), "{heading}\n{line}");
        }
        let unchecked = row(&case, case.layout(1024, 2), Some(&measured(None, 1.5)), None);
        assert_eq!(unchecked.split_whitespace().nth(8), Some("N/A"));
    }

    #[test]
    fn times_keep_their_digits() {
        assert_eq!([1.234e-6, 99.9e-6, 123.46e-6, 0.0123456].map(time), ["1.23", "99.90", "123.5", "12346"]);
    }

    #[test]
    fn totals() {
        let mut totals = Totals::default();
        assert!(totals.summary().contains("values : N/A"));
        totals.add(&measured(Some(0), 1.0));
        totals.add(&measured(Some(0), 2.0));
        assert!(totals.summary().contains("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1.5000"));
        totals.add(&measured(Some(3), 2.0));
        assert!(totals.summary().contains("values : 3 FAILED"));
    }
}
