//! Groups of some of the ranks.

use std::sync::atomic::Ordering;

use super::{ProcessGroup, make};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};

impl ProcessGroup {
    /// A group of `ranks` (numbers in this group), in that order, with the same backend and GPUs; `None` for ranks not
    /// among them. Every rank of this group must call it, with the same list.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for invalid lists, and for lists that differ between ranks.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<ProcessGroup>> {
        let op = "new_group";
        let size = self.size();
        if ranks.is_empty() {
            return Err(Error::invalid(op, "no ranks: expected at least one"));
        }
        for (i, &rank) in ranks.iter().enumerate() {
            if rank >= size {
                return Err(Error::invalid(op, format!("rank {rank} of {ranks:?}: expected ranks below {size}")));
            }
            if ranks[..i].contains(&rank) {
                return Err(Error::invalid(op, format!("rank {rank} is twice in {ranks:?}")));
            }
        }
        let turn = self.groups.fetch_add(1, Ordering::Relaxed);
        let lists: Vec<Vec<usize>> = self.comm.exchange(&format!("new_group {turn}"), &ranks.to_vec())?;
        if let Some(other) = lists.iter().position(|list| list != ranks) {
            let detail = format!(
                "rank {} makes a group of {ranks:?}, rank {other} of {:?}: expected the same list on all ranks",
                self.rank(),
                lists[other]
            );
            return Err(Error::invalid(op, detail));
        }
        let place = ranks.iter().position(|&rank| rank == self.rank());
        let comm = self.comm.split(place.map(|_| 0), place.map_or(0, |place| place as i32))?;
        comm.map(|comm| self.child(comm)).transpose()
    }

    /// One group per colour, its ranks ordered by `key`, then by their rank here; `None` for ranks without a colour.
    /// Every rank of this group must call it.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<ProcessGroup>> {
        self.comm.split(color, key)?.map(|comm| self.child(comm)).transpose()
    }

    fn child(&self, comm: Comm) -> Result<ProcessGroup> {
        let kind = self.backend();
        let made = make::make(kind, &comm, self.backend.device().cloned());
        ProcessGroup::together(comm, made, kind, self.why.clone())
    }
}
