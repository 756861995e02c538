//! The lines of a trace, one by one.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde::de::{Deserializer as _, SeqAccess, Visitor};

/// An event of Chrome's format, as far as `TINYNCCL_TRACE` writes it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Event {
    pub(crate) ph: String,
    pub(crate) pid: u64,
    pub(crate) tid: u64,
    ts: f64,
    dur: f64,
    pub(crate) cat: String,
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) args: Args,
}

/// The arguments that a page shows, or needs to.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Args {
    /// Name of a process or a thread.
    pub(crate) name: Option<String>,
    pub(crate) sort_index: Option<u64>,
    pub(crate) comm: Option<u64>,
    pub(crate) seq: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) from: Option<u64>,
    pub(crate) to: Option<u64>,
    pub(crate) algorithm: Option<String>,
    pub(crate) by: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) dropped: Option<u64>,
    pub(crate) clock_uncertainty_ns: Option<u64>,
}

impl Event {
    /// Nanoseconds of the trace's clock. A digit behind the nanoseconds keeps them whole.
    pub(crate) fn begin(&self) -> i64 {
        (self.ts * 1e3).floor() as i64
    }

    pub(crate) fn end(&self) -> i64 {
        self.begin() + (self.dur * 1e3).floor() as i64
    }

    pub(crate) fn is_slice(&self) -> bool {
        self.ph == "X"
    }
}

/// Gives every event of the file to `take`, in the file's order. False where the file ends in the middle: the rank that
/// wrote last was killed.
pub(crate) fn each(path: &Path, mut take: impl FnMut(Event)) -> Result<bool> {
    let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 20, file));
    let mut count = 0_usize;
    let outcome = json.deserialize_seq(Each(&mut |event| {
        count += 1;
        take(event);
    }));
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.is_eof() && count > 0 => Ok(false),
        Err(error) => {
            bail!("{}: {error}: expected a trace as TINYNCCL_TRACE=FILE writes it, an array of events", path.display())
        }
    }
}

struct Each<'a>(&'a mut dyn FnMut(Event));

impl<'de> Visitor<'de> for Each<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while let Some(event) = events.next_element()? {
            (self.0)(event);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Result<(Vec<String>, bool)> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("t.json");
        std::fs::write(&path, text)?;
        let mut names = Vec::new();
        let whole = each(&path, |event| names.push(event.name))?;
        Ok((names, whole))
    }

    #[test]
    fn an_end_that_is_missing_loses_what_is_behind_it() {
        let two = r#"[{"name":"a","other":{"x":[1]}},{"name":"b","args":{"unknown":1}}"#;
        let both = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(names(&format!("{two}]")).unwrap(), (both.clone(), true));
        for end in ["", ",", ",{\"na"] {
            assert_eq!(names(&format!("{two}{end}")).unwrap(), (both.clone(), false), "{end:?}");
        }
    }

    #[test]
    fn what_is_no_trace_is_named_with_what_is_one() {
        for text in ["", "{}", "[1]", "hello", r#"[{"name":7}]"#] {
            let error = names(text).unwrap_err().to_string();
            assert!(error.contains("t.json: ") && error.contains("TINYNCCL_TRACE=FILE"), "{text}: {error}");
        }
        let error = format!("{:#}", each(Path::new("/nowhere/t.json"), |_| ()).unwrap_err());
        assert!(error.contains("reading /nowhere/t.json"), "{error}");
    }

    #[test]
    fn times_are_whole_nanoseconds() {
        let event: Event = serde_json::from_str(r#"{"ts":-1.0011,"dur":2.0021}"#).unwrap();
        assert_eq!((event.begin(), event.end()), (-1002, 1000), "towards the past");
        let event: Event = serde_json::from_str(r#"{"ts":1234567.8901,"dur":0.0011}"#).unwrap();
        assert_eq!((event.begin(), event.end()), (1_234_567_890, 1_234_567_891));
    }
}
