//! The output of the benchmarks: comma-separated lines of the same format.

use anyhow::{Context as _, Result, bail};

/// The heading that every benchmark prints before its rows.
pub(crate) const HEADING: &str = "op,dtype,place,bytes,us,us_min,us_max,calls,repetitions,clean,wrong";

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) op: String,
    pub(crate) dtype: String,
    pub(crate) bytes: usize,
    /// Microseconds per call.
    pub(crate) us: f64,
    /// Repetitions in which every rank had its core to itself, of how many.
    pub(crate) clean: u32,
    pub(crate) repetitions: u32,
    /// Number of wrong elements.
    pub(crate) wrong: u64,
    /// The line as it was printed.
    pub(crate) line: String,
}

/// The output of a program.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Output {
    pub(crate) rows: Vec<Row>,
    /// Its remarks: lines that begin with `#` and say something.
    pub(crate) remarks: Vec<String>,
    /// The first line after the rows that is none: a launcher saying that its program died.
    pub(crate) broken: Option<String>,
}

/// Understands a program's output. The last line may be cut off when the program was ended.
pub(crate) fn parse(text: &str) -> Result<Output> {
    let mut output = Output::default();
    let mut heading = false;
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in complete.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(remark) = line.strip_prefix('#') {
            output.remarks.extend(Some(remark.trim().to_owned()).filter(|r| !r.is_empty()));
        } else if line == HEADING {
            heading = true;
        } else if heading {
            match row(line) {
                Ok(row) => output.rows.push(row),
                Err(error) => {
                    output.broken = Some(format!("{line}: {error:#}"));
                    break;
                }
            }
        } else {
            bail!("expected the heading {HEADING}, got: {line}");
        }
    }
    Ok(output)
}

/// One line after the heading.
pub(crate) fn row(line: &str) -> Result<Row> {
    let fields: Vec<&str> = line.split(',').collect();
    let &[op, dtype, _place, bytes, us, _min, _max, _calls, repetitions, clean, wrong] = fields.as_slice() else {
        bail!("expected 11 fields, got {}", fields.len());
    };
    let us: f64 = us.parse().context("us")?;
    if !us.is_finite() || us <= 0.0 {
        bail!("expected a time above 0");
    }
    Ok(Row {
        op: op.to_owned(),
        dtype: dtype.to_owned(),
        bytes: bytes.parse().context("bytes")?,
        us,
        clean: clean.parse().context("clean")?,
        repetitions: repetitions.parse().context("repetitions")?,
        wrong: wrong.parse().context("wrong (values that were not checked do not count)")?,
        line: line.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_remarks() {
        let text =
            format!("# Open MPI v4, 2 ranks\n#\n{HEADING}\nall_reduce,f32,out,8,0.25,0.2,0.3,900,7,6,0\n# too slow\n");
        let output = parse(&text).unwrap();
        assert_eq!(output.remarks, ["Open MPI v4, 2 ranks", "too slow"]);
        let [row] = &output.rows[..] else { panic!("{output:?}") };
        assert_eq!((row.op.as_str(), row.dtype.as_str(), row.bytes, row.us), ("all_reduce", "f32", 8, 0.25));
        assert_eq!((row.repetitions, row.clean, row.wrong), (7, 6, 0));
    }

    #[test]
    fn a_line_that_was_cut_off_is_left_out() {
        let text = format!("{HEADING}\nbarrier,f32,out,0,1,1,1,1,1,1,0\nreduce,f32,out,8,0.2");
        assert_eq!(parse(&text).unwrap().rows.len(), 1);
        assert_eq!(parse("").unwrap(), Output::default());
    }

    #[test]
    fn what_is_no_row_ends_the_rows_and_is_kept() {
        for bad in [
            "reduce,f32,out,8,0.2",
            "reduce,f32,out,8,0,1,1,1,1,1,0",
            "reduce,f32,out,8,1,1,1,1,1,1,",
            "Segmentation fault",
        ] {
            let good = "barrier,f32,out,0,1,1,1,1,1,1,0";
            let output = parse(&format!("{HEADING}\n{good}\n{bad}\n{good}\n")).unwrap();
            assert_eq!(output.rows.len(), 1);
            assert!(output.broken.unwrap().starts_with(bad));
        }
        assert!(parse("mpirun: not found\n").is_err());
    }
}
