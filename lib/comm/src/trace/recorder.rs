//! Records what the executor does. Belongs to the engine, so to one thread at a time: no locks, no atomics.

use std::sync::Arc;

use super::event::{Call, Content, Event, NONE, Step, Track};
use super::ring::Ring;
use super::source::Link;
use super::tracer::Tracer;
use super::{chrome, now};
use tinynccl_plan::schedule;
use tinynccl_sys::backoff::Phase;

/// Hooks of the executor: [`Off`] compiles to nothing.
pub(crate) trait Probe {
    /// The recorder, if there is one.
    fn on(&mut self) -> Option<&mut Recorder>;
}

/// No recording.
pub(crate) struct Off;

impl Probe for Off {
    #[inline(always)]
    fn on(&mut self) -> Option<&mut Recorder> {
        None
    }
}

impl Probe for Recorder {
    #[inline(always)]
    fn on(&mut self) -> Option<&mut Recorder> {
        Some(self)
    }
}

/// State of a lane in time.
#[derive(Debug, Clone, Copy)]
struct LaneState {
    /// End of the last step: the present one begins there.
    begin: u64,
    /// Link that the present step waits for, and the beginning of that wait; `None`: it does not wait.
    waits: Option<(Waiting, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiting {
    link: u32,
    room: bool,
}

/// A step, as the executor describes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepDone {
    pub(crate) kind: schedule::Step<(), ()>,
    pub(crate) seq: u32,
    pub(crate) window: usize,
    pub(crate) part: usize,
    pub(crate) bytes: usize,
    /// Link indices.
    pub(crate) recv: Option<u32>,
    pub(crate) send: Option<u32>,
}

/// The recorder of one communicator's executor.
#[derive(Debug)]
pub(crate) struct Recorder {
    tracer: Arc<Tracer>,
    ring: Ring,
    links: Vec<Link>,
    lanes: Vec<LaneState>,
    /// The lane that is running.
    lane: usize,
    /// Time when the lane was entered, or its last step ended.
    stamp: u64,
    /// Activity of the thread while no lane can go on: phase, link, beginning.
    idle: Option<(Phase, u32, u64)>,
    /// Rank that a call in memory that all ranks map waits for: world rank, true if it is to come, beginning.
    awaited: Option<(u32, bool, u64)>,
    /// Beginning of the present run.
    begin: u64,
    /// Beginning of the preparation of a call that has not begun: links opened, a plan compiled, or a run without a
    /// result.
    preparing: Option<u64>,
}

fn index(link: usize) -> u32 {
    u32::try_from(link).unwrap_or(NONE)
}

impl Recorder {
    pub(crate) fn new(tracer: Arc<Tracer>, capacity: usize) -> Recorder {
        Recorder {
            tracer,
            ring: Ring::new(capacity),
            links: Vec::new(),
            lanes: Vec::new(),
            lane: 0,
            stamp: 0,
            idle: None,
            awaited: None,
            begin: 0,
            preparing: None,
        }
    }

    #[cfg(test)]
    pub(super) fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    fn push(&mut self, begin: u64, end: u64, track: Track, content: Content) {
        self.ring.push(Event { begin, end, track, content });
    }

    /// Something before a call begins that the call is the reason for.
    pub(crate) fn prepare(&mut self) -> u64 {
        let now = now();
        self.preparing.get_or_insert(now);
        now
    }

    /// The call will not begin.
    pub(crate) fn prepare_failed(&mut self) {
        self.preparing = None;
    }

    /// A link was opened; its index is the number of those before it. `peer` is a rank of the communicator.
    pub(crate) fn connected(&mut self, begin: u64, peer: usize, channel: u32, kind: &'static str) {
        let link = index(self.links.len());
        self.links.push(Link { peer: self.tracer.source.world(peer), channel, sent: 0, received: 0 });
        self.push(begin, now(), Track::Calls, Content::Connect { link, kind });
    }

    /// A plan was compiled.
    pub(crate) fn compiled(&mut self, begin: u64, collective: u8) {
        self.push(begin, now(), Track::Calls, Content::Compile { collective });
    }

    /// A run of `lanes` lanes begins.
    pub(crate) fn run_begins(&mut self, lanes: usize) {
        let now = now();
        self.begin = self.preparing.take().unwrap_or(now);
        self.idle = None;
        self.awaited = None;
        self.lanes.clear();
        self.lanes.resize(lanes, LaneState { begin: now, waits: None });
    }

    /// Lane `lane` tries to go on.
    #[inline]
    pub(crate) fn enter(&mut self, lane: usize) {
        self.lane = lane;
        self.stamp = now();
    }

    /// The lane's step cannot go on without this link.
    #[inline]
    pub(crate) fn blocked(&mut self, recv: Option<usize>, send: Option<usize>) {
        let waiting = match (recv, send) {
            (Some(link), _) => Waiting { link: index(link), room: false },
            (None, Some(link)) => Waiting { link: index(link), room: true },
            (None, None) => return,
        };
        let (lane, stamp) = (self.lane, self.stamp);
        let Some(state) = self.lanes.get_mut(lane) else { return };
        let before = state.waits;
        match before {
            Some((same, _)) if same == waiting => {}
            _ => {
                state.waits = Some((waiting, stamp));
                self.waited(before, stamp);
            }
        }
    }

    fn waited(&mut self, waits: Option<(Waiting, u64)>, end: u64) {
        if let Some((Waiting { link, room }, since)) = waits
            && end > since
        {
            self.push(since, end, Track::Lane(index(self.lane)), Content::Wait { link, room });
        }
    }

    /// The lane's step is done.
    #[inline]
    pub(crate) fn step(&mut self, step: StepDone) {
        let (lane, stamp) = (self.lane, self.stamp);
        // Neighbours on a track must not look nested: no step takes no time.
        let end = now().max(stamp + 1);
        self.ends_idle(stamp);
        let Some(state) = self.lanes.get_mut(lane) else { return };
        let begin = std::mem::replace(&mut state.begin, end);
        let waits = state.waits.take();
        self.stamp = end;
        self.waited(waits, stamp);
        let count = |link: Option<&mut u32>| match link {
            Some(n) => {
                *n = n.wrapping_add(1);
                *n
            }
            None => NONE,
        };
        let received = count(step.recv.and_then(|i| self.links.get_mut(i as usize)).map(|l| &mut l.received));
        let sent = count(step.send.and_then(|i| self.links.get_mut(i as usize)).map(|l| &mut l.sent));
        self.push(begin, end, Track::Lane(index(lane)), Content::Step(step.event(Some(end - stamp), received, sent)));
    }

    /// The thread waited, since the last lane was entered.
    #[inline]
    pub(crate) fn idles(&mut self, phase: Phase, link: impl FnOnce() -> Option<usize>) {
        match self.idle {
            Some((same, ..)) if same == phase => {}
            _ => {
                let stamp = self.stamp;
                self.ends_idle(stamp);
                self.idle = Some((phase, link().map_or(NONE, index), stamp));
            }
        }
    }

    #[inline]
    fn ends_idle(&mut self, end: u64) {
        if let Some((phase, link, since)) = self.idle.take()
            && end > since
        {
            self.push(since, end, Track::Calls, Content::Idle { phase, link });
        }
    }

    /// A call in memory that all ranks map waits for a rank of the communicator, to come (`arrival`) or to be done.
    pub(crate) fn awaits(&mut self, peer: usize, arrival: bool) {
        let now = now();
        self.ends_await(now);
        self.awaited = Some((index(self.tracer.source.world(peer)), arrival, now));
    }

    fn ends_await(&mut self, end: u64) {
        if let Some((rank, arrival, since)) = self.awaited.take()
            && end > since
        {
            self.push(since, end, Track::Calls, Content::Await { rank, arrival });
        }
    }

    /// The run ends without a result; another one carries the call out, and their slice begins here.
    pub(crate) fn run_continues(&mut self) {
        self.ends_await(now());
        self.preparing = Some(self.begin);
    }

    /// The lane's step was not done when the call failed.
    pub(crate) fn unfinished(&mut self, lane: usize, step: StepDone) {
        let end = now();
        self.lane = lane;
        let Some(state) = self.lanes.get_mut(lane) else { return };
        let begin = std::mem::replace(&mut state.begin, end);
        let waits = state.waits.take();
        self.waited(waits, end);
        self.push(begin, end.max(begin + 1), Track::Lane(index(lane)), Content::Step(step.event(None, NONE, NONE)));
    }

    /// The run is over. `calls`: each with its number of lanes.
    pub(crate) fn run_ends(&mut self, calls: impl ExactSizeIterator<Item = (Call, usize)>) {
        let end = now().max(self.begin + 1);
        self.ends_idle(end);
        self.ends_await(end);
        let begin = self.begin;
        match calls.len() {
            1 => calls.for_each(|(call, _)| self.push(begin, end, Track::Calls, Content::Call(call))),
            n => {
                let mut lane = 0;
                for (call, lanes) in calls {
                    for _ in 0..lanes {
                        let last = self.lanes.get(lane).map_or(end, |l| l.begin);
                        self.push(begin, last.max(begin + 1), Track::Lane(index(lane)), Content::Call(call));
                        lane += 1;
                    }
                }
                self.push(begin, end, Track::Calls, Content::Group { calls: index(n) });
            }
        }
    }

    /// Writes what has been recorded; `failure` goes with it. Problems are logged: no call fails because of its trace.
    pub(crate) fn flush(&mut self, failure: Option<&str>) {
        if self.ring.is_empty() && failure.is_none() {
            return;
        }
        let Recorder { tracer, ring, links, .. } = self;
        ring.take(|events, dropped| chrome::write(&tracer.source, links, events, dropped, failure));
        tracer.flush();
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.flush(None);
    }
}

impl StepDone {
    fn event(&self, work_ns: Option<u64>, received: u32, sent: u32) -> Step {
        Step {
            kind: self.kind,
            done: work_ns.is_some(),
            part: u16::try_from(self.part).unwrap_or(u16::MAX),
            seq: self.seq,
            window: self.window as u32,
            bytes: self.bytes as u32,
            work_ns: u32::try_from(work_ns.unwrap_or(0)).unwrap_or(u32::MAX),
            recv: self.recv.unwrap_or(NONE),
            send: self.send.unwrap_or(NONE),
            received,
            sent,
        }
    }
}
