//! Rows as comma-separated values, for other programs. The peers' benchmarks (`scripts/peers`) print the same columns.

use crate::record::Row;
use crate::row::Measured;

/// Names of the columns; times are microseconds per call.
pub(crate) fn heading() -> String {
    "op,dtype,place,bytes,us,us_min,us_max,calls,repetitions,clean,wrong".to_owned()
}

/// One line per measured place. Without a check the last column is empty.
pub(crate) fn rows(row: &Row) -> impl Iterator<Item = String> {
    let line = |(place, m): (&str, Measured)| {
        let t = m.timing;
        format!(
            "{},{},{place},{},{:.4},{:.4},{:.4},{},{},{},{}",
            row.collective,
            row.dtype,
            row.bytes,
            t.median * 1e6,
            t.min * 1e6,
            t.max * 1e6,
            t.iterations,
            t.repetitions,
            t.clean,
            m.wrong.map_or(String::new(), |n| n.to_string()),
        )
    };
    [("out", row.out_of_place), ("in", row.in_place)].into_iter().filter_map(move |(place, m)| Some(line((place, m?))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Timing;

    #[test]
    fn a_line_has_a_value_for_each_column() {
        let timing = Timing { median: 1.5e-6, min: 1e-6, max: 2e-6, iterations: 9, repetitions: 8, clean: 7 };
        let row = Row {
            collective: "broadcast",
            dtype: "f32",
            op: None,
            root: Some(0),
            bytes: 64,
            count: 16,
            algorithm: None,
            out_of_place: None,
            in_place: Some(Measured { timing, algbw: 1.0, busbw: 1.0, wrong: Some(0) }),
        };
        let lines: Vec<String> = rows(&row).collect();
        assert_eq!(lines, ["broadcast,f32,in,64,1.5000,1.0000,2.0000,9,8,7,0"]);
        assert_eq!(heading().split(',').count(), lines[0].split(',').count());
    }
}
