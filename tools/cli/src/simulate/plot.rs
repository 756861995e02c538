//! Time over size, a curve per algorithm and number of ranks; over the number of ranks where there is one size.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use line_chart::{Axis, COLOURS, Chart, Curve};

use super::Case;

/// The plot as SVG.
pub(super) fn svg(cases: &[Case]) -> Result<String> {
    let over_size = cases.iter().any(|c| c.size != cases[0].size);
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for case in cases.iter().filter(|c| !over_size || c.size > 0) {
        let name = if over_size { format!("{}, {} ranks", case.by, case.shape.ranks) } else { case.by.to_string() };
        let x = if over_size { case.size } else { case.shape.ranks };
        curves.entry(name).or_default().push((x as f64, case.report.time * 1e6));
    }
    if cases.len() < 2 || curves.is_empty() {
        bail!("a plot needs several sizes (--size 8,1K,1M) or numbers of ranks (--ranks 8,64,512)");
    }
    let (x, title) = if over_size {
        ("size (bytes)", format!("{}, simulated", cases[0].shape.collective))
    } else {
        ("ranks", format!("{} of {} bytes, simulated", cases[0].shape.collective, cases[0].size))
    };
    let curves = curves.into_iter().zip(COLOURS.iter().cycle());
    let chart = Chart {
        title,
        x: Axis::log(x),
        y: Axis::log("time (us)"),
        curves: curves.map(|((name, points), &colour)| Curve::measured(name, points, colour)).collect(),
        legend_right: false,
    };
    line_chart::svg("", (900, 520), &[vec![chart]])
}
