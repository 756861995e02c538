//! Hierarchical: over memory inside each host, and over the network between ranks with the same place on their hosts.
//!
//! all_reduce on two hosts of three ranks. Each rank carries its share of the window, a *lane*, over the network:
//! ```text
//!                 host 0                      host 1
//!           rank 0  rank 1  rank 2      rank 3  rank 4  rank 5
//! inside    sum 0   sum 1   sum 2       sum 0   sum 1   sum 2        each rank adds its host's inputs of its lane
//! between   sum 0  <----------------->  sum 0                        ring over the hosts, one for each lane
//!                   sum 1  <----------------->  sum 1
//!                           sum 2  <----------------->  sum 2
//! inside    0 1 2   0 1 2   0 1 2       0 1 2   0 1 2   0 1 2        each rank sends its lane to its host's others
//! ```
//! A lane is cut into a part for each host. A long window has several groups of parts, which share one channel: the
//! steps of two groups alternate, so that one is on the network while the other is in memory. There are as many lanes
//! as the smallest host has ranks. The other ranks of a larger host work inside only: in reduce_scatter and all_gather
//! the rank whose place is theirs, modulo the lanes, carries their segments.
//!
//! | collective | hops, n ranks on h hosts | bytes that enter and leave a host of m ranks (S: bytes of a segment) |
//! |---|---|---|
//! | all_reduce, barrier | 2h | 2(h-1)/h · S |
//! | reduce_scatter, all_gather | h; more where hosts differ | (n-m) · S, or n/h · (h-1) · S where they do not |
//! | broadcast, reduce | h+1 | S; a chain over the hosts |
//!
//! A ring over all ranks takes 2(n-1)/n · S over one connection of a host; here all ranks' connections share less. Sums
//! are made in one order for all ranks, but not in rank order.
//!
//! Sources: NCCL's `collnet` and `nvls_tree` (one rank of a host for each network port); A. Sergeev and M. Del Balso,
//! "Horovod" (2018), its hierarchical all_reduce; Blink (Wang et al., MLSys 2020) for several hosts.

use super::{Hosts, Shape};
use crate::schedule::{Lane, Loc, Partition, Program, Step, joined};
use crate::wire::Collective;

/// Returns true if there is a program: several hosts, one of them with several ranks.
pub fn supports(shape: &Shape, hosts: &Hosts) -> bool {
    let known = matches!(
        shape.collective,
        Collective::AllReduce
            | Collective::Barrier
            | Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Broadcast
            | Collective::Reduce
    );
    known && shape.is_valid() && hosts.ranks() == shape.ranks && (2..shape.ranks).contains(&hosts.count())
}

/// Most groups that a call is cut into, if no more channels are asked for. A window's first inputs are added, and its
/// last results handed on, while the network is idle: more groups make these shorter.
const MOST_GROUPS: usize = 8;

/// `shape` with a channel for each group of parts of a call with segments of `bytes` bytes and messages of at most
/// `message` bytes: as many as fill a window.
pub fn widened(shape: &Shape, hosts: &Hosts, bytes: usize, message: usize) -> Shape {
    let windows = Partition::new(bytes, 1, parts(shape, hosts), message).windows();
    Shape { channels: shape.channels.max(windows.min(MOST_GROUPS)), ..*shape }
}

/// Parts per window.
pub fn parts(shape: &Shape, hosts: &Hosts) -> usize {
    let lanes = hosts.sizes().0.max(1);
    shape.channels
        * match shape.collective {
            Collective::ReduceScatter | Collective::AllGather => 1,
            Collective::Broadcast | Collective::Reduce => lanes,
            _ => lanes * hosts.count(),
        }
}

/// The program of `rank`.
pub(super) fn program(shape: &Shape, hosts: &Hosts, rank: usize) -> Option<Program> {
    if !supports(shape, hosts) {
        return None;
    }
    let stages = |group: usize| {
        let view = View::new(shape, hosts, rank, group)?;
        Some(match shape.collective {
            Collective::ReduceScatter => view.reduce_scatter(),
            Collective::AllGather => view.all_gather(),
            Collective::Broadcast => vec![view.broadcast()?],
            Collective::Reduce => vec![view.reduce()?],
            _ => in_a_row(view.reduce_scatter(), view.all_gather()),
        })
    };
    let groups = (0..shape.channels).map(stages).collect::<Option<Vec<_>>>()?;
    let steps = match shape.is_all_reduce() {
        // From the last part that arrives to the first one that is sent, another group sends.
        true => alternating(groups, hosts.count()),
        false => alternating(groups, 0),
    };
    // A step that passes a message on needs room for it while it still has the one that came. With a message of each of
    // two groups on every link of the ring there is none.
    let full = shape.channels > 1 && hosts.count() > 2;
    let other = |peer: usize| hosts.place(peer).map(|place| place.0) != hosts.place(rank).map(|place| place.0);
    let lanes = vec![Lane { channel: 0, steps: joined(steps, |from, to| !(full && other(from) && other(to))) }];
    let scratch_segments = match shape.collective {
        Collective::ReduceScatter | Collective::Reduce => 1,
        _ => 0,
    };
    Some(Program { parts: parts(shape, hosts), span: 1, scratch_segments, lanes })
}

/// Steps between two waits for the network.
type Stage = Vec<Step>;

/// The second list behind the first, without a border between them.
fn in_a_row(mut first: Vec<Stage>, second: Vec<Stage>) -> Vec<Stage> {
    let mut second = second.into_iter();
    if let Some(last) = first.last_mut() {
        last.extend(second.next().into_iter().flatten());
    }
    first.extend(second);
    first
}

/// Every other group in one sequence of stages, the rest in another one, and the stages of both in turn: then a message
/// of each is on the network, which every link holds. The second sequence begins `behind` stages after the first; 0: it
/// begins after one, and in a sequence a group's first stage follows the last one of the group before at once.
fn alternating(groups: Vec<Vec<Stage>>, behind: usize) -> Vec<Step> {
    let mut sequences: [Vec<Stage>; 2] = Default::default();
    for (at, group) in groups.into_iter().enumerate() {
        let sequence = &mut sequences[at % 2];
        match behind {
            0 => *sequence = in_a_row(std::mem::take(sequence), group),
            _ => sequence.extend(group),
        }
    }
    let [first, second] = sequences;
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut steps: Vec<Step> = first.by_ref().take(behind.max(1)).flatten().collect();
    loop {
        let both = [second.next(), first.next()];
        if both.iter().all(Option::is_none) {
            return steps;
        }
        steps.extend(both.into_iter().flatten().flatten());
    }
}

/// One group from the view of one rank. An *item* is what travels as one: a part of a lane in all_reduce, else the
/// segment of a rank. It has a lane, a host, and a slot if the lane has several segments of that host.
struct View<'a> {
    shape: &'a Shape,
    hosts: &'a Hosts,
    group: usize,
    rank: usize,
    host: usize,
    place: usize,
    /// Ranks of our host.
    mates: &'a [usize],
    /// Lanes: places from here on carry none.
    lanes: usize,
}

/// An item.
#[derive(Debug, Clone, Copy)]
struct Item {
    lane: usize,
    host: usize,
    slot: usize,
}

impl<'a> View<'a> {
    fn new(shape: &'a Shape, hosts: &'a Hosts, rank: usize, group: usize) -> Option<View<'a>> {
        let (host, place) = hosts.place(rank)?;
        Some(View { shape, hosts, group, rank, host, place, mates: hosts.on(host), lanes: hosts.sizes().0 })
    }

    /// True if this rank carries a lane.
    fn carries(&self) -> bool {
        self.place < self.lanes
    }

    /// The rank that carries our lane on the host `ahead` of ours, modulo their number.
    fn carrier(&self, ahead: usize) -> usize {
        self.hosts.on((self.host + ahead) % self.hosts.count())[self.place]
    }

    fn next(&self) -> usize {
        self.carrier(1)
    }

    fn prev(&self) -> usize {
        self.carrier(self.hosts.count() - 1)
    }

    /// Slots of a host's items in a lane, at most.
    fn slots(&self) -> usize {
        if self.shape.is_all_reduce() { 1 } else { self.hosts.sizes().1.div_ceil(self.lanes) }
    }

    /// True if there is such an item.
    fn has(&self, item: Item) -> bool {
        item.lane < self.lanes && item.lane + item.slot * self.lanes < self.hosts.on(item.host).len()
    }

    /// The rank whose segment it is; in all_reduce the one that finishes the part.
    fn owner(&self, item: Item) -> usize {
        self.hosts.on(item.host)[item.lane + item.slot * self.lanes]
    }

    /// True if another rank carries our segment, in this slot.
    fn brings(&self, slot: usize) -> bool {
        !self.carries() && self.place / self.lanes == slot && !self.shape.is_all_reduce()
    }

    /// The part of an item of all_reduce.
    fn part(&self, item: Item) -> usize {
        (self.group * self.lanes + item.lane) * self.hosts.count() + item.host
    }

    /// Our contribution to the sum.
    fn input(&self, item: Item) -> Loc {
        match self.shape.is_all_reduce() {
            true => Loc::input(0, self.part(item)),
            false => Loc::input(self.owner(item), self.group),
        }
    }

    /// Sums that are not finished.
    fn sum(&self, item: Item) -> Loc {
        if self.shape.is_all_reduce() { Loc::output(0, self.part(item)) } else { Loc::scratch(0, self.group) }
    }

    /// The gathered data.
    fn gathered(&self, item: Item) -> Loc {
        match self.owner(item) {
            _ if self.shape.is_all_reduce() => Loc::output(0, self.part(item)),
            owner if owner == self.rank => Loc::input(0, self.group),
            owner => Loc::output(owner, self.group),
        }
    }

    /// One message to each other rank of our host for which `send` has something, and one from each for which `recv`
    /// has a step. A link holds them, so all are sent before the first is received.
    fn inside(
        &self,
        steps: &mut Vec<Step>,
        send: impl Fn(usize) -> Option<Loc>,
        mut recv: impl FnMut(usize) -> Option<Step>,
    ) {
        let others = self.mates.len();
        let to = (1..others).map(|k| (self.place + k) % others);
        steps.extend(to.filter_map(|place| Some(Step::send(self.mates[place], send(place)?))));
        steps.extend((1..others).filter_map(|k| recv((self.place + others - k) % others)));
    }

    /// Adds our host's inputs in the lanes of those who carry them: `input` by lane, into `sum`. Returns the place of
    /// our lane's sum, if we carry one.
    fn add(&self, steps: &mut Vec<Step>, input: impl Fn(usize) -> Option<Loc>, sum: Loc) -> Option<Loc> {
        let mut own = if self.carries() { input(self.place) } else { None };
        self.inside(steps, &input, |from| {
            let step = Step::recv_reduce_copy(self.mates[from], own?, sum, false);
            own = Some(sum);
            Some(step)
        });
        own
    }

    fn reduce_scatter(&self) -> Vec<Stage> {
        let (mut stages, hosts) = (Vec::new(), self.hosts.count());
        for slot in 0..self.slots() {
            // A sum begins at the host behind its own and ends at its own.
            for behind in 1..=hosts {
                let mut steps = Vec::new();
                let item = |lane| Item { lane, host: (self.host + hosts - behind) % hosts, slot };
                let input = |lane| self.has(item(lane)).then(|| self.input(item(lane)));
                let ours = item(self.place);
                if let Some(own) = self.add(&mut steps, input, self.sum(ours)) {
                    self.pass_on(&mut steps, ours, own, behind);
                }
                if behind == hosts && self.brings(slot) {
                    steps.push(Step::recv(self.mates[self.place % self.lanes], Loc::output(0, self.group)));
                }
                stages.push(steps);
            }
        }
        stages
    }

    /// The step of a sum over the hosts at ours; `own` is our host's.
    fn pass_on(&self, steps: &mut Vec<Step>, item: Item, own: Loc, behind: usize) {
        let sum = self.sum(item);
        if behind == 1 {
            steps.push(Step::send(self.next(), own));
        } else if behind < self.hosts.count() {
            steps.extend([Step::recv_reduce_copy(self.prev(), own, sum, false), Step::send(self.next(), sum)]);
        } else {
            let owner = self.owner(item);
            let result = match owner == self.rank && !self.shape.is_all_reduce() {
                true => Loc::output(0, self.group),
                false => sum,
            };
            steps.push(Step::recv_reduce_copy(self.prev(), own, result, true));
            if owner != self.rank {
                steps.push(Step::send(owner, result));
            }
        }
    }

    fn all_gather(&self) -> Vec<Stage> {
        let (mut stages, hosts) = (Vec::new(), self.hosts.count());
        for slot in 0..self.slots() {
            for behind in 0..hosts {
                let mut steps = Vec::new();
                let item = |lane| Item { lane, host: (self.host + hosts - behind) % hosts, slot };
                let ours = item(self.place);
                let carried = self.carries() && self.has(ours);
                // A segment of another rank of our host comes from it, and is not sent back.
                let owner = |item: Item| self.owner(item);
                if behind == 0 && self.brings(slot) {
                    steps.push(Step::send(self.mates[self.place % self.lanes], Loc::input(0, self.group)));
                }
                if carried {
                    let value = self.gathered(ours);
                    match behind {
                        0 if owner(ours) != self.rank => steps.push(Step::recv(owner(ours), value)),
                        0 => {}
                        _ => steps.push(Step::recv(self.prev(), value)),
                    }
                    if behind + 1 < hosts {
                        steps.push(Step::send(self.next(), value));
                    }
                }
                let send = |to: usize| (carried && self.mates[to] != owner(ours)).then(|| self.gathered(ours));
                self.inside(&mut steps, send, |from| {
                    let item = item(from);
                    let comes = self.has(item) && owner(item) != self.rank;
                    comes.then(|| Step::recv(self.mates[from], self.gathered(item)))
                });
                stages.push(steps);
            }
        }
        if !self.shape.is_all_reduce() {
            let copy = Step::Copy { src: Loc::input(0, self.group), dst: Loc::output(self.rank, self.group) };
            // While the first segments are on the network.
            stages.first_mut().into_iter().for_each(|stage: &mut Stage| stage.push(copy));
        }
        stages
    }

    /// The part of a lane of broadcast and reduce.
    fn lane(&self, lane: usize) -> usize {
        self.group * self.lanes + lane
    }

    /// The root's place on its host, and the hosts by which ours is behind that.
    fn root(&self) -> Option<(usize, usize)> {
        let (host, place) = self.hosts.place(self.shape.root)?;
        let hosts = self.hosts.count();
        Some((place, (self.host + hosts - host) % hosts))
    }

    fn broadcast(&self) -> Option<Vec<Step>> {
        let (root, behind) = self.root()?;
        let (is_root, hosts) = (self.rank == self.shape.root, self.hosts.count());
        let mut steps = Vec::new();
        let value = |lane| match is_root {
            true => Loc::input(0, self.lane(lane)),
            false => Loc::output(0, self.lane(lane)),
        };
        if is_root {
            let others = (0..self.lanes).filter(|&lane| lane != self.place);
            steps.extend(others.map(|lane| Step::send(self.mates[lane], value(lane))));
        }
        if self.carries() {
            let value = value(self.place);
            if behind > 0 {
                steps.push(Step::recv(self.prev(), value));
            } else if !is_root {
                steps.push(Step::recv(self.shape.root, value));
            }
            if behind + 1 < hosts {
                steps.push(Step::send(self.next(), value));
            }
        }
        let has = |place: usize| behind == 0 && place == root;
        let send = |to: usize| (self.carries() && !has(to)).then(|| value(self.place));
        let recv = |from: usize| (from < self.lanes && !is_root).then(|| Step::recv(self.mates[from], value(from)));
        self.inside(&mut steps, send, recv);
        if is_root {
            let copy = |lane| Step::Copy { src: value(lane), dst: Loc::output(0, self.lane(lane)) };
            steps.extend((0..self.lanes).map(copy));
        }
        Some(steps)
    }

    fn reduce(&self) -> Option<Vec<Step>> {
        let (_, behind) = self.root()?;
        let is_root = self.rank == self.shape.root;
        let mut steps = Vec::new();
        let part = self.lane(self.place.min(self.lanes - 1));
        let sum = if is_root { Loc::output(0, part) } else { Loc::scratch(0, part) };
        let input = |lane: usize| (lane < self.lanes).then(|| Loc::input(0, self.lane(lane)));
        if let Some(own) = self.add(&mut steps, input, sum) {
            // The chain begins at the host after the root's and ends there.
            if behind != 1 {
                steps.push(Step::recv_reduce_copy(self.prev(), own, sum, behind == 0));
            }
            match behind {
                0 if is_root => {}
                0 => steps.push(Step::send(self.shape.root, sum)),
                1 => steps.push(Step::send(self.next(), own)),
                _ => steps.push(Step::send(self.next(), sum)),
            }
        }
        if is_root {
            let others = (0..self.lanes).filter(|&lane| lane != self.place);
            steps.extend(others.map(|lane| Step::recv(self.mates[lane], Loc::output(0, self.lane(lane)))));
        }
        Some(steps)
    }
}

#[cfg(test)]
mod tests;
