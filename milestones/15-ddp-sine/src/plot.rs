//! The picture: target and prediction on top, the loss below, on a logarithmic scale.

use std::path::Path;

use anyhow::Result;
use line_chart::{Axis, Chart, Curve, RGBColor};
use program_kit::output::Output;

use crate::fit::{Fit, target};

const GREY: RGBColor = RGBColor(170, 170, 170);
const BLUE: RGBColor = RGBColor(20, 90, 200);

/// Writes an SVG, whole or not at all.
pub(crate) fn write(path: &Path, fit: &Fit, ranks: usize) -> Result<()> {
    let svg = draw(fit, ranks)?;
    Output::create(path)?.finish(svg.as_bytes())
}

fn draw(fit: &Fit, ranks: usize) -> Result<String> {
    let targets = fit.curve.iter().map(|&(x, _)| (x, target(x))).collect();
    let sine = Chart {
        title: format!("sin(2πx) fitted by {ranks} ranks, mean squared error {:.1e}", fit.error),
        x: Axis::linear("x").between(-1.0, 1.0),
        y: Axis::linear("").between(-1.3, 1.3),
        curves: vec![
            Curve { width: 6, ..Curve::line("target", targets, GREY) },
            Curve::line("prediction", fit.curve.clone(), BLUE),
        ],
        legend_right: false,
    };
    let losses = fit.losses.iter().enumerate().map(|(i, &loss)| ((i + 1) as f64, loss)).collect();
    let loss = Chart {
        title: String::new(),
        x: Axis::linear("epoch").between(0.0, fit.losses.len().max(1) as f64),
        y: Axis::log("training loss"),
        curves: vec![Curve::line("", losses, BLUE)],
        legend_right: false,
    };
    line_chart::svg("", (800, 720), &[vec![sine], vec![loss]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Fit {
        Fit {
            losses: vec![0.5, 0.01, 0.0],
            curve: vec![(-1.0, 0.0), (0.0, 0.1), (1.0, 0.0)],
            error: 1e-4,
            weights: 0,
            parameters: 1,
        }
    }

    #[test]
    fn a_plot_is_written_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fit.svg");
        write(&path, &sample(), 2).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for part in ["<svg", "</svg>", "target", "prediction", "epoch", "2 ranks"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
