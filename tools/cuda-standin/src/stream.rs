//! Streams: threads that do what is enqueued, one after the other.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::sys::{CUresult, CUstream};

use crate::calls::{Answer, ensure, lock};
use crate::capture::{self, Joined};
use crate::context::{Context, current};
use crate::handles::{self, Table};
use crate::work::Work;

/// Operations that a stream takes before its callers wait; about what a GPU's driver takes.
const DEPTH: usize = 1024;

/// Streams that programs created, by handle.
pub(crate) static STREAMS: Table<Stream> = Table::new();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The default stream of a context: waits for all blocking streams, and they for it.
    Legacy,
    Blocking,
    NonBlocking,
}

/// A stream.
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) kind: Kind,
    pub(crate) priority: c_int,
    context: Weak<Context>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The graph that it is captured into.
    pub(crate) capture: Mutex<Option<Joined>>,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    issued: u64,
    done: u64,
    has_thread: bool,
    closed: bool,
}

/// A position in a stream's order.
#[derive(Clone)]
pub(crate) struct Point {
    stream: Arc<Stream>,
    number: u64,
}

impl Point {
    pub(crate) fn context(&self) -> Answer<Arc<Context>> {
        self.stream.context()
    }

    pub(crate) fn is_reached(&self) -> bool {
        self.stream.queue().done >= self.number
    }

    pub(crate) fn wait(&self) {
        let mut queue = self.stream.queue();
        while queue.done < self.number {
            queue = self.stream.sleep(queue);
        }
    }
}

/// The stream of a handle: one that a program created, or a default stream of the current context.
pub(crate) fn stream(handle: CUstream) -> Answer<Arc<Stream>> {
    match handle.addr() {
        // CU_STREAM_LEGACY is 1.
        0 | 1 => Ok(current()?.legacy()),
        // CU_STREAM_PER_THREAD.
        2 => Ok(current()?.of_thread()),
        _ => STREAMS.get(handle),
    }
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>, kind: Kind, priority: c_int) -> Arc<Stream> {
        let stream = Arc::new(Stream {
            handle: handles::fresh(),
            kind,
            priority,
            context: Arc::downgrade(context),
            queue: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::default(),
        });
        context.enter(&stream);
        stream
    }

    pub(crate) fn context(&self) -> Answer<Arc<Context>> {
        self.context.upgrade().ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    fn sleep<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    /// The end of what is enqueued.
    pub(crate) fn tail(self: &Arc<Self>) -> Point {
        Point { stream: self.clone(), number: self.queue().issued }
    }

    /// Enqueues: into the graph that captures this stream, or to be done now.
    pub(crate) fn enqueue(self: &Arc<Self>, work: Work) -> Answer {
        match capture::add(self, work)? {
            None => Ok(()),
            Some(work) => self.enqueue_live(work).map(|_| ()),
        }
    }

    /// Enqueues what is done now, also if the stream is captured.
    pub(crate) fn enqueue_live(self: &Arc<Self>, work: Work) -> Answer<Point> {
        let context = self.context()?;
        context.check()?;
        match self.kind {
            Kind::Legacy => {
                for other in context.streams() {
                    if other.kind == Kind::Blocking {
                        self.behind(&context, other.tail())?;
                    }
                }
            }
            Kind::Blocking => self.behind(&context, context.legacy().tail())?,
            Kind::NonBlocking => {}
        }
        self.push(&context, work)
    }

    /// Makes what follows wait for a point.
    fn behind(self: &Arc<Self>, context: &Arc<Context>, point: Point) -> Answer {
        if point.is_reached() {
            return Ok(());
        }
        self.push(context, Work::Reach(point)).map(|_| ())
    }

    fn push(self: &Arc<Self>, context: &Arc<Context>, work: Work) -> Answer<Point> {
        let mut queue = self.queue();
        while queue.work.len() >= DEPTH && !queue.closed {
            queue = self.sleep(queue);
        }
        ensure(!queue.closed, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        if !queue.has_thread {
            let (stream, context) = (self.clone(), context.clone());
            let thread = std::thread::Builder::new().name("cuda-standin".to_owned());
            thread.spawn(move || stream.run(&context)).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
            queue.has_thread = true;
        }
        queue.work.push_back(work);
        queue.issued += 1;
        self.changed.notify_all();
        Ok(Point { stream: self.clone(), number: queue.issued })
    }

    /// Its thread.
    fn run(&self, context: &Context) {
        loop {
            let mut queue = self.queue();
            let work = loop {
                match queue.work.pop_front() {
                    Some(work) => break work,
                    None if queue.closed => return,
                    None => queue = self.sleep(queue),
                }
            };
            drop(queue);
            let run = context.check().map_err(|error| work.skip(error));
            if run.is_ok()
                && let Err(error) = work.run(context)
            {
                context.fail(error);
            }
            // Its memory may go with it.
            drop(work);
            self.queue().done += 1;
            self.changed.notify_all();
        }
    }

    /// Takes no more; what is enqueued is done, and then its thread ends.
    pub(crate) fn close(&self) {
        self.queue().closed = true;
        self.changed.notify_all();
    }

    /// Waits for all that is enqueued.
    pub(crate) fn synchronize(self: &Arc<Self>) -> Answer {
        let context = self.context()?;
        if self.kind == Kind::Legacy {
            // The streams that it would wait for.
            let blocking = context.streams().into_iter().filter(|stream| stream.kind == Kind::Blocking);
            let points: Vec<Point> = blocking.map(|stream| stream.tail()).collect();
            points.iter().for_each(Point::wait);
        }
        self.tail().wait();
        context.check()
    }

    /// Returns `Ok` once all that is enqueued is done, `CUDA_ERROR_NOT_READY` before.
    pub(crate) fn query(self: &Arc<Self>) -> Answer {
        let context = self.context()?;
        context.check()?;
        let idle = |stream: &Arc<Stream>| stream.tail().is_reached();
        let others = || context.streams().iter().filter(|stream| stream.kind == Kind::Blocking).all(idle);
        let done = idle(self) && (self.kind != Kind::Legacy || others());
        ensure(done, CUresult::CUDA_ERROR_NOT_READY)
    }
}
