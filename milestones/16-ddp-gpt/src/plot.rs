//! The loss curve as an SVG file.

use std::path::Path;

use anyhow::{Context, Result};
use line_chart::{Axis, Chart, Curve, RGBColor};

use crate::checkpoint::Point;

/// Draws training and validation loss over steps.
pub fn loss_curve(path: &Path, title: &str, history: &[Point]) -> Result<()> {
    let points = |loss: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        history.iter().filter_map(|p| Some((p.step as f64, loss(p)?))).collect()
    };
    let chart = Chart {
        title: title.to_owned(),
        x: Axis::linear("step").between(0.0, history.last().map_or(1, |p| p.step.max(1)) as f64),
        y: Axis::linear("loss (nats per character)"),
        curves: vec![
            Curve { width: 1, ..Curve::line("training", points(|p| p.train), RGBColor(110, 160, 220)) },
            Curve::measured("validation", points(|p| p.validation), RGBColor(200, 40, 40)),
        ],
        legend_right: true,
    };
    let svg = line_chart::svg("", (800, 500), &[vec![chart]])?;
    std::fs::write(path, svg).with_context(|| format!("cannot write the plot {}", path.display()))
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
