//! Time over size, a curve per algorithm and number of ranks; over the number of ranks where there is one size.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail};
use plotters::coord::combinators::LogCoord;
use plotters::prelude::*;

use super::Case;

const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(23, 190, 207),
    RGBColor(140, 86, 75),
    RGBColor(90, 90, 90),
];

/// The plot as SVG.
pub(super) fn svg(cases: &[Case]) -> Result<String> {
    let over_size = cases.iter().any(|c| c.size != cases[0].size);
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for case in cases.iter().filter(|c| !over_size || c.size > 0) {
        let name = if over_size {
            format!("{}, {} ranks", case.algorithm, case.shape.ranks)
        } else {
            case.algorithm.to_string()
        };
        let x = if over_size { case.size } else { case.shape.ranks };
        curves.entry(name).or_default().push((x as f64, case.report.time * 1e6));
    }
    if cases.len() < 2 || curves.is_empty() {
        bail!("a plot needs several sizes (--size 8,1K,1M) or numbers of ranks (--ranks 8,64,512)");
    }
    let mut text = String::new();
    draw(&mut text, cases, &curves, over_size).map_err(|e| anyhow!("cannot draw the plot: {e}"))?;
    Ok(text)
}

fn draw(
    text: &mut String,
    cases: &[Case],
    curves: &BTreeMap<String, Vec<(f64, f64)>>,
    over_size: bool,
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let area = SVGBackend::with_string(text, (900, 520)).into_drawing_area();
    area.fill(&WHITE)?;
    let range = |of: fn(&(f64, f64)) -> f64| -> LogCoord<f64> {
        let values = curves.values().flatten().map(of);
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
        (low / 1.2..(high * 1.2).max(low * 2.0)).log_scale().into()
    };
    let (x, title) = if over_size {
        ("size (bytes)", format!("{}, simulated", cases[0].shape.collective))
    } else {
        ("ranks", format!("{} of {} bytes, simulated", cases[0].shape.collective, cases[0].size))
    };
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 22))
        .margin(10)
        .x_label_area_size(56)
        .y_label_area_size(84)
        .build_cartesian_2d(range(|p| p.0), range(|p| p.1))?;
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc("time (us)")
        .axis_desc_style(("sans-serif", 17))
        .label_style(("sans-serif", 16))
        .x_label_formatter(&|v| short(*v))
        .y_label_formatter(&|v| short(*v))
        .light_line_style(WHITE)
        .draw()?;
    for (at, (name, points)) in curves.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        chart.draw_series(points.iter().map(|&p| Circle::new(p, 3, colour.filled())))?;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 16))
        .background_style(WHITE.mix(0.8))
        .draw()?;
    area.present()
}

/// A number in few letters; powers of 1024 as they are called.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.0}G", v / 1e9),
        v if v >= 1e6 => format!("{:.0}M", v / 1e6),
        v if v >= 1e3 => format!("{:.0}K", v / 1e3),
        v if v >= 10.0 || v == 1.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}
