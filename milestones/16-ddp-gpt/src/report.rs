//! Output of a run for the person who watches it: lines, and the loss curve at the end.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use line_chart::{Axis, Chart, Curve, RGBColor};

use crate::checkpoint::Point;

/// Back to the begin of a terminal's line, which becomes empty.
const CLEAR: &str = "\r\x1b[K";
/// Columns of the line that follows each step: one more would begin a second line, which stays.
const COLUMNS: usize = 79;

/// Progress of a run: a line every `every` steps, and on a terminal one that follows each step.
#[derive(Debug)]
pub struct Report {
    steps: usize,
    every: usize,
    live: bool,
    quiet: bool,
    /// The first step that was done, and when. It warms up, so the time of the later ones counts.
    begun: Cell<Option<(usize, Instant)>>,
}

impl Report {
    /// For a run of `steps`; `every`: steps between lines that stay.
    pub fn new(steps: usize, every: usize) -> Report {
        let live = std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        Report { steps, every, live, quiet: false, begun: Cell::new(None) }
    }

    /// Prints nothing: ranks other than 0, and tests.
    pub fn quiet() -> Report {
        Report { steps: 0, every: 1, live: false, quiet: true, begun: Cell::new(None) }
    }

    /// Step number `step`, from 0, is done: its loss, its rate, and how fast it went. The line that follows each step
    /// has the time left in place of the rate.
    pub fn step(&self, step: usize, loss: &str, rate: &str, pace: &str) {
        let (done, steps) = (step + 1, self.steps);
        let now = Instant::now();
        let (first, begun) = self.begun.get().unwrap_or((done, now));
        self.begun.set(Some((first, begun)));
        if done.is_multiple_of(self.every) || done == steps || done == 1 {
            self.note(&format!("step {done:>5}/{steps}  {loss}  {rate}  {pace}"));
        } else if self.live {
            let left = left(now - begun, done - first, steps.saturating_sub(done));
            let line = format!("step {done:>5}/{steps}  {left} left  {loss}  {pace}");
            eprint!("{CLEAR}{}", line.get(..COLUMNS).unwrap_or(&line));
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

/// The time of `steps` more, if `done` took `time`: `0:07`, `12:40`, `1:02:03`.
fn left(time: Duration, done: usize, steps: usize) -> String {
    let seconds = (time.as_secs_f64() / done.max(1) as f64 * steps as f64).round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, minutes, seconds) => format!("{minutes}:{seconds:02}"),
        (hours, minutes, seconds) => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// Draws training and validation loss over steps, and lines at the steps in `changes`, at which the group changed.
pub fn loss_curve(path: &Path, title: &str, history: &[Point], changes: &[usize]) -> Result<()> {
    let points = |loss: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        history.iter().filter_map(|p| Some((p.step as f64, loss(p)?))).collect()
    };
    let losses = || history.iter().flat_map(|p| [p.train, p.validation]).flatten();
    let (low, high) = losses().fold((f64::INFINITY, 0.0), |(low, high), v| (v.min(low), v.max(high)));
    // One name for all of them.
    let mark = |(k, &step): (usize, &usize)| {
        let name = if k == 0 { "the group changed" } else { "" };
        Curve { width: 1, ..Curve::line(name, vec![(step as f64, low), (step as f64, high)], RGBColor(150, 150, 150)) }
    };
    let losses = [
        Curve { width: 1, ..Curve::line("training", points(|p| p.train), RGBColor(110, 160, 220)) },
        Curve::measured("validation", points(|p| p.validation), RGBColor(200, 40, 40)),
    ];
    let chart = Chart {
        title: title.to_owned(),
        x: Axis::linear("step").between(0.0, history.last().map_or(1, |p| p.step.max(1)) as f64),
        y: Axis::linear("loss (nats per character)"),
        curves: changes.iter().filter(|_| low.is_finite()).enumerate().map(mark).chain(losses).collect(),
        legend_right: true,
    };
    let svg = line_chart::svg("", (800, 500), &[vec![chart]])?;
    std::fs::write(path, svg).with_context(|| format!("cannot write the plot {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_the_steps_done() {
        // After 20 steps of 1000: 19 took 1.9 s, the first one is left out.
        assert_eq!(left(Duration::from_millis(1900), 19, 980), "1:38");
        assert_eq!(left(Duration::from_secs(19), 19, 4000), "1:06:40");
        assert_eq!(left(Duration::ZERO, 0, 999), "0:00");
    }

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
        loss_curve(&path, "a title", &history, &[]).unwrap();
        let calm = std::fs::read_to_string(&path).unwrap();
        assert!(!calm.contains("the group changed"), "{calm}");
        loss_curve(&path, "a title", &history, &[5, 9]).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        let lines = |svg: &str| svg.matches("polyline").count();
        assert_eq!((lines(&svg), svg.matches("the group changed").count()), (lines(&calm) + 3, 1), "with the legend's");
        for text in ["a title", "step", "nats per character", "training", "validation", "polyline"] {
            assert!(svg.contains(text), "{text} is missing");
        }
        loss_curve(&path, "no step at all", &[], &[]).unwrap();
        let e = loss_curve(Path::new("/nonexistent/loss.svg"), "t", &history, &[]).unwrap_err();
        assert!(format!("{e:#}").contains("/nonexistent/loss.svg"));
    }
}
