//! A plot of a part: for each operation time over size, and the ratio to the best peer over size.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::combinators::LogCoord;
use plotters::prelude::*;

use crate::program::Role;
use crate::results::{Line, Summary};

const WIDTH: u32 = 1200;
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
    let tables: Vec<&(&str, Vec<Line>)> =
        summary.tables.iter().filter(|(_, lines)| lines.iter().filter(|l| l.bytes > 0).count() > 1).collect();
    if tables.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    {
        let height = TITLE + HEIGHT * u32::try_from(tables.len())?;
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        draw(&area, summary, &tables).map_err(|e| anyhow!("cannot draw the plot: {e}"))?;
    }
    Ok(Some(text))
}

type Drawn<D> = Result<(), DrawingAreaErrorKind<<D as DrawingBackend>::ErrorType>>;
type Chart<'a, D> = ChartContext<'a, D, Cartesian2d<LogCoord<f64>, LogCoord<f64>>>;

fn draw<D: DrawingBackend>(area: &DrawingArea<D, Shift>, summary: &Summary, tables: &[&(&str, Vec<Line>)]) -> Drawn<D> {
    area.fill(&WHITE)?;
    let title = format!("{} (medians; ratio above 1: tinynccl is faster than the best peer)", summary.part);
    let area = area.titled(&title, ("sans-serif", 18))?;
    for (row, (op, lines)) in area.split_evenly((tables.len(), 1)).iter().zip(tables) {
        let (left, right) = row.split_horizontally(WIDTH / 2);
        times(&left, op, summary, lines)?;
        ratios(&right, op, summary, lines)?;
    }
    area.present()
}

fn times<D: DrawingBackend>(area: &DrawingArea<D, Shift>, op: &str, summary: &Summary, lines: &[Line]) -> Drawn<D> {
    let curve = |column: usize| -> Vec<(f64, f64)> {
        lines.iter().filter_map(|l| Some((l.bytes as f64, l.cells.get(column).copied().flatten()?.us))).collect()
    };
    let curves: Vec<(usize, Vec<(f64, f64)>)> =
        (0..summary.columns.len()).map(|c| (c, curve(c))).filter(|c| !c.1.is_empty()).collect();
    let all = || curves.iter().flat_map(|c| &c.1);
    let mut chart = chart(area, op, span(all().map(|p| p.0)), span(all().map(|p| p.1)), "time (us)")?;
    for (column, points) in curves {
        series(&mut chart, points, &summary.columns[column].name, colour(summary, column))?;
    }
    legend(&mut chart)
}

fn ratios<D: DrawingBackend>(area: &DrawingArea<D, Shift>, op: &str, summary: &Summary, lines: &[Line]) -> Drawn<D> {
    let mut curves = Vec::new();
    for role in [Role::Ours, Role::Symmetric] {
        let Some(column) = summary.column(role) else { continue };
        let points: Vec<(f64, f64)> = lines.iter().filter_map(|l| Some((l.bytes as f64, l.ratio(column)?))).collect();
        if !points.is_empty() {
            curves.push((column, points));
        }
    }
    let sizes = span(lines.iter().map(|l| l.bytes as f64));
    let values = span(curves.iter().flat_map(|c| &c.1).map(|p| p.1).chain([0.8, 1.25]));
    let mut chart = chart(area, op, sizes, values, "best peer / ours")?;
    chart.draw_series(LineSeries::new([(sizes.0, 1.0), (sizes.1, 1.0)], RGBColor(160, 160, 160)))?;
    for (column, points) in curves {
        series(&mut chart, points, &summary.columns[column].name, colour(summary, column))?;
    }
    legend(&mut chart)
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

fn chart<'a, D: DrawingBackend + 'a>(
    area: &'a DrawingArea<D, Shift>,
    op: &str,
    x: (f64, f64),
    y: (f64, f64),
    label: &str,
) -> Result<Chart<'a, D>, DrawingAreaErrorKind<D::ErrorType>> {
    let mut chart = ChartBuilder::on(area)
        .caption(op, ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(axis(x), axis(y))?;
    chart
        .configure_mesh()
        .x_desc("size (bytes)")
        .y_desc(label)
        .x_label_formatter(&|bytes| short(*bytes))
        .y_label_formatter(&|value| short(*value))
        .light_line_style(WHITE)
        .draw()?;
    Ok(chart)
}

fn axis(range: (f64, f64)) -> LogCoord<f64> {
    let coordinate: LogCoord<f64> = plotters::prelude::IntoLogRange::log_scale(range.0..range.1).into();
    coordinate
}

fn series<'a, D: DrawingBackend + 'a>(
    chart: &mut Chart<'a, D>,
    points: Vec<(f64, f64)>,
    name: &str,
    colour: RGBColor,
) -> Drawn<D> {
    let width = if colour == BLACK || colour == RGBColor(214, 39, 40) { 3 } else { 1 };
    chart.draw_series(points.iter().map(|&p| Circle::new(p, 2, colour.filled())))?;
    chart
        .draw_series(LineSeries::new(points, colour.stroke_width(width)))?
        .label(name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(width)));
    Ok(())
}

fn legend<'a, D: DrawingBackend + 'a>(chart: &mut Chart<'a, D>) -> Drawn<D> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 11))
        .background_style(WHITE.mix(0.7))
        .draw()
}

/// Smallest and largest value, apart by a factor of 2 at least, for a logarithmic axis.
fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.filter(|v| *v > 0.0).fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
    if low.is_finite() { (low / 1.2, (high * 1.2).max(low * 2.0)) } else { (1.0, 10.0) }
}

/// A number in few letters.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.0}M", v / 1e6),
        v if v >= 1e3 => format!("{:.0}K", v / 1e3),
        v if v >= 10.0 || v == 1.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{summary, tests::three_rounds};

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
