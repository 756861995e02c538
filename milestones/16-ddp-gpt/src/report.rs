//! What a run tells the person who watches it: lines, and the loss curve at the end.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result};
use line_chart::{Axis, Chart, Curve, RGBColor};

use crate::checkpoint::Point;

/// Back to the begin of a terminal's line, which becomes empty.
const CLEAR: &str = "\r\x1b[K";

/// Tells what happens: a line every so many steps, and on a terminal one that follows each step.
#[derive(Debug)]
pub struct Report {
    steps: usize,
    every: usize,
    live: bool,
    quiet: bool,
}

impl Report {
    /// For a run of `steps`; `every`: steps between lines that stay.
    pub fn new(steps: usize, every: usize) -> Report {
        let live = std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        Report { steps, every, live, quiet: false }
    }

    /// Says nothing: ranks other than 0, and tests.
    pub fn quiet() -> Report {
        Report { steps: 0, every: 1, live: false, quiet: true }
    }

    /// Step number `step`, from 0, is done; `text` says how it went.
    pub fn step(&self, step: usize, text: &str) {
        let (done, steps) = (step + 1, self.steps);
        let line = format!("step {done:>5}/{steps}  {text}");
        if done.is_multiple_of(self.every) || done == steps || done == 1 {
            self.note(&line);
        } else if self.live {
            eprint!("{CLEAR}{line}");
        }
    }

    /// Anything else worth a line.
    pub fn note(&self, text: &str) {
        if self.live {
            eprint!("{CLEAR}");
        }
        if !self.quiet {
            println!("{text}");
        }
    }
}

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
