//! What a run tells the person who watches it: lines, a progress bar, and the loss curve at the end.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use line_chart::{Axis, Chart, Curve, RGBColor};

use crate::checkpoint::Point;

/// One finished step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Number, from 0.
    pub step: usize,
    /// Steps in the run.
    pub steps: usize,
    /// Loss of the global batch, in nats.
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Characters per second since the start, over all ranks, evaluations left out.
    pub tokens_per_second: f64,
    /// Share of the steps' time that was spent waiting for communication.
    pub communication: f64,
}

/// Receives what happens in a run.
pub trait Report {
    /// A step is done.
    fn step(&mut self, _step: &Step) {}
    /// Anything else worth a line.
    fn note(&mut self, _text: &str) {}
}

/// Says nothing: ranks other than 0, and tests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Report for Silent {}

/// A progress bar on a terminal; elsewhere a line every so many steps.
#[derive(Debug)]
pub struct Console {
    bar: Option<ProgressBar>,
    every: usize,
}

impl Console {
    /// For a run of `steps`, of which `done` are done; `every`: steps between lines where there is no terminal.
    pub fn new(steps: usize, done: usize, every: usize) -> Self {
        let bar = (std::io::stderr().is_terminal() && std::io::stdout().is_terminal()).then(|| {
            let bar = ProgressBar::new(steps as u64).with_position(done as u64);
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} eta {eta}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Console { bar, every: every.max(1) }
    }
}

impl Report for Console {
    fn step(&mut self, s: &Step) {
        let (speed, share) = (s.tokens_per_second / 1e3, 100.0 * s.communication);
        let text = format!("loss {:.4}  lr {:.2e}  {speed:.1}k tokens/s  communication {share:.1} %", s.loss, s.lr);
        let done = s.step + 1;
        match &self.bar {
            Some(bar) => {
                bar.set_position(done as u64);
                bar.set_message(text);
            }
            None if done.is_multiple_of(self.every) || done == s.steps || done == 1 => {
                println!("step {done:>5}/{}  {text}", s.steps);
            }
            None => {}
        }
    }

    fn note(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
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
