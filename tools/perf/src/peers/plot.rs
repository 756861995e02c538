//! A plot of a part: for each operation time over size, and the ratio to the best peer over size.

use anyhow::Result;
use line_chart::{Axis, BLACK, Chart, Curve, RGBColor};

use super::program::Role;
use super::results::{Line, Summary};

const WIDTH: u32 = 1200;
/// Height of the row with an operation's two charts.
const HEIGHT: u32 = 340;
const TITLE: u32 = 40;
/// Peers; ours are black and red.
const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(127, 176, 211),
    RGBColor(23, 190, 207),
    RGBColor(44, 160, 44),
    RGBColor(152, 223, 138),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
];

/// The part as SVG; `None` when no operation has two sizes.
pub(crate) fn svg(summary: &Summary) -> Result<Option<String>> {
    let tables = summary.tables.iter().filter(|(_, lines)| lines.iter().filter(|l| l.bytes > 0).count() > 1);
    let rows: Vec<Vec<Chart>> =
        tables.map(|(op, lines)| vec![times(op, summary, lines), ratios(op, summary, lines)]).collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let title = format!("{} (medians; ratio above 1: tinynccl is faster than the best peer)", summary.part);
    let height = TITLE + HEIGHT * u32::try_from(rows.len())?;
    line_chart::svg(&title, (WIDTH, height), &rows).map(Some)
}

fn times(op: &str, summary: &Summary, lines: &[Line]) -> Chart {
    let time = |line: &Line, column: usize| Some(line.cell(column)?.us);
    let columns = 0..summary.columns.len();
    chart(op, Axis::log("time (us)"), columns.map(|column| curve(summary, column, lines, time)).collect())
}

fn ratios(op: &str, summary: &Summary, lines: &[Line]) -> Chart {
    let even = lines.iter().map(|line| (line.bytes as f64, 1.0)).collect();
    let mut curves = vec![Curve { width: 1, ..Curve::line("", even, RGBColor(160, 160, 160)) }];
    for column in summary.ours() {
        curves.push(curve(summary, column, lines, Line::ratio));
    }
    chart(op, Axis::log("best peer / ours"), curves)
}

fn chart(op: &str, y: Axis, mut curves: Vec<Curve>) -> Chart {
    curves.retain(|curve| !curve.points.is_empty());
    Chart { title: op.to_owned(), x: Axis::log("size (bytes)"), y, curves, legend_right: false }
}

fn curve(summary: &Summary, column: usize, lines: &[Line], value: impl Fn(&Line, usize) -> Option<f64>) -> Curve {
    let points = lines.iter().filter_map(|line| Some((line.bytes as f64, value(line, column)?))).collect();
    let ours = matches!(summary.columns[column].role, Role::Ours | Role::Symmetric);
    let width = if ours { 3 } else { 1 };
    Curve { width, ..Curve::measured(&summary.columns[column].name, points, colour(summary, column)) }
}

fn colour(summary: &Summary, column: usize) -> RGBColor {
    match summary.columns[column].role {
        Role::Ours => BLACK,
        Role::Symmetric => RGBColor(214, 39, 40),
        Role::Bf16 => RGBColor(150, 150, 150),
        Role::Peer => {
            let peers = summary.columns[..column].iter().filter(|c| c.role == Role::Peer).count();
            COLOURS[peers % COLOURS.len()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::results::{summary, tests::three_rounds};

    #[test]
    fn curves_and_ratios_of_each_operation() {
        let svg = svg(&summary(&three_rounds())).unwrap().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for word in ["all_reduce", "tinynccl", "Open MPI", "MPICH", "best peer / ours"] {
            assert!(svg.contains(word), "{word}");
        }
        assert!(svg.matches("<polyline").count() >= 4, "three times and a ratio");
        assert!(!svg.contains("reduce_scatter") && !svg.contains("tinynccl alloc"), "they did not run");
    }

    #[test]
    fn nothing_to_draw() {
        let mut empty = three_rounds();
        empty.runs.clear();
        assert_eq!(svg(&summary(&empty)).unwrap(), None);
    }
}
