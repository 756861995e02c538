//! Time and bus bandwidth over the size, as one SVG.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::record::Row;

const SIZE: (u32, u32) = (1200, 520);
const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(23, 190, 207),
    RGBColor(127, 127, 127),
];

/// One curve: bytes, microseconds, GB/s.
type Curve = Vec<(f64, f64, f64)>;

/// Draws all rows; a curve for each collective, type, operator, root and place.
pub(crate) fn svg(rows: &[Row], title: &str) -> Result<String> {
    let curves = curves(rows);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(&area, &curves, title).map_err(|e| anyhow!("cannot draw the plot: {e}"))?;
    }
    Ok(text)
}

fn curves(rows: &[Row]) -> BTreeMap<String, Curve> {
    let mut curves: BTreeMap<String, Curve> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        for (place, measured) in [("", row.out_of_place), (", in place", row.in_place)] {
            let Some(m) = measured.filter(|m| m.timing.median > 0.0) else { continue };
            let op = row.op.map_or(String::new(), |op| format!(" {op}"));
            let root = row.root.map_or(String::new(), |root| format!(" root {root}"));
            let name = format!("{} {}{op}{root}{place}", row.collective, row.dtype);
            curves.entry(name).or_default().push((row.bytes as f64, m.timing.median * 1e6, m.busbw));
        }
    }
    curves
}

fn draw<D: DrawingBackend>(
    area: &DrawingArea<D, Shift>,
    curves: &BTreeMap<String, Curve>,
    title: &str,
) -> Result<(), DrawingAreaErrorKind<D::ErrorType>> {
    area.fill(&WHITE)?;
    let area = area.titled(title, ("sans-serif", 18))?;
    let (left, right) = area.split_horizontally(SIZE.0 / 2);
    let points = || curves.values().flatten();
    let sizes = span(points().map(|p| p.0));
    let times = span(points().map(|p| p.1));
    let fastest = points().map(|p| p.2).fold(0.0, f64::max).max(1e-3) * 1.08;

    let mut chart = frame(&left).build_cartesian_2d((sizes.0..sizes.1).log_scale(), (times.0..times.1).log_scale())?;
    axes(&mut chart, "time (us)", &|us| short(*us))?;
    lines(&mut chart, curves, |p| (p.0, p.1))?;
    let mut chart = frame(&right).build_cartesian_2d((sizes.0..sizes.1).log_scale(), 0.0..fastest)?;
    axes(&mut chart, "bus bandwidth (GB/s)", &|rate| format!("{rate:.1}"))?;
    lines(&mut chart, curves, |p| (p.0, p.2))?;
    area.present()
}

fn frame<'a, 'b, D: DrawingBackend>(area: &'a DrawingArea<D, Shift>) -> ChartBuilder<'a, 'b, D> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(10).x_label_area_size(40).y_label_area_size(60);
    builder
}

type Chart<'a, D, Y> = ChartContext<'a, D, Cartesian2d<plotters::coord::combinators::LogCoord<f64>, Y>>;

fn axes<D: DrawingBackend, Y>(
    chart: &mut Chart<'_, D, Y>,
    label: &str,
    format: &dyn Fn(&f64) -> String,
) -> Result<(), DrawingAreaErrorKind<D::ErrorType>>
where
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_desc("size (bytes)")
        .y_desc(label)
        .x_label_formatter(&|bytes| short(*bytes))
        .y_label_formatter(&format)
        .light_line_style(WHITE)
        .draw()
}

fn lines<'a, D: DrawingBackend + 'a, Y>(
    chart: &mut Chart<'a, D, Y>,
    curves: &BTreeMap<String, Curve>,
    pick: impl Fn(&(f64, f64, f64)) -> (f64, f64),
) -> Result<(), DrawingAreaErrorKind<D::ErrorType>>
where
    Y: Ranged<ValueType = f64> + ValueFormatter<f64> + 'a,
{
    for ((name, curve), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let points: Vec<(f64, f64)> = curve.iter().map(&pick).collect();
        chart.draw_series(points.iter().map(|&p| Circle::new(p, 2, colour.filled())))?;
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()
}

/// Smallest and largest value, apart by a factor of 2 at least, for a logarithmic axis.
fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
    if low.is_finite() && low > 0.0 { (low / 1.2, (high * 1.2).max(low * 2.0)) } else { (1.0, 10.0) }
}

/// `1K`, `16M`, `0.5`: a number in few letters.
fn short(value: f64) -> String {
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "K")] {
        if value >= unit {
            return format!("{:.0}{name}", value / unit);
        }
    }
    if value >= 1.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Measured;
    use crate::stats::Timing;

    fn row(bytes: usize, us: f64) -> Row {
        let timing = Timing { median: us / 1e6, min: 0.0, max: 0.0, iterations: 1, repetitions: 1, clean: 1 };
        let measured = Measured { timing, algbw: 1.0, busbw: 1.0, wrong: Some(0) };
        Row {
            collective: "all_reduce",
            dtype: "f32",
            op: Some("sum"),
            root: None,
            bytes,
            count: bytes / 4,
            algorithm: None,
            out_of_place: Some(measured),
            in_place: None,
        }
    }

    #[test]
    fn a_curve_per_place_and_points_per_size() {
        let rows = [row(8, 1.0), row(1024, 2.0), row(1 << 20, 90.0)];
        let curves = curves(&rows);
        assert_eq!(curves.len(), 1);
        assert_eq!(curves["all_reduce f32 sum"].len(), 3);
        let svg = svg(&rows, "a <title>").unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.matches("<polyline").count() >= 2, "a curve in each half");
        assert!(svg.contains("a &lt;title&gt;") && svg.contains("all_reduce f32 sum"));
    }

    #[test]
    fn one_point_or_none_is_drawn_too() {
        assert!(svg(&[row(8, 1.0)], "one").is_ok());
        assert!(svg(&[row(0, 1.0)], "barrier").is_ok());
        assert!(svg(&[], "none").is_ok());
    }
}
