//! A file of JSON that several processes append to: one array, one event per line.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use tinynccl_plan::error::{Error, Result};

/// Ends the file; the next writer puts its lines in its place.
const TAIL: &[u8] = b"\n]\n";
/// Longest wait for another rank that writes.
const LIMIT: Duration = Duration::from_secs(30);
/// Between two looks at the lock.
const LOOK: Duration = Duration::from_millis(2);
/// The run's id is in the first line.
const HEAD: u64 = 4096;
/// Longer than any line.
const LINE: u64 = 64 << 10;

fn failed(what: &str, path: &Path, source: &std::io::Error) -> Error {
    Error::io("trace", format!("{what} {}: set TINYNCCL_TRACE to a file that can be written", path.display()), source)
}

/// Starts the file anew with one line (a JSON object).
pub(super) fn create(path: &Path, line: &str) -> Result<()> {
    let error = |e: std::io::Error| failed("creating", path, &e);
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        let detail = "expected a regular file, or a path where one can be created";
        return Err(Error::config("TINYNCCL_TRACE", path.display(), detail));
    }
    // Not truncated by the open: somebody may still be writing to it.
    let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(error)?;
    lock(&file, path)?;
    file.set_len(0).map_err(error)?;
    let mut text = b"[\n".to_vec();
    text.extend_from_slice(line.as_bytes());
    text.extend_from_slice(TAIL);
    file.write_all(&text).map_err(error)
}

/// True when the file was started by the run with this id.
pub(super) fn belongs_to(path: &Path, run: &str) -> bool {
    let mut head = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(HEAD).read_to_end(&mut head).is_ok() && find(&head, run.as_bytes()),
        Err(_) => false,
    }
}

fn find(text: &[u8], wanted: &[u8]) -> bool {
    text.windows(wanted.len()).any(|w| w == wanted)
}

/// Appends the lines that `write` writes. It begins every line with [`Lines::next`].
pub(super) fn append(path: &Path, write: impl FnOnce(&mut Lines) -> std::io::Result<()>) -> Result<()> {
    let error = |e: std::io::Error| failed("appending to", path, &e);
    let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(error)?;
    lock(&file, path)?;
    let (end, first) = cut(&mut file).map_err(error)?;
    file.set_len(end).map_err(error)?;
    file.seek(SeekFrom::Start(end)).map_err(error)?;
    let mut lines = Lines { out: BufWriter::with_capacity(256 << 10, file), first };
    let outcome = write(&mut lines).and_then(|()| lines.out.write_all(TAIL)).and_then(|()| lines.out.flush());
    outcome.map_err(error)
}

/// Returns the end of the last whole line, and true if no event is before it.
fn cut(file: &mut File) -> std::io::Result<(u64, bool)> {
    let length = file.metadata()?.len();
    let from = length.saturating_sub(LINE);
    let mut text = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(LINE).read_to_end(&mut text)?;
    let mut end = text.len();
    if text.ends_with(TAIL) {
        end -= TAIL.len();
    } else {
        // The last writer did not come to the end: what is behind its last separator may be half a line.
        end = text.windows(2).rposition(|w| w == b",\n").unwrap_or(1.min(end));
    }
    let first = from == 0 && !text[..end].contains(&b'{');
    Ok((from + end as u64, first))
}

fn lock(file: &File, path: &Path) -> Result<()> {
    let end = Instant::now() + LIMIT;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if Instant::now() < end => {
                std::thread::sleep(LOOK);
            }
            Err(e) => return Err(Error::errno("trace", format!("locking {}", path.display()), e)),
        }
    }
}

/// The file between its last event and its end.
pub(super) struct Lines {
    out: BufWriter<File>,
    first: bool,
}

impl Lines {
    /// Begins a line.
    pub(super) fn next(&mut self) -> std::io::Result<&mut impl Write> {
        let separator: &[u8] = if std::mem::take(&mut self.first) { b"\n" } else { b",\n" };
        self.out.write_all(separator)?;
        Ok(&mut self.out)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn add(path: &Path, names: &[&str]) {
        append(path, |lines| names.iter().try_for_each(|n| write!(lines.next()?, "{{\"name\":\"{n}\"}}"))).unwrap();
    }

    fn names(path: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap();
        let events: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"));
        events.iter().map(|e| e["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn the_file_is_json_after_every_append() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, "something of an earlier run, much longer than what comes now").unwrap();
        create(&path, "{\"name\":\"run 7\"}").unwrap();
        assert_eq!(names(&path), ["run 7"]);
        assert!(belongs_to(&path, "run 7") && !belongs_to(&path, "run 8"));
        assert!(!belongs_to(&dir.path().join("b.json"), "run 7"));
        add(&path, &["a", "b"]);
        add(&path, &[]);
        add(&path, &["c"]);
        assert_eq!(names(&path), ["run 7", "a", "b", "c"]);
    }

    #[test]
    fn what_a_killed_writer_leaves_is_repaired_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for (left, expected) in [
            ("[\n{\"name\":\"x\"},\n{\"name\":\"y\"},\n{\"na", vec!["x", "y", "new"]),
            ("[\n{\"name\":\"x\"},\n", vec!["x", "new"]),
            ("[\n{\"name\":\"x\"},\n{\"name\":\"y\"}", vec!["x", "new"]),
            ("[\n{\"na", vec!["new"]),
            ("[", vec!["new"]),
        ] {
            std::fs::write(&path, left).unwrap();
            add(&path, &["new"]);
            assert_eq!(names(&path), expected, "{left:?}");
        }
    }

    #[test]
    fn many_writers_at_once_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        create(&path, "{\"name\":\"run\"}").unwrap();
        std::thread::scope(|scope| {
            for writer in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    for block in 0..5 {
                        let name = format!("{writer}.{block}");
                        add(path, &[&name, &name, &name]);
                    }
                });
            }
        });
        let names = names(&path);
        assert_eq!(names.len(), 1 + 8 * 5 * 3);
        assert!(names[1..].chunks(3).all(|block| block[0] == block[1] && block[1] == block[2]), "{names:?}");
    }

    #[test]
    fn paths_that_cannot_be_written_say_what_to_do() {
        for path in ["/nowhere/at/all.json", "/", "/dev/null"] {
            let error = create(Path::new(path), "{}").unwrap_err().to_string();
            assert!(error.contains(path) && error.contains("TINYNCCL_TRACE"), "{error}");
        }
    }
}
