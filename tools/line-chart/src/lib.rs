//! Named curves over linear or logarithmic axes, as SVG: the plots of the programs in `milestones/` and `tools/`.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

pub use plotters::style::{BLACK, RGBColor};

/// For curves that differ in nothing but their names.
pub const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(23, 190, 207),
    RGBColor(140, 86, 75),
    RGBColor(127, 127, 127),
];

/// The font of all text.
const FONT: (&str, u32) = ("sans-serif", 14);
const TITLE: (&str, u32) = ("sans-serif", 18);

/// A line through points.
#[derive(Debug, Clone)]
pub struct Curve {
    /// In the legend; without a name it is left out there.
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
    /// Colour of the line.
    pub colour: RGBColor,
    /// Width of the line, in pixels.
    pub width: u32,
    /// True if each point has a dot: for curves of few points.
    pub dots: bool,
}

impl Curve {
    /// Measurements: a dot for each.
    pub fn measured(name: impl Into<String>, points: Vec<(f64, f64)>, colour: RGBColor) -> Curve {
        Curve { name: name.into(), points, colour, width: 2, dots: true }
    }

    /// A function: the line alone.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>, colour: RGBColor) -> Curve {
        Curve { dots: false, ..Curve::measured(name, points, colour) }
    }
}

/// An axis of a chart.
#[derive(Debug, Clone)]
pub struct Axis {
    label: String,
    log: bool,
    range: Option<(f64, f64)>,
}

impl Axis {
    /// Equal steps are equal differences. From the smallest value to the largest, with a margin.
    pub fn linear(label: impl Into<String>) -> Axis {
        Axis { label: label.into(), log: false, range: None }
    }

    /// Equal steps are equal ratios. Values that are not positive are left out.
    pub fn log(label: impl Into<String>) -> Axis {
        Axis { log: true, ..Axis::linear(label) }
    }

    /// Sets the ends of the axis to `low` and `high`, whatever the values are.
    #[must_use]
    pub fn between(self, low: f64, high: f64) -> Axis {
        Axis { range: Some((low, high)), ..self }
    }

    /// Ends of the axis: never the same, and positive on a logarithmic one.
    fn ends(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        if let Some(range) = self.range {
            return range;
        }
        let usable = values.filter(|v| v.is_finite() && (!self.log || *v > 0.0));
        let (low, high) = usable.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        match (low.is_finite(), self.log) {
            (false, true) => (1.0, 10.0),
            (false, false) => (0.0, 1.0),
            (true, true) => (low / 1.2, (high * 1.2).max(low * 2.0)),
            (true, false) => {
                let margin = (0.05 * (high - low)).max(0.005);
                (low - margin, high + margin)
            }
        }
    }
}

/// Curves over the same axes.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Above it; may be empty.
    pub title: String,
    /// From left to right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// Drawn in this order.
    pub curves: Vec<Curve>,
    /// The legend stands at the upper right, not at the upper left.
    pub legend_right: bool,
}

/// A picture of `size` pixels: rows of charts below a title, which may be empty.
///
/// # Errors
/// Errors of the crate `plotters`.
pub fn svg(title: &str, size: (u32, u32), rows: &[Vec<Chart>]) -> Result<String> {
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
    draw(area, title, rows).map_err(|error| anyhow!("cannot draw the plot: {error}"))?;
    Ok(text)
}

type Drawn<D> = Result<(), DrawingAreaErrorKind<<D as DrawingBackend>::ErrorType>>;

fn draw<D: DrawingBackend>(mut area: DrawingArea<D, Shift>, title: &str, rows: &[Vec<Chart>]) -> Drawn<D> {
    area.fill(&WHITE)?;
    if !title.is_empty() {
        area = area.titled(title, TITLE)?;
    }
    for (row, charts) in area.split_evenly((rows.len(), 1)).iter().zip(rows) {
        for (area, chart) in row.split_evenly((1, charts.len())).iter().zip(charts) {
            let points = || chart.curves.iter().flat_map(|curve| &curve.points);
            let (left, right) = chart.x.ends(points().map(|p| p.0));
            let (low, high) = chart.y.ends(points().map(|p| p.1));
            match (chart.x.log, chart.y.log) {
                (true, true) => plot(area, chart, (left..right).log_scale(), (low..high).log_scale())?,
                (true, false) => plot(area, chart, (left..right).log_scale(), low..high)?,
                (false, true) => plot(area, chart, left..right, (low..high).log_scale())?,
                (false, false) => plot(area, chart, left..right, low..high)?,
            }
        }
    }
    area.present()
}

fn plot<D: DrawingBackend, X, Y>(area: &DrawingArea<D, Shift>, chart: &Chart, x: X, y: Y) -> Drawn<D>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut builder = ChartBuilder::on(area);
    builder.margin(10).x_label_area_size(44).y_label_area_size(68);
    if !chart.title.is_empty() {
        builder.caption(&chart.title, TITLE);
    }
    let mut drawn = builder.build_cartesian_2d(x, y)?;
    drawn
        .configure_mesh()
        .x_desc(&chart.x.label)
        .y_desc(&chart.y.label)
        .label_style(FONT)
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(&|value| short(*value))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for curve in &chart.curves {
        let style = curve.colour.stroke_width(curve.width);
        let fits = |(x, y): &&(f64, f64)| (!chart.x.log || *x > 0.0) && (!chart.y.log || *y > 0.0);
        let points: Vec<(f64, f64)> = curve.points.iter().filter(fits).copied().collect();
        if curve.dots {
            drawn
                .draw_series(points.iter().map(|&point| Circle::new(point, curve.width + 1, curve.colour.filled())))?;
        }
        let line = drawn.draw_series(LineSeries::new(points, style))?;
        if !curve.name.is_empty() {
            line.label(&curve.name).legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
        }
    }
    if chart.curves.iter().all(|curve| curve.name.is_empty()) {
        return Ok(());
    }
    let corner = if chart.legend_right { SeriesLabelPosition::UpperRight } else { SeriesLabelPosition::UpperLeft };
    drawn
        .configure_series_labels()
        .position(corner)
        .label_font(FONT)
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()
}

/// A number in few letters: `16M`, `1.5K`, `0.25`, `1e-5`.
fn short(value: f64) -> String {
    let size = value.abs();
    let (scaled, unit) = match size {
        0.0 => return "0".to_owned(),
        ..0.01 => return format!("{value:.0e}"),
        ..1e3 => (value, ""),
        ..1e6 => (value / 1e3, "K"),
        ..1e9 => (value / 1e6, "M"),
        _ => (value / 1e9, "G"),
    };
    let digits = if size < 1.0 { 2 } else { 1 };
    let text = format!("{scaled:.digits$}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(x: Axis, y: Axis, points: &[(f64, f64)]) -> Chart {
        let curves =
            vec![Curve::measured("a <name>", points.to_vec(), BLACK), Curve::line("", points.to_vec(), COLOURS[1])];
        Chart { title: "a chart".to_owned(), x, y, curves, legend_right: false }
    }

    #[test]
    fn curves_are_drawn_and_named_over_every_pair_of_axes() {
        let axes = || [Axis::linear("this"), Axis::log("that")];
        for (x, y) in axes().into_iter().flat_map(|x| axes().map(|y| (x.clone(), y))) {
            let row = vec![chart(x, y, &[(8.0, 1.0), (1024.0, 2.0), (1e6, 90.0)])];
            let svg = svg("all of it", (600, 400), &[row.clone(), [row.clone(), row].concat()]).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            for text in ["all of it", "a chart", "a &lt;name&gt;"] {
                assert!(svg.contains(text), "{text} is missing");
            }
            // A chart has two curves and a line of the legend.
            assert!(svg.matches("<polyline").count() >= 9 && svg.matches("<circle").count() == 9, "{svg}");
        }
    }

    #[test]
    fn one_point_or_none_or_zeros_are_drawn_too() {
        for points in [&[][..], &[(8.0, 1.0)], &[(0.0, 0.0), (1.0, -1.0)], &[(1.0, f64::NAN)]] {
            for axis in [Axis::linear("x"), Axis::log("x")] {
                assert!(svg("", (600, 400), &[vec![chart(axis.clone(), axis, points)]]).is_ok(), "{points:?}");
            }
        }
    }

    #[test]
    fn ends_of_an_axis() {
        let ends = |axis: Axis, values: &[f64]| axis.ends(values.iter().copied());
        assert_eq!(ends(Axis::linear("").between(-1.0, 1.0), &[5.0]), (-1.0, 1.0));
        for values in [&[][..], &[0.0], &[1.0], &[f64::NAN, 0.1], &[0.5, 1e-5]] {
            let (low, high) = ends(Axis::linear(""), values);
            assert!(low < high, "{values:?}: {low} {high}");
            let (low, high) = ends(Axis::log(""), values);
            assert!(0.0 < low && low < high, "{values:?}: {low} {high}");
        }
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, 1e-5, 0.25, 0.5, -1.0, 1.0, 12.5, 100.0, 1500.0, 65536.0, 1e6, 16e6, 2e9];
        let texts = ["0", "1e-5", "0.25", "0.5", "-1", "1", "12.5", "100", "1.5K", "65.5K", "1M", "16M", "2G"];
        assert_eq!(numbers.map(short), texts);
    }
}
