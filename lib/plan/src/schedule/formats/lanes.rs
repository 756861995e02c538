//! From threadblocks to lanes.
//!
//! A lane runs beside the others and waits for messages alone, so threadblocks that depend on each other become one.
//! Its steps have the order of a run of all ranks in which no link holds more than two messages. So the lanes of all
//! ranks can run in that order, and as no step of theirs polls, they end in any other, too. A lane has one channel for
//! all its links: where threadblocks on several channels become one lane, the messages of two of their links may have
//! to share one, in the order of that run at both ends.
//!
//! Scratch memory of a schedule is used again in every window, which the formats' is not. Lanes that would race there
//! become one, too.

use std::collections::{BTreeSet, HashMap};

use super::order;
use super::run::{Ran, Rules, Stop, run};
use super::threads::Threads;
use crate::error::Result;
use crate::schedule::verify::VerifyError;
use crate::schedule::{Lane, Program, Schedule, Step};

/// Messages that every link holds: the least that a communicator can be set to.
const DEPTH: usize = 2;

/// The schedule that does what these threadblocks do.
///
/// # Errors
/// A step that is wrong, named as in the file; otherwise the verifier's.
pub(super) fn schedule(plan: &Threads) -> Result<Schedule> {
    plan.check()?;
    let mut changed = None;
    let mut loosened = false;
    loop {
        let plan = changed.as_ref().unwrap_or(plan);
        // The file by itself: with links and threadblocks of its own.
        let links: Vec<usize> = (0..plan.conns.len()).collect();
        let own = match run(plan, Rules { links: &links, depth: usize::MAX, like: None, spare: false, races: true }) {
            Ok(own) => own,
            // Several chunks in a message are fewer messages, but not every such step is one of a schedule.
            Err(Stop::Narrow(steps)) => {
                changed = Some(plan.split(&steps));
                continue;
            }
            Err(Stop::Wrong(error) | Stop::Stuck(error)) => return Err(error),
        };
        // Links that were several may need another order than the first that comes, and room for what is passed on.
        let mut made = lanes(plan, None, false);
        for (like, spare) in [(Some(&own.received[..]), false), (None, true), (Some(&own.received), true)] {
            if matches!(made, Err(Stop::Stuck(_))) {
                made = lanes(plan, like, spare).or_else(|stop| match stop {
                    Stop::Stuck(_) => made,
                    other => Err(other),
                });
            }
        }
        match made {
            Ok(schedule) => return Ok(schedule),
            Err(Stop::Narrow(steps)) => changed = Some(plan.split(&steps)),
            Err(Stop::Stuck(_)) if !loosened => {
                // NCCL's links hold more than ours must. Without the order of what does not depend on each other, less
                // has to be on its way at once.
                loosened = true;
                changed = Some(order::loosened(plan, &own.sequence)?);
            }
            Err(Stop::Wrong(error) | Stop::Stuck(error)) => return Err(error),
        }
    }
}

/// `like`, `spare`: see [`Rules`].
fn lanes(plan: &Threads, like: Option<&[usize]>, spare: bool) -> Result<Schedule, Stop> {
    let mut first = 0;
    let firsts: Vec<usize> = plan
        .ranks
        .iter()
        .map(|threads| {
            first += threads.len();
            first - threads.len()
        })
        .collect();
    let mut lane = Sets::new(first);
    for (rank, threads) in plan.ranks.iter().enumerate() {
        for (t, thread) in threads.iter().enumerate() {
            for &(other, _) in thread.ops.iter().flat_map(|op| &op.after) {
                lane.join(firsts[rank] + t, firsts[rank] + other);
            }
        }
    }
    loop {
        let channels = Channels::new(plan, &firsts, &mut lane);
        let ran = run(plan, Rules { links: &channels.links, depth: DEPTH, like, spare, races: false })?;
        let (programs, owners) = programs(plan, &firsts, &mut lane, &channels, &ran);
        match Schedule::new(plan.shape, programs) {
            Ok(schedule) => return Ok(schedule),
            Err(VerifyError::Race { at, other, memory }) => {
                let threads = owners.get(at.rank).and_then(|lanes| Some((*lanes.get(at.lane)?, *lanes.get(other)?)));
                if !threads.is_some_and(|(ours, theirs)| lane.join(ours, theirs)) {
                    return Err(Stop::Wrong(VerifyError::Race { at, other, memory }.into()));
                }
            }
            Err(error) => return Err(Stop::Wrong(error.into())),
        }
    }
}

/// Channels of lanes, and the links that are left.
struct Channels {
    /// By threadblock.
    channel: Vec<u32>,
    /// By [`Threads::conns`].
    links: Vec<usize>,
}

impl Channels {
    /// Joins lanes until each end of each link belongs to one.
    fn new(plan: &Threads, firsts: &[usize], lane: &mut Sets) -> Channels {
        let ends = |conn: usize| {
            let (from, to) = (plan.conns[conn].from, plan.conns[conn].to);
            (firsts[from.0] + from.1, firsts[to.0] + to.1)
        };
        let pair = |conn: usize| (plan.conns[conn].from.0, plan.conns[conn].to.0);
        let count = lane.of.len();
        let (links, mut class) = loop {
            let mut class = Sets::new(count);
            (0..count).for_each(|thread| {
                class.join(thread, lane.find(thread));
            });
            for conn in 0..plan.conns.len() {
                let (from, to) = ends(conn);
                class.join(from, to);
            }
            let mut known: HashMap<(usize, (usize, usize)), usize> = HashMap::new();
            let mut joined = false;
            let mut links = Vec::with_capacity(plan.conns.len());
            for conn in 0..plan.conns.len() {
                let (from, to) = ends(conn);
                let same = *known.entry((class.find(from), pair(conn))).or_insert(conn);
                let (first_from, first_to) = ends(same);
                joined |= lane.join(from, first_from);
                joined |= lane.join(to, first_to);
                links.push(same);
            }
            if !joined {
                break (links, class);
            }
        };
        // Lanes of one channel may not share a link.
        let mut pairs: HashMap<usize, BTreeSet<(usize, usize)>> = HashMap::new();
        for conn in 0..plan.conns.len() {
            pairs.entry(class.find(ends(conn).0)).or_default().insert(pair(conn));
        }
        let mut used: Vec<BTreeSet<(usize, usize)>> = vec![];
        let mut of_class: HashMap<usize, u32> = HashMap::new();
        let channel = (0..count).map(|thread| {
            let class = class.find(thread);
            *of_class.entry(class).or_insert_with(|| {
                let Some(ours) = pairs.get(&class) else { return 0 };
                let free = used.iter().position(|taken| taken.is_disjoint(ours)).unwrap_or_else(|| {
                    used.push(BTreeSet::new());
                    used.len() - 1
                });
                used[free].extend(ours);
                free as u32
            })
        });
        Channels { channel: channel.collect(), links }
    }
}

/// The programs of all ranks, and of each rank's lanes a threadblock that is in them.
fn programs(
    plan: &Threads,
    firsts: &[usize],
    lane: &mut Sets,
    channels: &Channels,
    ran: &Ran,
) -> (Vec<Program>, Vec<Vec<usize>>) {
    let mut owners = Vec::new();
    let mut programs = Vec::new();
    for (rank, &first) in firsts.iter().enumerate() {
        let mut roots: Vec<usize> = Vec::new();
        let mut lanes: Vec<Lane> = Vec::new();
        let kept = ran.kept.iter().filter(|kept| kept.0 == rank).map(|&(_, src, dst)| Step::Copy { src, dst });
        for &(thread, step) in &ran.steps[rank] {
            let root = lane.find(first + thread);
            let at = roots.iter().position(|known| *known == root).unwrap_or_else(|| {
                roots.push(root);
                lanes.push(Lane { channel: channels.channel[root], steps: vec![] });
                lanes.len() - 1
            });
            lanes[at].steps.push(step);
        }
        let kept: Vec<Step> = kept.collect();
        if !kept.is_empty() {
            if lanes.is_empty() {
                roots.push(first);
                lanes.push(Lane { channel: 0, steps: vec![] });
            }
            lanes[0].steps.splice(0..0, kept);
        }
        let (parts, span, scratch_segments) = (plan.parts, ran.span, ran.scratch_segments);
        programs.push(Program { parts, span, scratch_segments, lanes });
        owners.push(roots);
    }
    (programs, owners)
}

/// Disjoint sets of threadblocks.
#[derive(Debug, Clone)]
struct Sets {
    of: Vec<usize>,
}

impl Sets {
    fn new(count: usize) -> Sets {
        Sets { of: (0..count).collect() }
    }

    fn find(&mut self, mut at: usize) -> usize {
        while self.of[at] != at {
            self.of[at] = self.of[self.of[at]];
            at = self.of[at];
        }
        at
    }

    /// Returns false if they were one set already.
    fn join(&mut self, a: usize, b: usize) -> bool {
        let (a, b) = (self.find(a), self.find(b));
        self.of[a.max(b)] = a.min(b);
        a != b
    }
}
