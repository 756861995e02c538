//! Time and bus bandwidth over the size, as one SVG.

use std::collections::BTreeMap;

use anyhow::Result;
use line_chart::{Axis, COLOURS, Chart, Curve};

use crate::record::Row;

/// One measured size: bytes, microseconds, GB/s.
type Point = (f64, f64, f64);

/// Draws all rows, with one curve per collective, type, operator, root and place.
pub(crate) fn svg(rows: &[Row], title: &str) -> Result<String> {
    let curves = curves(rows);
    let fastest = curves.values().flatten().map(|p| p.2).fold(0.0, f64::max).max(1e-3);
    let chart = |y: Axis, pick: fn(&Point) -> (f64, f64)| Chart {
        title: String::new(),
        x: Axis::log("size (bytes)"),
        y,
        curves: curves
            .iter()
            .zip(COLOURS.iter().cycle())
            .map(|((name, points), &colour)| Curve::measured(name, points.iter().map(pick).collect(), colour))
            .collect(),
        legend_right: false,
    };
    let times = chart(Axis::log("time (us)"), |p| (p.0, p.1));
    let rates = chart(Axis::linear("bus bandwidth (GB/s)").between(0.0, fastest * 1.08), |p| (p.0, p.2));
    line_chart::svg(title, (1200, 520), &[vec![times, rates]])
}

fn curves(rows: &[Row]) -> BTreeMap<String, Vec<Point>> {
    let mut curves: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        for (place, measured) in [("", row.out_of_place), (", in place", row.in_place)] {
            let Some(m) = measured.filter(|m| m.timing.median > 0.0) else { continue };
            let op = row.op.map_or(String::new(), |op| format!(" {op}"));
            let root = row.root.map_or(String::new(), |root| format!(" root {root}"));
            let name = format!("{} {}{op}{root}{place}", row.collective, row.dtype);
            curves.entry(name).or_default().push((row.bytes as f64, m.timing.median * 1e6, m.busbw));
        }
    }
    curves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Measured;
    use crate::stats::Timing;

    fn row(bytes: usize, us: f64) -> Row {
        let timing = Timing { median: us / 1e6, min: 0.0, max: 0.0, iterations: 1, repetitions: 1, clean: 1 };
        let measured = Measured { timing, algbw: 1.0, busbw: 1.0, wrong: Some(0) };
        Row {
            collective: "all_reduce",
            dtype: "f32",
            op: Some("sum"),
            root: None,
            bytes,
            count: bytes / 4,
            algorithm: None,
            out_of_place: Some(measured),
            in_place: None,
        }
    }

    #[test]
    fn a_curve_per_place_and_points_per_size() {
        let rows = [row(8, 1.0), row(1024, 2.0), row(1 << 20, 90.0)];
        let curves = curves(&rows);
        assert_eq!(curves.len(), 1);
        assert_eq!(curves["all_reduce f32 sum"].len(), 3);
        let svg = svg(&rows, "a <title>").unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.matches("<polyline").count() >= 2, "a curve in each half");
        assert!(svg.contains("a &lt;title&gt;") && svg.contains("all_reduce f32 sum"));
    }

    #[test]
    fn one_point_or_none_is_drawn_too() {
        assert!(svg(&[row(8, 1.0)], "one").is_ok());
        assert!(svg(&[row(0, 1.0)], "barrier").is_ok());
        assert!(svg(&[], "none").is_ok());
    }
}
