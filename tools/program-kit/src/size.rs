//! Numbers of bytes on a command line and in a table; seconds on a command line.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The units: powers of 1024.
const UNITS: [(u32, char); 3] = [(30, 'G'), (20, 'M'), (10, 'K')];

/// The bytes that `4096`, `64K`, `1M` or `2g` says.
///
/// # Errors
/// It is no whole number, or too large; the text says what was expected.
pub fn parse(text: &str) -> Result<usize, String> {
    let unit = UNITS.into_iter().find(|(_, unit)| text.ends_with([*unit, unit.to_ascii_lowercase()]));
    let (digits, shift) = unit.map_or((text, 0), |(shift, _)| (&text[..text.len() - 1], shift));
    let number = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(1 << shift));
    number.ok_or_else(|| "expected a whole number of bytes, like 8 or 64K; K, M or G may follow".to_owned())
}

/// [`parse`] with bounds, for clap's `value_parser`.
pub fn within(bounds: RangeInclusive<usize>) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    move |text| {
        let expected = || format!("expected {} to {} bytes", show(*bounds.start()), show(*bounds.end()));
        Some(parse(text)?).filter(|bytes| bounds.contains(bytes)).ok_or_else(expected)
    }
}

/// [`within`], of elements of 4 bytes.
pub fn of_f32(bounds: RangeInclusive<usize>) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    let parse = within(bounds);
    move |text| match parse(text)? {
        bytes if bytes.is_multiple_of(4) => Ok(bytes),
        bytes => Err(format!("{bytes} bytes are not a whole number of f32: expected a multiple of 4")),
    }
}

/// Seconds, with or without a fraction: more than none, at most a day.
///
/// # Errors
/// It is none of these; the text says what was expected.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds
        .filter(|d| !d.is_zero() && *d <= Duration::from_secs(86_400))
        .ok_or_else(|| "expected more than 0 and at most 86400 seconds, like 0.5".to_owned())
}

/// `8`, `32K`, `128M`: the shortest that [`parse`] reads as `bytes`.
pub fn show(bytes: usize) -> String {
    let unit = UNITS.into_iter().find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [("8", 8), ("0", 0), ("4k", 4096), ("128M", 128 << 20), ("1G", 1 << 30)] {
            assert_eq!(parse(text), Ok(bytes));
        }
        for bad in ["", "M", "-8", "1.5M", "8B", "1KK", "1 M", "1KB", "1T", "99999999999999999999", "17179869184G", "é"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bounds_are_named() {
        assert_eq!(within(4..=1 << 30)("1G"), Ok(1 << 30));
        assert_eq!(within(4..=1 << 30)("3"), Err("expected 4 to 1G bytes".to_owned()));
        assert!(within(4..=1 << 30)("2G").is_err() && within(0..=8)("x").is_err());
        assert_eq!(of_f32(0..=64)("8"), Ok(8));
        assert!(of_f32(0..=64)("6").unwrap_err().contains("multiple of 4"));
    }

    #[test]
    fn seconds_have_bounds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "soon", "0", "-1", "inf", "NaN", "86401", "1e99"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_shown_can_be_read() {
        for (bytes, text) in
            [(0, "0"), (8, "8"), (1000, "1000"), (32 << 10, "32K"), (128 << 20, "128M"), (3 << 30, "3G")]
        {
            assert_eq!(show(bytes), text);
            assert_eq!(parse(text), Ok(bytes));
        }
    }
}
