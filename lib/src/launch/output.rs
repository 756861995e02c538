//! Passes the ranks' output on, line by line, each with the rank in front.

use std::io::{ErrorKind, Read};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::{OP, Sink};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::{deadline_after, left, lock};

/// A line that is longer is passed on in pieces.
const LONGEST_LINE: usize = 64 << 10;

/// After the last rank has ended, its output may take this long to come (something it started may hold the pipe open).
const LAST_LINES: Duration = Duration::from_secs(1);

/// The threads that pass output on.
#[derive(Debug)]
pub(super) struct Relays {
    running: usize,
    done: (Sender<()>, Receiver<()>),
}

impl Relays {
    pub(super) fn new() -> Self {
        Relays { running: 0, done: channel() }
    }

    /// Passes `from` on to `to` until it ends.
    pub(super) fn start(&mut self, rank: usize, from: impl Read + Send + 'static, to: Sink) -> Result<()> {
        let done = self.done.0.clone();
        std::thread::Builder::new()
            .name(format!("output-{rank}"))
            .spawn(move || {
                relay(from, &format!("[rank {rank}] "), &to);
                // No one receives any more once the launcher has ended.
                let _ = done.send(());
            })
            .map_err(|e| Error::io(OP, format!("starting a thread for the output of rank {rank}"), &e))?;
        self.running += 1;
        Ok(())
    }

    /// Waits, for a bounded time, until everything was passed on.
    pub(super) fn finish(self) {
        let deadline = deadline_after(LAST_LINES);
        for _ in 0..self.running {
            if self.done.1.recv_timeout(left(deadline)).is_err() {
                log::warn!("a process that a rank started still holds its output: not waiting for it");
                return;
            }
        }
    }
}

/// Copies whole lines, each written at once so that ranks do not mix within a line.
fn relay(mut from: impl Read, prefix: &str, to: &Sink) {
    let mut chunk = vec![0; LONGEST_LINE];
    let mut line = prefix.as_bytes().to_vec();
    loop {
        let got = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => chunk.get(..n).unwrap_or_default(),
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        for piece in got.split_inclusive(|&b| b == b'\n') {
            line.extend_from_slice(piece);
            let whole = piece.ends_with(b"\n");
            if whole || line.len() >= LONGEST_LINE {
                // Our own output is closed: closing the rank's notifies it.
                if !put(&mut line, prefix, to, whole) {
                    return;
                }
            }
        }
    }
    if line.len() > prefix.len() {
        put(&mut line, prefix, to, false);
    }
}

/// Writes the line and begins the next; false when that is no longer possible.
fn put(line: &mut Vec<u8>, prefix: &str, to: &Sink, whole: bool) -> bool {
    if !whole {
        line.push(b'\n');
    }
    let mut to = lock(to);
    let written = to.write_all(line).and_then(|()| to.flush());
    line.truncate(prefix.len());
    written.is_ok()
}

/// Writes a line of the launcher's own.
pub(super) fn say(to: &Sink, text: &str) {
    // Without a standard error there is no one to notify.
    let mut to = lock(to);
    let _ = to.write_all(format!("[launcher] {text}\n").as_bytes()).and_then(|()| to.flush());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    fn relayed(pieces: &[&[u8]]) -> String {
        /// Gives one piece per read.
        struct Pieces(Vec<Vec<u8>>);
        impl Read for Pieces {
            fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
                if self.0.is_empty() {
                    return Ok(0);
                }
                let piece = self.0.remove(0);
                to[..piece.len()].copy_from_slice(&piece);
                Ok(piece.len())
            }
        }
        let out = Arc::new(Mutex::new(Vec::new()));
        let sink: Sink = out.clone();
        relay(Pieces(pieces.iter().map(|p| p.to_vec()).collect()), "[rank 1] ", &sink);
        let bytes = out.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn lines_get_a_prefix_however_they_arrive() {
        assert_eq!(relayed(&[]), "");
        assert_eq!(relayed(&[b"a\nb\n"]), "[rank 1] a\n[rank 1] b\n");
        assert_eq!(relayed(&[b"a", b"b\n\n", b"c"]), "[rank 1] ab\n[rank 1] \n[rank 1] c\n");
    }

    #[test]
    fn memory_for_a_line_is_bounded() {
        let out = relayed(&[&[b'x'; LONGEST_LINE], &[b'x'; LONGEST_LINE]]);
        assert_eq!(out.lines().count(), 2);
        assert_eq!(out.matches('x').count(), 2 * LONGEST_LINE);
    }
}
