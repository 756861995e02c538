//! The timeline of one step, as numbers and as a picture of the two streams.

use std::fmt;

/// The all-reduce of one bucket. Times in µs from the step's begin, by the device's clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// Length of the bucket.
    pub bytes: usize,
    /// Its last gradient was complete.
    pub produced: f64,
    /// The exchange stream reached it.
    pub begin: f64,
    /// The averages were complete.
    pub end: f64,
}

/// One step on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// In the order in which backward completes the buckets.
    pub transfers: Vec<Transfer>,
    /// End of forward, in µs from the step's begin.
    pub forward: f64,
    /// End of backward.
    pub backward: f64,
    /// End of the step.
    pub step: f64,
}

/// Width of the picture in characters.
const WIDTH: usize = 56;

/// A line of the picture: `mark` from `begin` to `end`, at least once, on an axis of length `step`.
fn bar(mark: char, begin: f64, end: f64, step: f64) -> String {
    let at = |time: f64| ((time / step * WIDTH as f64).round().max(0.0) as usize).min(WIDTH);
    let first = at(begin).min(WIDTH - 1);
    let last = at(end).clamp(first + 1, WIDTH);
    let mut line = " ".repeat(first);
    line.extend(std::iter::repeat_n(mark, last - first));
    line.extend(std::iter::repeat_n(' ', WIDTH - last));
    line
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, mark, (begin, end): (f64, f64)| {
            writeln!(f, "{name:<26} {begin:>7.0} {end:>7.0} |{}|", bar(mark, begin, end, self.step))
        };
        writeln!(f, "{:<26} {:>7} {:>7}", "", "from", "to us")?;
        row(f, "compute  forward", '#', (0.0, self.forward))?;
        row(f, "         backward", '#', (self.forward, self.backward))?;
        for (bucket, transfer) in self.transfers.iter().enumerate() {
            let name = format!("exchange bucket {bucket:<2} {:>7}", size(transfer.bytes));
            row(f, &name, '=', (transfer.begin, transfer.end))?;
        }
        // The optimiser waits at least for the first bucket.
        let update = self.transfers.first().map_or(0.0, |first| first.end).max(self.backward);
        row(f, "compute  optimiser", '#', (update, self.step))
    }
}

/// `bytes` in human-readable form.
pub fn size(bytes: usize) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_lie_where_their_times_are() {
        assert_eq!(bar('#', 0.0, 100.0, 100.0), "#".repeat(WIDTH));
        assert_eq!(bar('#', 50.0, 100.0, 100.0).find('#'), Some(WIDTH / 2));
        assert_eq!(bar('=', 0.0, 0.0, 100.0).matches('=').count(), 1, "however short, it shows");
        for (begin, end) in [(99.9, 100.0), (100.0, 101.0), (-1.0, 3.0)] {
            let line = bar('=', begin, end, 100.0);
            assert_eq!(line.chars().count(), WIDTH);
            assert!(line.contains('='), "{begin} {end}");
        }
    }

    #[test]
    fn a_row_for_each_bucket() {
        let transfer = Transfer { bytes: 33_554_432, produced: 60.0, begin: 61.0, end: 70.0 };
        let timeline = Timeline { transfers: vec![transfer; 3], forward: 40.0, backward: 90.0, step: 100.0 };
        let text = timeline.to_string();
        assert_eq!(text.lines().filter(|line| line.contains('=')).count(), 3, "{text}");
        assert!(text.contains("bucket 2  33.6 MB      61      70 |"), "{text}");
    }

    #[test]
    fn sizes() {
        assert_eq!([768, 17_420, 33_554_432].map(size), ["768 B", "17.4 kB", "33.6 MB"]);
    }
}
