//! The picture: target and prediction on top, the loss below, on a logarithmic scale.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use plotters::prelude::*;

use crate::fit::{Fit, target};

/// Font of everything but the caption.
const LABELS: (&str, u32) = ("sans-serif", 15);

/// Refuses a plot that could not be written, before any time is spent on it.
pub(crate) fn check(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "--plot {}: there is no folder {}", path.display(), folder.display());
    ensure!(!path.is_dir(), "--plot {}: this is a folder, expected a file", path.display());
    Ok(())
}

/// Writes an SVG. It appears whole or not at all: drawn in memory, written beside the target, renamed.
pub(crate) fn write(path: &Path, fit: &Fit, ranks: usize) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, fit, ranks).map_err(|e| anyhow!("drawing the plot: {e}"))?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.tmp", std::process::id()));
    std::fs::write(&beside, svg)
        .and_then(|()| std::fs::rename(&beside, path))
        .map_err(|e| anyhow!("writing the plot {}: {e}", path.display()))
        .inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

fn draw(svg: &mut String, fit: &Fit, ranks: usize) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (800, 720)).into_drawing_area();
    root.fill(&WHITE)?;
    let (top, bottom) = root.split_vertically(420);

    let mut chart = ChartBuilder::on(&top)
        .caption(format!("sin(2πx) fitted by {ranks} ranks, mean squared error {:.1e}", fit.error), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(48)
        .build_cartesian_2d(-1.0..1.0, -1.3..1.3)?;
    chart.configure_mesh().light_line_style(TRANSPARENT).label_style(LABELS).x_desc("x").draw()?;
    let line = |color: RGBColor, width| ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: width };
    let (grey, blue) = (RGBColor(170, 170, 170), RGBColor(20, 90, 200));
    chart
        .draw_series(LineSeries::new(fit.curve.iter().map(|&(x, _)| (x, target(x))), line(grey, 6)))?
        .label("target")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], line(grey, 6)));
    chart
        .draw_series(LineSeries::new(fit.curve.iter().copied(), line(blue, 2)))?
        .label("prediction")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], line(blue, 2)));
    chart.configure_series_labels().label_font(LABELS).background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;

    let (low, high) = range(&fit.losses);
    let mut chart = ChartBuilder::on(&bottom)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(0f64..fit.losses.len().max(1) as f64, (low..high).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(LABELS)
        .x_desc("epoch")
        .y_desc("training loss")
        .x_label_formatter(&|epoch| format!("{epoch:.0}"))
        .y_label_formatter(&|v| format!("{v:.0e}"))
        .draw()?;
    let points = fit.losses.iter().enumerate().map(|(i, &loss)| ((i + 1) as f64, loss.max(low)));
    chart.draw_series(LineSeries::new(points, line(blue, 2)))?;
    root.present()?;
    Ok(())
}

/// Powers of ten around the values; never empty.
fn range(losses: &[f64]) -> (f64, f64) {
    let positive = || losses.iter().copied().filter(|l| l.is_finite() && *l > 0.0);
    let low = positive().fold(f64::INFINITY, f64::min);
    let high = positive().fold(0.0, f64::max);
    if high == 0.0 {
        return (0.1, 1.0);
    }
    let power = |v: f64| 10f64.powf(v);
    (power(low.log10().floor()), power((high.log10() + 1e-9).ceil()))
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

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let path = Path::new("/nowhere/fit.svg");
        let e = write(path, &sample(), 2).unwrap_err().to_string();
        assert!(e.contains("/nowhere/fit.svg") && e.contains("No such file"), "{e}");
        assert!(check(path).unwrap_err().to_string().contains("no folder /nowhere"));
        assert!(check(Path::new("/")).is_err() && check(Path::new("fit.svg")).is_ok());
    }

    #[test]
    fn ranges_are_never_empty() {
        for losses in [&[][..], &[0.0], &[1.0], &[f64::NAN, 0.1], &[0.5, 1e-5]] {
            let (low, high) = range(losses);
            assert!(0.0 < low && low < high, "{losses:?}: {low} {high}");
        }
    }
}
