//! Views of an array, as numpy makes them: strides, and whether the elements lie in C order without a gap.

use anyhow::{Result, ensure};

/// Greatest length of a dimension; with at most four of them a stride fits its type.
const LONGEST: i64 = 1 << 12;

/// View of the array `a`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct View {
    /// As it was written.
    text: String,
    transposed: bool,
    slices: Vec<Slice>,
}

/// `start:stop:step`, none of them negative but the step.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Slice {
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
}

impl View {
    pub(crate) fn parse(text: &str) -> Result<View, String> {
        let wrong = || format!("'{text}': expected a, a.T or slices like a[1:3,::2]");
        let view = |transposed, slices| View { text: text.to_owned(), transposed, slices };
        match text.strip_prefix('a').ok_or_else(wrong)? {
            "" => Ok(view(false, vec![])),
            ".T" => Ok(view(true, vec![])),
            rest => {
                let inner = rest.strip_prefix('[').and_then(|r| r.strip_suffix(']')).ok_or_else(wrong)?;
                Ok(view(false, inner.split(',').map(slice).collect::<Option<_>>().ok_or_else(wrong)?))
            }
        }
    }
}

fn slice(text: &str) -> Option<Slice> {
    let fields: Vec<&str> = text.split(':').collect();
    let number = |at: usize| match fields.get(at) {
        None | Some(&"") => Some(None),
        Some(text) => text.parse::<i64>().ok().filter(|n| n.abs() <= LONGEST).map(Some),
    };
    let (start, stop, step) = (number(0)?, number(1)?, number(2)?.unwrap_or(1));
    // Borders that count from the end are not needed here.
    let good = (2..=3).contains(&fields.len()) && step != 0 && start.unwrap_or(0) >= 0 && stop.unwrap_or(0) >= 0;
    good.then_some(Slice { start, stop, step })
}

pub(super) fn lines(shape: &[i64], size: i64, views: &[View]) -> Result<Vec<String>> {
    ensure!(shape.len() <= 4 && (1..=16).contains(&size), "expected at most 4 dimensions, and a size of 1 to 16");
    ensure!(shape.iter().all(|n| (1..=LONGEST).contains(n)), "expected lengths of 1 to {LONGEST}");
    views.iter().map(|view| line(shape, size, view)).collect()
}

fn line(shape: &[i64], size: i64, view: &View) -> Result<String> {
    let mut dims: Vec<(i64, i64)> = Vec::new(); // length and stride
    let mut stride = size;
    for &length in shape.iter().rev() {
        dims.insert(0, (length, stride));
        stride *= length;
    }
    ensure!(view.slices.len() <= dims.len(), "'{}' has more slices than the array has dimensions", view.text);
    if view.transposed {
        dims.reverse();
    }
    for ((length, stride), slice) in dims.iter_mut().zip(&view.slices) {
        let indices = |from: i64, to: i64, step: i64| ((to - from + step - step.signum()) / step).max(0);
        let (n, step) = (*length, slice.step);
        *length = if step > 0 {
            indices(slice.start.unwrap_or(0).min(n), slice.stop.unwrap_or(n).min(n), step)
        } else {
            indices(slice.start.unwrap_or(n - 1).min(n - 1), slice.stop.unwrap_or(-1).min(n - 1), step)
        };
        *stride *= step;
    }
    let mut expected = size;
    let mut in_order = true;
    for &(length, stride) in dims.iter().rev() {
        in_order &= length <= 1 || stride == expected;
        expected *= length;
    }
    in_order |= dims.iter().any(|&(length, _)| length == 0);
    let strides: Vec<String> = dims.iter().map(|(_, stride)| stride.to_string()).collect();
    Ok(format!("{} {} {}", view.text, strides.join(" "), if in_order { "yes" } else { "no" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compared with numpy 1.24: `a.strides`, `a.flags.c_contiguous`.
    #[test]
    fn as_numpy_has_them() {
        for expected in [
            "a 16 4 yes",
            "a.T 4 16 no",
            "a[::2] 32 4 no",
            "a[:,1:3] 16 4 no",
            "a[1:3] 16 4 yes",
            "a[:,::-1] 16 -4 no",
            "a[1:2,::-1] 16 -4 no",
            "a[2:3:5] 80 4 yes",
            "a[::-1] -16 4 no",
            "a[0:0] 16 4 yes",
            "a[:,3:9] 16 4 no",
        ] {
            let view = View::parse(expected.split(' ').next().unwrap()).unwrap();
            assert_eq!(line(&[3, 4], 4, &view).unwrap(), expected);
        }
        for text in ["b", "a[", "a[1]", "a[::0]", "a[-1:]", "a[x:]", "a[1:2:3:4]"] {
            assert!(View::parse(text).is_err(), "{text}");
        }
        assert!(line(&[3], 4, &View::parse("a[:,:]").unwrap()).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_view_is_made_or_refused(text in "a?[.T]{0,2}\\[?[-0-9:,]{0,24}\\]?") {
            if let Ok(view) = View::parse(&text) {
                let _ = lines(&[3, 4], 4, &[view]);
            }
        }
    }
}
