//! The picture of a training: loss and accuracy over the epochs.

use std::path::Path;

use anyhow::Result;
use course_kit::train::options::Epoch;
use line_chart::{Axis, COLOURS, Chart, Curve};
use program_kit::output::Output;

/// Writes an SVG, whole or not at all.
///
/// # Errors
/// Those of the system.
pub(crate) fn write(path: &Path, epochs: &[Epoch], ranks: usize) -> Result<()> {
    let [blue, red, ..] = COLOURS;
    let x = || Axis::linear("epoch").between(0.0, epochs.len().max(1) as f64);
    let over = |value: fn(&Epoch) -> f64| epochs.iter().map(|e| (e.number as f64, value(e))).collect();
    let chart = |title: String, y, curve| Chart { title, x: x(), y, curves: vec![curve], legend_right: false };
    let highest = epochs.iter().map(|e| e.loss).fold(f64::MIN_POSITIVE, f64::max);
    let loss = chart(
        format!("Three spirals on {ranks} ranks, the same bits on all after every epoch"),
        Axis::linear("loss").between(0.0, 1.05 * highest),
        Curve::line("", over(|e| e.loss), blue),
    );
    let accuracy = chart(
        String::new(),
        Axis::linear("accuracy, percent").between(0.0, 105.0),
        Curve::line("", over(|e| 100.0 * e.accuracy), red),
    );
    let svg = line_chart::svg("", (800, 560), &[vec![loss], vec![accuracy]])?;
    Output::create(path)?.finish(svg.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_both_curves() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.svg");
        let epoch = |number, loss, accuracy| Epoch { number, loss, accuracy, weights: 0 };
        write(&path, &[epoch(1, 1.0, 0.4), epoch(2, 0.1, 0.9), epoch(3, 0.01, 1.0)], 4).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for part in ["<svg", "</svg>", "4 ranks", "epoch", "loss", "accuracy"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else");
    }
}
