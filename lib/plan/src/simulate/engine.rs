//! Runs a [`System`]: lanes take steps, FIFOs transfer messages, links are shared.
//!
//! Every message and every lane carries its *critical path*: the components of its time, on any ranks. When an event
//! waits for two others, the path of the later one counts. At the end the path of the last lane shows where the time
//! went, and its components add up to the time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::machine::MOST_KINDS;
use super::sharing::{Sharing, Time};
use super::system::{NONE, STEPS, System};
use crate::error::{Error, Result};

/// The components of a time, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Path {
    /// The time: the sum of the parts.
    pub(super) at: f64,
    pub(super) call: f64,
    pub(super) latency: f64,
    pub(super) overhead: f64,
    pub(super) reduce: f64,
    pub(super) copy: f64,
    /// By the kind of link that was full.
    pub(super) transfer: [f64; MOST_KINDS],
    /// The time after `call`, by the kind of step in which it ended.
    pub(super) step: [f64; STEPS.len()],
    /// Time up to which `call` and `step` account for `at`.
    pub(super) counted: f64,
    pub(super) hops: u64,
}

/// Most visits of links and transfers to share the links: some seconds of work. If thousands of transfers all influence
/// each other, each message costs as many visits.
const MOST_VISITS: u64 = 20_000_000;

/// The result of a run.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) path: Path,
    pub(super) messages: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A lane's step is done.
    Step { rank: u32, lane: u32 },
    /// A message arrives.
    Arrival { fifo: u32 },
    /// Transfers of a bundle end.
    End { bundle: u32, version: u32 },
}

struct Lane {
    window: usize,
    run: usize,
    times: u32,
    path: Path,
    done: bool,
}

struct State {
    lanes: Vec<Lane>,
    /// Critical path to the end of the processor's last task.
    processor: Path,
}

#[derive(Default)]
struct Queue {
    /// Path at which the active transfer began.
    active: Option<Path>,
    waiting: VecDeque<(f64, Path)>,
    flying: VecDeque<Path>,
    arrived: VecDeque<Path>,
    /// Messages that were in `arrived` before its first.
    dropped: u64,
    readers: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Cursor {
    taken: u64,
    waiting: Option<(u32, u32)>,
}

struct Engine<'a> {
    system: &'a System,
    states: Vec<State>,
    queues: Vec<Queue>,
    cursors: Vec<Cursor>,
    sharing: Sharing,
    heap: BinaryHeap<Reverse<(Time, u64, Event)>>,
    events: u64,
    /// Lanes that can advance now.
    ready: Vec<(u32, u32)>,
    now: f64,
    messages: u64,
}

/// Runs it to the end.
pub(super) fn run(system: &System) -> Result<Outcome> {
    let mut engine = Engine::new(system);
    engine.start();
    if !engine.play() {
        let all = system.messages();
        return Err(Error::invalid(
            "simulate",
            format!(
                "after {} of {all} messages, {MOST_VISITS} shares of links were computed: too many messages influence each other on this \
                 machine. Take fewer ranks, or another algorithm",
                engine.messages
            ),
        ));
    }
    let stuck =
        engine.states.iter().enumerate().find_map(|(r, s)| s.lanes.iter().position(|l| !l.done).map(|l| (r, l)));
    if let Some((rank, lane)) = stuck {
        let detail = format!("rank {rank}, lane {lane} waits forever: a fault in the library");
        return Err(Error::invalid("simulate", detail));
    }
    let lanes = engine.states.iter().flat_map(|s| &s.lanes).map(|l| l.path);
    let path = lanes.max_by(|a, b| a.at.total_cmp(&b.at)).unwrap_or_default();
    Ok(Outcome { path, messages: engine.messages })
}

impl<'a> Engine<'a> {
    fn new(system: &'a System) -> Engine<'a> {
        let mut queues: Vec<Queue> = system.fifos.iter().map(|_| Queue::default()).collect();
        for (at, reader) in system.readers.iter().enumerate() {
            queues[reader.fifo as usize].readers.push(at as u32);
        }
        let call = system.costs.call;
        let path = Path { at: call, call, counted: call, ..Path::default() };
        let lane = || Lane { window: 0, run: 0, times: 0, path, done: false };
        let states =
            system.ranks.iter().map(|r| State { lanes: r.lanes.iter().map(|_| lane()).collect(), processor: path });
        Engine {
            states: states.collect(),
            queues,
            cursors: vec![Cursor::default(); system.readers.len()],
            sharing: Sharing::new(system),
            heap: BinaryHeap::new(),
            events: 0,
            ready: vec![],
            now: call,
            messages: 0,
            system,
        }
    }

    fn start(&mut self) {
        for rank in 0..self.states.len() as u32 {
            for lane in 0..self.states[rank as usize].lanes.len() as u32 {
                self.advance(rank, lane);
            }
        }
        self.share();
    }

    /// False when it would take too long.
    fn play(&mut self) -> bool {
        let mut ended = vec![];
        while let Some(&Reverse((time, _, _))) = self.heap.peek() {
            self.now = time.0;
            // First all events of this time. Then the lanes that can advance, in order, which decides which lane gets a
            // processor first. Then the links are shared anew, once.
            while let Some(&Reverse((at, _, event))) = self.heap.peek() {
                if at != time {
                    self.go_on();
                    if self.heap.peek().is_none_or(|Reverse((at, ..))| *at != time) {
                        break;
                    }
                    continue;
                }
                self.heap.pop();
                match event {
                    Event::Step { rank, lane } => {
                        self.complete(rank, lane);
                        self.ready.push((rank, lane));
                    }
                    Event::Arrival { fifo } => self.arrive(fifo),
                    Event::End { bundle, version } => {
                        ended.clear();
                        self.sharing.end(bundle, version, self.now, &mut ended);
                        for &fifo in &ended {
                            self.sent(fifo);
                        }
                    }
                }
            }
            self.go_on();
            self.share();
            if self.sharing.visits > MOST_VISITS {
                return false;
            }
        }
        true
    }

    fn go_on(&mut self) {
        let mut ready = std::mem::take(&mut self.ready);
        ready.sort_unstable();
        for (rank, lane) in ready.drain(..) {
            self.advance(rank, lane);
        }
        if self.ready.is_empty() {
            self.ready = ready;
        }
    }

    fn share(&mut self) {
        let (heap, events) = (&mut self.heap, &mut self.events);
        self.sharing.share(self.now, |bundle, version, at| {
            *events += 1;
            heap.push(Reverse((Time(at), *events, Event::End { bundle, version })));
        });
    }

    fn schedule(&mut self, at: f64, event: Event) {
        self.events += 1;
        self.heap.push(Reverse((Time(at), self.events, event)));
    }

    /// Takes steps until one has to wait or takes time.
    fn advance(&mut self, rank: u32, lane: u32) {
        let system = self.system;
        let runs = &system.ranks[rank as usize].lanes[lane as usize];
        loop {
            let state = &mut self.states[rank as usize];
            let this = &mut state.lanes[lane as usize];
            let Some(run) = runs.get(this.run) else {
                this.window += 1;
                (this.run, this.times) = (0, 0);
                if this.window < system.windows && !runs.is_empty() {
                    continue;
                }
                this.done = true;
                return;
            };
            let mut path = this.path;
            if run.recv != NONE {
                let fifo = system.readers[run.recv as usize].fifo as usize;
                let (cursor, queue) = (&mut self.cursors[run.recv as usize], &mut self.queues[fifo]);
                let Some(message) = queue.arrived.get((cursor.taken - queue.dropped) as usize) else {
                    cursor.waiting = Some((rank, lane));
                    return;
                };
                if message.at > path.at {
                    path = *message;
                }
                cursor.taken += 1;
                queue.drop_what_all_took(&self.cursors);
            }
            let bytes = system.bytes(run, this.window);
            let work = system.work(run, bytes);
            if work > 0.0 {
                if state.processor.at > path.at {
                    path = state.processor;
                }
                let (reduce, copy) = (system.reduce_time(run, bytes), system.copy_time(run, bytes));
                path.reduce += reduce;
                path.copy += copy;
                path.overhead += work - reduce - copy;
                path.at += work;
            }
            path.step[usize::from(run.kind)] += path.at - path.counted;
            path.counted = path.at;
            this.path = path;
            if work > 0.0 {
                state.processor = path;
                self.schedule(path.at, Event::Step { rank, lane });
                return;
            }
            self.complete(rank, lane);
        }
    }

    /// The step of a lane is done: its message goes out.
    fn complete(&mut self, rank: u32, lane: u32) {
        let this = &mut self.states[rank as usize].lanes[lane as usize];
        let run = &self.system.ranks[rank as usize].lanes[lane as usize][this.run];
        let (window, path) = (this.window, this.path);
        this.times += 1;
        if this.times == run.times {
            this.run += 1;
            this.times = 0;
        }
        if run.send != NONE {
            self.messages += 1;
            let bytes = self.system.bytes(run, window);
            let queue = &mut self.queues[run.send as usize];
            if queue.active.is_some() {
                queue.waiting.push_back((bytes, path));
            } else {
                self.begin(run.send, bytes, path);
            }
        }
    }

    fn begin(&mut self, fifo: u32, bytes: f64, path: Path) {
        // The lane may have received a message that arrived earlier, so its path may be older than now.
        self.queues[fifo as usize].active = Some(path);
        if bytes > 0.0 && !self.system.fifos[fifo as usize].links.is_empty() {
            self.sharing.start(fifo, bytes, self.now);
        } else {
            self.sent(fifo);
        }
    }

    /// The last byte of a FIFO's transfer has left.
    fn sent(&mut self, fifo: u32) {
        let this = &self.system.fifos[fifo as usize];
        let queue = &mut self.queues[fifo as usize];
        let Some(mut path) = queue.active.take() else { return };
        let kind = self.sharing.limit(fifo).map_or(0, |link| self.system.links[link as usize].id.kind);
        path.transfer[usize::from(kind) % MOST_KINDS] += self.now - path.at;
        path.at = self.now;
        let next = queue.waiting.pop_front();
        let arriving =
            Path { at: path.at + this.latency, latency: path.latency + this.latency, hops: path.hops + 1, ..path };
        queue.flying.push_back(arriving);
        self.schedule(arriving.at, Event::Arrival { fifo });
        if let Some((bytes, _)) = next {
            // It waited for this transfer.
            self.begin(fifo, bytes, path);
        }
    }

    fn arrive(&mut self, fifo: u32) {
        let queue = &mut self.queues[fifo as usize];
        let Some(path) = queue.flying.pop_front() else { return };
        queue.arrived.push_back(path);
        for at in 0..queue.readers.len() {
            let reader = self.queues[fifo as usize].readers[at];
            self.ready.extend(self.cursors[reader as usize].waiting.take());
        }
    }
}

impl Queue {
    fn drop_what_all_took(&mut self, cursors: &[Cursor]) {
        let least = self.readers.iter().map(|&r| cursors[r as usize].taken).min().unwrap_or(0);
        while self.dropped < least && self.arrived.pop_front().is_some() {
            self.dropped += 1;
        }
    }
}
