//! Order of the calls that run together, on each link that they share.
//!
//! Messages of a link have one order: those of an earlier call come before those of a later one, at both ends. A call
//! holds each direction of a link from its first message to its last, and no longer. So a later call sends while an
//! earlier one still receives, and calls that share no link do not affect each other.
//!
//! There is no deadlock: the first incomplete call in program order is next on every link that it still needs, on every
//! rank, and no other call's messages are before its own. So it advances as if alone.

use super::Task;
use super::plan::Instruction;

/// For each direction of each link, the tasks that use it, in order, and which of them is next.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Task indices, those of one direction of one link together.
    queue: Vec<u32>,
    /// Position in `queue` of the task that uses the link now, by direction and link: receiving, then sending.
    heads: Vec<u32>,
    links: usize,
}

impl Order {
    /// The order of `tasks` over `links` links.
    pub(super) fn set(&mut self, tasks: &[Task<'_>], links: usize) {
        self.links = links;
        self.heads.clear();
        self.heads.resize(2 * links, 0);
        // By the rule that one lane of a call owns a direction of a link, the last uses of a call count its links.
        let mut total = 0;
        for_each_use(tasks, links, |_, slot| {
            self.heads[slot] += 1;
            total += 1;
        });
        let mut start = 0;
        for head in &mut self.heads {
            (start, *head) = (start + *head, start);
        }
        self.queue.clear();
        self.queue.resize(total, 0);
        for_each_use(tasks, links, |task, slot| {
            self.queue[self.heads[slot] as usize] = task;
            self.heads[slot] += 1;
        });
        // Every head is now where the next one starts.
        self.heads.insert(0, 0);
        self.heads.pop();
    }

    /// True if `task` may perform `instruction` now.
    #[inline]
    pub(super) fn is_turn_of(&self, task: usize, instruction: &Instruction) -> bool {
        instruction.recv().is_none_or(|link| self.holds(task, link))
            && instruction.send().is_none_or(|link| self.holds(task, self.links + link))
    }

    /// `instruction` was performed for the last time in its call.
    #[inline]
    pub(super) fn pass_on(&mut self, instruction: &Instruction) {
        for slot in last_uses(instruction, self.links) {
            self.heads[slot] += 1;
        }
    }

    /// True if `task` uses a direction of a link now. After the last task of a link comes another link's first one, but
    /// it is never read: all users of the link are done.
    #[inline]
    fn holds(&self, task: usize, slot: usize) -> bool {
        self.queue.get(self.heads[slot] as usize).is_some_and(|&holder| holder as usize == task)
    }
}

/// The directions of links that an instruction uses last in its call.
#[inline]
fn last_uses(instruction: &Instruction, links: usize) -> impl Iterator<Item = usize> {
    let recv = instruction.recv().filter(|_| instruction.last_recv);
    let send = instruction.send().filter(|_| instruction.last_send);
    recv.into_iter().chain(send.map(|link| links + link))
}

/// Calls `f` with each task and each direction of a link that it uses, tasks in order.
fn for_each_use(tasks: &[Task<'_>], links: usize, mut f: impl FnMut(u32, usize)) {
    for (index, task) in tasks.iter().enumerate() {
        for instruction in &task.plan.instructions {
            last_uses(instruction, links).for_each(|slot| f(index as u32, slot));
        }
    }
}
