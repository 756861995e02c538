//! Orders of steps: one that all ranks can take, and the fewest dependencies between threadblocks that keep it where
//! memory needs that, beside the order that messages give.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use super::threads::{Cell, Op, Thread, Threads};
use crate::error::{Error, Result};
use crate::schedule::{Program, Step};

/// A step of a rank, by its place among all steps.
type Node = usize;

/// Sets what every step waits for, so that accesses of a rank to the same memory keep the order of `sequence`, which
/// lists all steps: (rank, threadblock, step).
///
/// # Errors
/// The steps wait for each other.
pub(super) fn depend(plan: &mut Threads, sequence: &[(usize, usize, usize)]) -> Result<()> {
    plan.fits(sequence.len(), plan.ranks.iter().map(Vec::len).sum())?;
    let nodes: HashMap<(usize, usize, usize), Node> = sequence.iter().enumerate().map(|(n, &at)| (at, n)).collect();
    let op = |node: Node| {
        let (rank, thread, op) = sequence[node];
        &plan.ranks[rank][thread].ops[op]
    };
    let conflicts = conflicts(plan, sequence);
    // Every step behind the one before it, behind the message that it receives, and behind what it conflicts with.
    let mut before: Vec<Vec<Node>> = conflicts.clone();
    let mut sends: HashMap<usize, Vec<Node>> = HashMap::new();
    let mut receives: HashMap<usize, Vec<Node>> = HashMap::new();
    for (rank, threads) in plan.ranks.iter().enumerate() {
        for (thread, block) in threads.iter().enumerate() {
            for at in 0..block.ops.len() {
                let Some(&node) = nodes.get(&(rank, thread, at)) else { continue };
                if let Some(&previous) = at.checked_sub(1).and_then(|at| nodes.get(&(rank, thread, at))) {
                    before[node].push(previous);
                }
                let step = op(node).step.as_ref();
                if let Some(conn) = step.and_then(Step::to) {
                    sends.entry(conn).or_default().push(node);
                }
                if let Some(conn) = step.and_then(Step::from) {
                    receives.entry(conn).or_default().push(node);
                }
            }
        }
    }
    let mut message: HashMap<Node, Node> = HashMap::new();
    for (conn, receives) in &receives {
        message.extend(receives.iter().copied().zip(sends.get(conn).into_iter().flatten().copied()));
    }
    message.iter().for_each(|(&receive, &send)| before[receive].push(send));
    let order = sorted(&before).ok_or_else(|| Error::invalid(plan.format, "the steps wait for each other"))?;

    // What has happened before each step: the number of steps of every threadblock.
    let mut places = HashMap::new();
    let place: Vec<usize> = sequence
        .iter()
        .map(|&(rank, thread, _)| {
            let next = places.len();
            *places.entry((rank, thread)).or_insert(next)
        })
        .collect();
    let mut position = vec![0; sequence.len()];
    order.iter().enumerate().for_each(|(at, &node)| position[node] = at);
    let nothing: Rc<[u32]> = vec![0; places.len()].into();
    let mut clocks: Vec<Rc<[u32]>> = vec![Rc::clone(&nothing); sequence.len()];
    let mut now: Vec<Rc<[u32]>> = vec![Rc::clone(&nothing); places.len()];
    // A clock is needed until everything behind its step is done.
    let mut needed = vec![0usize; sequence.len()];
    before.iter().flatten().for_each(|&node| needed[node] += 1);
    for node in order {
        let (rank, thread, at) = sequence[node];
        let mut clock = now[place[node]].to_vec();
        let join = |clock: &mut Vec<u32>, other: &[u32]| {
            clock.iter_mut().zip(other).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
        };
        if let Some(&send) = message.get(&node) {
            join(&mut clock, &clocks[send]);
        }
        let mut after = Vec::new();
        let mut candidates = conflicts[node].clone();
        candidates.sort_by_key(|&other| std::cmp::Reverse(position[other]));
        for other in candidates {
            let (_, block, number) = sequence[other];
            if block != thread && (clock[place[other]] as usize) <= number {
                after.push((block, number));
                join(&mut clock, &clocks[other]);
            }
        }
        clock[place[node]] = at as u32 + 1;
        plan.ranks[rank][thread].ops[at].after = after;
        clocks[node] = clock.into();
        now[place[node]] = Rc::clone(&clocks[node]);
        for &other in &before[node] {
            needed[other] -= 1;
            if needed[other] == 0 {
                clocks[other] = Rc::clone(&nothing);
            }
        }
    }
    Ok(())
}

/// The steps of proved programs in an order in which ranks can take them: (rank, lane, step). In each round every lane
/// takes at most one.
pub(super) fn played(programs: &[Program]) -> Vec<(usize, usize, Step)> {
    let mut next: Vec<Vec<usize>> = programs.iter().map(|program| vec![0; program.lanes.len()]).collect();
    // Rounds in which the messages of each link were sent.
    let mut links: HashMap<(u32, usize, usize), VecDeque<usize>> = HashMap::new();
    let mut order = Vec::new();
    for round in 0.. {
        let before = order.len();
        for (rank, program) in programs.iter().enumerate() {
            for (l, lane) in program.lanes.iter().enumerate() {
                let Some(&step) = lane.steps.get(next[rank][l]) else { continue };
                if let Some(from) = step.source() {
                    let link = links.entry((lane.channel, from, rank)).or_default();
                    if link.front().is_none_or(|&sent| sent == round) {
                        continue;
                    }
                    link.pop_front();
                }
                if let Some(to) = step.destination() {
                    links.entry((lane.channel, rank, to)).or_default().push_back(round);
                }
                next[rank][l] += 1;
                order.push((rank, l, step));
            }
        }
        if order.len() == before {
            break;
        }
    }
    order
}

/// These steps in threadblocks of which each has the steps of one link alone (two, if a step receives from one and
/// sends into the other), with the dependencies that keep the order of `sequence` where memory needs it.
///
/// # Errors
/// As [`depend`].
pub(super) fn loosened(plan: &Threads, sequence: &[(usize, usize, usize)]) -> Result<Threads> {
    let mut ranks = Vec::new();
    let mut conns = plan.conns.clone();
    let mut moved: HashMap<(usize, usize, usize), (usize, usize, usize)> = HashMap::new();
    for (rank, threads) in plan.ranks.iter().enumerate() {
        let mut loose: Vec<Thread> = Vec::new();
        for (t, thread) in threads.iter().enumerate() {
            // Of each link another one that it shares a step with, if there is one.
            let mut root: HashMap<usize, usize> = HashMap::new();
            let find = |root: &HashMap<usize, usize>, mut conn: usize| {
                while let Some(&next) = root.get(&conn).filter(|next| **next != conn) {
                    conn = next;
                }
                conn
            };
            for step in thread.ops.iter().filter_map(|op| op.step.as_ref()) {
                if let (Some(from), Some(to)) = (step.from(), step.to()) {
                    let (from, to) = (find(&root, from), find(&root, to));
                    root.insert(from, to);
                }
            }
            let mut places: HashMap<Option<usize>, usize> = HashMap::new();
            for (o, op) in thread.ops.iter().enumerate() {
                let step = op.step.as_ref();
                let conn = step.and_then(|step| step.from().or(step.to())).map(|conn| find(&root, conn));
                let place = *places.entry(conn).or_insert_with(|| {
                    loose.push(Thread { id: thread.id, ops: vec![] });
                    loose.len() - 1
                });
                if let Some(conn) = step.and_then(Step::from) {
                    conns[conn].to = (rank, place);
                }
                if let Some(conn) = step.and_then(Step::to) {
                    conns[conn].from = (rank, place);
                }
                moved.insert((rank, t, o), (rank, place, loose[place].ops.len()));
                loose[place].ops.push(Op { after: vec![], ..op.clone() });
            }
        }
        ranks.push(loose);
    }
    let mut loose = Threads { ranks, conns, scratch: plan.scratch.clone(), ..*plan };
    let sequence: Vec<_> = sequence.iter().filter_map(|at| moved.get(at)).copied().collect();
    depend(&mut loose, &sequence)?;
    Ok(loose)
}

/// By step, the steps of other threadblocks of the rank whose accesses have to be before it.
fn conflicts(plan: &Threads, sequence: &[(usize, usize, usize)]) -> Vec<Vec<Node>> {
    #[derive(Default)]
    struct Access {
        writer: Option<Node>,
        readers: Vec<Node>,
    }
    let mut memory: HashMap<(usize, usize), Access> = HashMap::new();
    let mut conflicts = vec![Vec::new(); sequence.len()];
    for (node, &(rank, thread, at)) in sequence.iter().enumerate() {
        let op = &plan.ranks[rank][thread].ops[at];
        let Some(step) = op.step.as_ref() else { continue };
        let other = |&other: &Node| sequence[other].1 != thread;
        for chunk in 0..op.count {
            let places = [step.read(), step.write()].map(|cell| {
                let cell = cell?;
                Some((rank, plan.place(rank, Cell { chunk: cell.chunk + chunk, ..cell })))
            });
            if let Some(place) = places[0] {
                let access = memory.entry(place).or_default();
                conflicts[node].extend(access.writer.filter(other));
                access.readers.push(node);
            }
            if let Some(place) = places[1] {
                let access = memory.entry(place).or_default();
                conflicts[node].extend(access.readers.iter().copied().chain(access.writer).filter(other));
                *access = Access { writer: Some(node), readers: vec![] };
            }
        }
        conflicts[node].sort_unstable();
        conflicts[node].dedup();
    }
    conflicts
}

/// All nodes, each behind those that are before it.
fn sorted(before: &[Vec<Node>]) -> Option<Vec<Node>> {
    let mut left: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut behind: Vec<Vec<Node>> = vec![vec![]; before.len()];
    for (node, all) in before.iter().enumerate() {
        all.iter().for_each(|&other| behind[other].push(node));
    }
    let mut ready: VecDeque<Node> = (0..before.len()).filter(|&node| left[node] == 0).collect();
    let mut order = Vec::with_capacity(before.len());
    while let Some(node) = ready.pop_front() {
        order.push(node);
        for &next in &behind[node] {
            left[next] -= 1;
            if left[next] == 0 {
                ready.push_back(next);
            }
        }
    }
    (order.len() == before.len()).then_some(order)
}
