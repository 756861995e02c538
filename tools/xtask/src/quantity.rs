//! Numbers with units in a line of text, and how far one is from another.

/// Kind of a number. Two numbers are compared only if they have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Seconds.
    Time,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    Rate,
    /// Hundredths.
    Percent,
    /// No unit, or one that is not known here.
    Plain,
}

/// A number, or a range of numbers such as `4.1 to 4.4 µs`.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantity {
    /// The lower end, in the kind's own unit.
    pub low: f64,
    /// The upper end; the same for one number.
    pub high: f64,
    /// Kind of the number.
    pub kind: Kind,
    /// Size of the written unit, in the kind's own unit.
    unit: f64,
    /// As it was written.
    pub text: String,
}

/// Longer names first, so that `ms` is not read as `m`.
const UNITS: [(&str, Kind, f64); 33] = [
    ("GiB/s", Kind::Rate, (1 << 30) as f64),
    ("MiB/s", Kind::Rate, (1 << 20) as f64),
    ("GB/s", Kind::Rate, 1e9),
    ("MB/s", Kind::Rate, 1e6),
    ("KiB", Kind::Bytes, 1024.0),
    ("MiB", Kind::Bytes, (1 << 20) as f64),
    ("GiB", Kind::Bytes, (1 << 30) as f64),
    ("kB", Kind::Bytes, 1e3),
    ("KB", Kind::Bytes, 1e3),
    ("MB", Kind::Bytes, 1e6),
    ("GB", Kind::Bytes, 1e9),
    ("bytes", Kind::Bytes, 1.0),
    ("byte", Kind::Bytes, 1.0),
    ("minutes", Kind::Time, 60.0),
    ("minute", Kind::Time, 60.0),
    ("min", Kind::Time, 60.0),
    ("milliseconds", Kind::Time, 1e-3),
    ("microseconds", Kind::Time, 1e-6),
    ("seconds", Kind::Time, 1.0),
    ("second", Kind::Time, 1.0),
    ("sec", Kind::Time, 1.0),
    ("ns", Kind::Time, 1e-9),
    ("us", Kind::Time, 1e-6),
    ("µs", Kind::Time, 1e-6),
    ("μs", Kind::Time, 1e-6),
    ("ms", Kind::Time, 1e-3),
    ("s", Kind::Time, 1.0),
    ("%", Kind::Percent, 1.0),
    ("percent", Kind::Percent, 1.0),
    // As the programs' options have them.
    ("B", Kind::Bytes, 1.0),
    ("K", Kind::Bytes, 1024.0),
    ("M", Kind::Bytes, (1 << 20) as f64),
    ("G", Kind::Bytes, (1 << 30) as f64),
];

/// All numbers of a text, in order. `p99`, `f32` and `2n` are none.
pub fn parse(text: &str) -> Vec<Quantity> {
    let mut found: Vec<Quantity> = Vec::new();
    // Where the last one begins and ends.
    let mut last_at = 0..0;
    let mut at = 0;
    while let Some(offset) = text[at..].find(|c: char| c.is_ascii_digit()) {
        let start = at + offset;
        let in_a_word = text[..start].chars().next_back().is_some_and(|c| c.is_alphanumeric() || "_.".contains(c));
        let Some((value, length)) = number(&text[start..]).filter(|_| !in_a_word) else {
            at = start + text[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len() - start);
            continue;
        };
        at = start + length;
        let Some((kind, unit, length)) = unit(&text[at..]) else { continue };
        at += length;
        let value = value * unit;
        let between = text[last_at.end..start].trim();
        match found.last_mut() {
            // `A to B ms`: the first has the same unit, or none.
            Some(last) if ["to", "-", "–"].contains(&between) && [Kind::Plain, kind].contains(&last.kind) => {
                let low = if last.kind == kind { last.low } else { last.low * unit };
                last_at.end = at;
                *last = Quantity { low, high: value, kind, unit, text: text[last_at.clone()].to_owned() };
            }
            _ => {
                last_at = start..at;
                found.push(Quantity { low: value, high: value, kind, unit, text: text[start..at].to_owned() });
            }
        }
    }
    found
}

/// A number at the start of the text, and its length: `1,048,576`, `0.5`.
fn number(text: &str) -> Option<(f64, usize)> {
    let digits = |t: &str| t.bytes().take_while(u8::is_ascii_digit).count();
    let mut length = digits(text);
    while text[length..].starts_with(',') && digits(&text[length + 1..]) == 3 {
        length += 4;
    }
    if text[length..].starts_with('.') && digits(&text[length + 1..]) > 0 {
        length += 1 + digits(&text[length + 1..]);
    }
    text[..length].replace(',', "").parse().ok().map(|value| (value, length))
}

/// The unit behind a number, and the bytes up to its end. Nothing where the number runs into a word, as in `2n`.
fn unit(text: &str) -> Option<(Kind, f64, usize)> {
    let trimmed = text.trim_start_matches(' ');
    let whole = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '/');
    for (name, kind, factor) in UNITS {
        if trimmed.strip_prefix(name).is_some_and(whole) {
            return Some((kind, factor, text.len() - trimmed.len() + name.len()));
        }
    }
    let multiple = text.starts_with(['x', '×']) && whole(&text[text.chars().next().map_or(0, char::len_utf8)..]);
    (multiple || !text.starts_with(char::is_alphanumeric)).then_some((Kind::Plain, 1.0, 0))
}

/// The distance between a prediction and what is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Distance {
    /// Within the range, or within 5 %.
    Right,
    /// Too large by this factor.
    Above(f64),
    /// Too small by this factor.
    Below(f64),
}

impl Quantity {
    /// Returns the distance of `guess` from this.
    fn distance(&self, guess: f64) -> Distance {
        if guess >= self.low / 1.05 && guess <= self.high * 1.05 {
            Distance::Right
        } else if guess > self.high {
            Distance::Above(guess / self.high)
        } else {
            Distance::Below(self.low / guess)
        }
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (factor, direction) = match *self {
            Distance::Right => return f.write_str("right"),
            Distance::Above(factor) => (factor, "large"),
            Distance::Below(factor) => (factor, "small"),
        };
        match factor {
            x if x.is_infinite() => write!(f, "too {direction}, and no factor leads from or to 0"),
            x if x < 10.0 => write!(f, "too {direction} by a factor of {x:.1}"),
            x => write!(f, "too {direction} by a factor of {x:.0}"),
        }
    }
}

/// Lays the numbers of a prediction beside those that are right: for each of these the next of the prediction's that
/// counts the same. One without a unit is taken in the right one's.
pub fn compare(prediction: &str, right: &[Quantity]) -> Vec<(Quantity, Option<(String, Distance)>)> {
    let mut left = parse(prediction);
    let lay = |right: &Quantity| {
        let fits = |q: &Quantity| q.kind == right.kind || q.kind == Kind::Plain;
        let said = left.iter().position(fits).map(|at| {
            let q = left.remove(at);
            let scale = if q.kind == right.kind { 1.0 } else { right.unit };
            (q.text, right.distance((q.low + q.high) / 2.0 * scale))
        });
        (right.clone(), said)
    };
    right.iter().map(lay).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(text: &str) -> Vec<(f64, f64, Kind)> {
        parse(text).iter().map(|q| (q.low, q.high, q.kind)).collect()
    }

    #[test]
    fn numbers_units_and_ranges() {
        assert_eq!(seen("About 44 ms"), [(0.044, 0.044, Kind::Time)]);
        assert_eq!(
            seen("1,048,576 and 1,835,008 (7/4)")[..2],
            [(1048576.0, 1048576.0, Kind::Plain), (1835008.0, 1835008.0, Kind::Plain)]
        );
        assert_eq!(
            seen("1 MiB, 3.2 MB, 4K"),
            [(1048576.0, 1048576.0, Kind::Bytes), (3.2e6, 3.2e6, Kind::Bytes), (4096.0, 4096.0, Kind::Bytes)]
        );
        assert_eq!(seen("4.1 to 4.4 µs"), [(4.1 * 1e-6, 4.4 * 1e-6, Kind::Time)]);
        assert_eq!(seen("0.7-1.1"), [(0.7, 1.1, Kind::Plain)]);
        assert_eq!(seen("15 and 1."), [(15.0, 15.0, Kind::Plain), (1.0, 1.0, Kind::Plain)]);
        assert_eq!(
            seen("10x, 97 %, 330 GB/s"),
            [(10.0, 10.0, Kind::Plain), (97.0, 97.0, Kind::Percent), (330e9, 330e9, Kind::Rate)]
        );
        assert_eq!(seen("p99 of f32 on H200s, 2n + v1.2"), []);
        assert_eq!(seen("5 to 6 ms, 7 to 8"), [(0.005, 0.006, Kind::Time), (7.0, 8.0, Kind::Plain)]);
    }

    #[test]
    fn distances() {
        let said = |prediction: &str, right: &str| -> Vec<String> {
            let all = compare(prediction, &parse(right));
            all.into_iter().map(|(_, d)| d.map_or("nothing".to_owned(), |(_, d)| d.to_string())).collect()
        };
        assert_eq!(said("5 ms", "44 ms"), ["too small by a factor of 8.8"]);
        assert_eq!(said("about 2 s", "44 ms"), ["too large by a factor of 45"]);
        assert_eq!(said("44", "44 ms"), ["right"], "in the right one's unit");
        assert_eq!(said("1 MiB", "1,048,576 bytes"), ["right"]);
        assert_eq!(said("8 bytes take 20 us", "18 µs"), ["too large by a factor of 1.1"], "the bytes are no time");
        assert_eq!(said("4.2 us", "4.1 to 4.4 µs"), ["right"]);
        assert_eq!(said("no idea", "6"), ["nothing"]);
        assert_eq!(said("15", "15 and 1"), ["right", "nothing"]);
        assert_eq!(said("0", "6"), ["too small, and no factor leads from or to 0"]);
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_read(text in "[0-9a-zµ×%.,/–\\- ]{0,40}", other in proptest::prelude::any::<String>()) {
            for text in [&text, &other] {
                for q in parse(text) {
                    assert!(text.contains(&q.text) && q.low.is_finite() && q.high.is_finite(), "{q:?}");
                }
                compare(text, &parse(&other));
            }
        }

        #[test]
        fn what_was_written_is_read(value in 0.001..1e9f64, unit in 0..UNITS.len()) {
            let (name, kind, factor) = UNITS[unit];
            let text = format!("about {value} {name}, or so");
            let read = parse(&text);
            assert_eq!((read.len(), read[0].kind), (1, kind), "{text}");
            assert!((read[0].low / (value * factor) - 1.0).abs() < 1e-9, "{text}");
        }
    }
}
