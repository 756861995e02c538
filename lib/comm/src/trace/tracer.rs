//! Events that a communicator's threads record outside the executor, where a lock does not matter.

use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use super::event::{Content, Event, Span, Track};
use super::ring::Ring;
use super::sink::Sink;
use super::source::Source;
use super::{chrome, now};
use tinynccl_sys::threads::lock;

/// These events are few; the executor's are not.
const CAPACITY: usize = 1 << 16;

/// A communicator's identity in the trace, and its threads' events.
#[derive(Debug)]
pub struct Tracer {
    pub(super) source: Source,
    threads: Mutex<Threads>,
}

#[derive(Debug)]
struct Threads {
    ring: Ring,
    met: Vec<ThreadId>,
}

impl Tracer {
    pub(crate) fn new(sink: Arc<Sink>, comm: u32, members: Vec<usize>) -> Arc<Tracer> {
        let ring = Ring::new(sink.events.min(CAPACITY));
        let source = Source { sink, comm, members };
        Arc::new(Tracer { source, threads: Mutex::new(Threads { ring, met: Vec::new() }) })
    }

    pub(crate) fn sink(&self) -> &Arc<Sink> {
        &self.source.sink
    }

    /// Something that this thread did from `begin` until now.
    pub fn span(&self, begin: u64, span: Span) {
        let end = now().max(begin + 1);
        let mut threads = lock(&self.threads);
        let thread = std::thread::current().id();
        let number = match threads.met.iter().position(|&t| t == thread) {
            Some(number) => number,
            None => {
                threads.met.push(thread);
                threads.met.len() - 1
            }
        };
        threads.ring.push(Event { begin, end, track: Track::Thread(number as u32), content: Content::Span(span) });
    }

    /// Writes what has been recorded.
    pub(super) fn flush(&self) {
        let mut threads = lock(&self.threads);
        if !threads.ring.is_empty() {
            threads.ring.take(|events, dropped| chrome::write(&self.source, &[], events, dropped, None));
        }
    }
}

/// Does `work`, and records what it was on this thread's line if there is a trace.
pub fn recorded<T>(trace: Option<&Tracer>, span: impl FnOnce() -> Span, work: impl FnOnce() -> T) -> T {
    let Some(trace) = trace else { return work() };
    let begin = now();
    let outcome = work();
    trace.span(begin, span());
    outcome
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.flush();
    }
}
