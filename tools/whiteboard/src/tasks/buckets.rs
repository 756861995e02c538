//! Gradient buckets: filled in the order in which backward finishes, reduced one after another.

use anyhow::{Result, ensure};
use clap::Args;

#[derive(Debug, Clone, PartialEq, Args)]
pub(crate) struct Buckets {
    /// Times at which the layers' gradients are finished, in ms; backward ends with the last.
    #[arg(long, value_delimiter = ',', required = true)]
    ready: Vec<f64>,
    /// Sizes of the gradients, in MB.
    #[arg(long, value_delimiter = ',', required = true)]
    mb: Vec<f64>,
    /// Largest bucket, in MB.
    #[arg(long)]
    cap: f64,
    /// Time that an all-reduce of nothing takes, in ms.
    #[arg(long)]
    start: f64,
    /// Time that each MB adds, in ms.
    #[arg(long)]
    per_mb: f64,
}

impl Buckets {
    pub(super) fn lines(&self) -> Result<Vec<String>> {
        let Buckets { ready, mb, cap, start, per_mb } = self;
        ensure!(ready.len() == mb.len(), "{} times and {} sizes", ready.len(), mb.len());
        ensure!(ready.is_sorted(), "backward finishes one layer after the other: the times must not fall");
        // Filled as long as the next layer fits; one that is larger than a bucket has its own.
        let mut buckets: Vec<(f64, f64)> = Vec::new(); // complete at, MB
        for (&at, &mb) in ready.iter().zip(mb) {
            match buckets.last_mut().filter(|(_, filled)| filled + mb <= *cap) {
                Some((complete, filled)) => (*complete, *filled) = (at, *filled + mb),
                None => buckets.push((at, mb)),
            }
        }
        let mut free = 0.0f64;
        let mut lines = Vec::new();
        for (number, (complete, mb)) in (1..).zip(buckets) {
            let begin = free.max(complete);
            free = begin + start + per_mb * mb;
            lines.push(format!("{number} {begin:.1} {free:.1}"));
        }
        let backward = ready.last().copied().unwrap_or(0.0);
        lines.push(format!("exposed {:.1}", (free - backward).max(0.0)));
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let mut buckets =
            Buckets { ready: vec![2.0, 4.0, 6.0, 8.0, 10.0], mb: vec![4.0; 5], cap: 8.0, start: 0.1, per_mb: 0.5 };
        assert_eq!(buckets.lines().unwrap(), ["1 4.0 8.1", "2 8.1 12.2", "3 12.2 14.3", "exposed 4.3"]);
        buckets.cap = 1.0;
        assert_eq!(buckets.lines().unwrap()[4..], ["5 10.4 12.5", "exposed 2.5"]);
        buckets.mb.pop();
        assert!(buckets.lines().is_err());
    }
}
