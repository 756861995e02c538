//! The loss curve as an SVG file.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

use crate::checkpoint::Point;

/// Draws training and validation loss over steps.
pub fn loss_curve(path: &Path, title: &str, history: &[Point]) -> Result<()> {
    draw(path, title, history)
        .map_err(|e| anyhow!("{e}"))
        .with_context(|| format!("cannot write the plot {}", path.display()))
}

fn draw(path: &Path, title: &str, history: &[Point]) -> Result<(), Box<dyn std::error::Error>> {
    let train: Vec<(f64, f64)> = history.iter().filter_map(|p| Some((p.step as f64, p.train?))).collect();
    let validation: Vec<(f64, f64)> = history.iter().filter_map(|p| Some((p.step as f64, p.validation?))).collect();
    let losses = || train.iter().chain(&validation).map(|p| p.1);
    let low = losses().fold(f64::INFINITY, f64::min);
    let high = losses().fold(f64::NEG_INFINITY, f64::max);
    let (low, high) = if low.is_finite() { (low, high.max(low + 0.1)) } else { (0.0, 1.0) };
    let margin = 0.05 * (high - low);
    let last = history.last().map_or(1, |p| p.step.max(1)) as f64;

    let root = SVGBackend::new(path, (800, 500)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last, low - margin..high + margin)?;
    chart.configure_mesh().x_desc("step").y_desc("loss (nats per character)").light_line_style(WHITE).draw()?;
    let (blue, red) = (RGBColor(110, 160, 220), RGBColor(200, 40, 40));
    chart
        .draw_series(LineSeries::new(train, blue))?
        .label("training")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], blue));
    chart
        .draw_series(LineSeries::new(validation, red.stroke_width(2)).point_size(3))?
        .label("validation")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], red.stroke_width(2)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_both_curves_and_labels_the_axes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        let history: Vec<Point> = (0..20)
            .map(|step| Point {
                step,
                train: Some(4.0 / (step + 1) as f64),
                validation: (step % 5 == 0).then_some(3.0),
            })
            .collect();
        loss_curve(&path, "a title", &history).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for text in ["a title", "step", "nats per character", "training", "validation", "polyline"] {
            assert!(svg.contains(text), "{text} is missing");
        }
        loss_curve(&path, "no step at all", &[]).unwrap();
        let e = loss_curve(Path::new("/nonexistent/loss.svg"), "t", &history).unwrap_err();
        assert!(format!("{e:#}").contains("/nonexistent/loss.svg"));
    }
}
