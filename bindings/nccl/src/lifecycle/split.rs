//! Communicators from communicators: split, shrink, grow.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::init;
use super::start::{begin, with_gpu};
use crate::abi::config::Options;
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::abi::{self, Status};
use crate::comm::communicator::{Communicator, Connected, Phase};
use crate::comm::handle::{self, Handle};
use crate::rendezvous::client::Lookup;
use crate::rendezvous::id::{Id, NO_NUMBER};
use crate::rendezvous::{join, unique_id};
use crate::submit::group;

/// Returns the parts of a communicator that has started. Jobs use this, not [`Communicator::ready`]: they run when the
/// communicator may be busy.
fn connected(comm: &Communicator) -> Result<&Connected> {
    comm.connected().ok_or_else(|| Error::argument(format!("communicator {} has not started", comm.name())))
}

/// The options of a communicator that is made from `parent`: the parent's, unless there is a configuration.
///
/// # Safety
/// As [`Options::of`].
unsafe fn options(parent: &Communicator, config: *const abi::Config) -> Result<Options> {
    let inherited = Options { name: None, ..parent.options().clone() };
    let otherwise = if config.is_null() { inherited } else { Options::standard() };
    // SAFETY: forwarded from the caller.
    unsafe { Options::of(config, &otherwise) }
}

fn split(comm: Handle, color: c_int, key: c_int, new: *mut Handle, config: *const abi::Config) -> Result<Status> {
    let parent = handle::handle(comm)?;
    parent.parent()?;
    let checked = (|| {
        // SAFETY: NULL or the caller's variable.
        let new = unsafe { out("newcomm", new) }?;
        *new = std::ptr::null_mut();
        let color = match u32::try_from(color) {
            Err(_) if color != abi::NO_COLOR => {
                Err(Error::argument(format!("color is {color}, expected 0 or more, or -1 (NCCL_SPLIT_NOCOLOR)")))
            }
            other => Ok(other.ok()),
        }?;
        // SAFETY: as NCCL requires: NULL, or initialised.
        Ok((new, color, unsafe { options(&parent, config) }?))
    })();
    let refuse = {
        let parent = parent.clone();
        move |why: &Error| refused(&parent, |parts| parts.host.refuse_split(&why.text))
    };
    // In a group the other jobs are refused first, as the other ranks run them first.
    let (new, color, options) = match checked {
        Ok(checked) => checked,
        Err(error) if group::is_open() => return group::refuse_later(&parent, error, refuse),
        Err(error) => {
            refuse(&error);
            return Err(error);
        }
    };
    let broken = || Error::internal("the split gave the wrong ranks");
    let Some(color) = color else {
        let run = move |parent: &Arc<Communicator>| match connected(parent)?.host.split(None, key)? {
            None => Ok(()),
            Some(_) => Err(broken()),
        };
        return group::submit_on(&parent, run, refuse);
    };
    let comm = Communicator::starting(options, parent.ordinal(), None);
    let from = parent.clone();
    let connect = move |comm: &Arc<Communicator>| {
        let host = connected(&from)?.host.split(Some(color), key)?.ok_or_else(broken)?;
        with_gpu(host, comm)
    };
    begin(new, comm, Some(&parent), connect, refuse)
}

/// Notifies the other ranks of a communicator that this one does not take part.
fn refused(parent: &Communicator, notify: impl FnOnce(&Connected) -> tinynccl::Result<()>) {
    if let Some(Err(error)) = parent.connected().map(notify) {
        log::debug!("communicator {}: the other ranks were not notified: {error}", parent.name());
    }
}

/// Returns the new rank of `rank` among `size` ranks without `excluded`, the new size, and the first rank that stays.
fn remaining(rank: usize, size: usize, excluded: &[c_int]) -> Result<(usize, usize, usize)> {
    let mut out: Vec<usize> = Vec::new();
    for &one in excluded {
        let one = usize::try_from(one).ok().filter(|&one| one < size);
        let one =
            one.ok_or_else(|| Error::argument(format!("excludeRanksList: expected ranks from 0 to {}", size - 1)))?;
        out.push(one);
    }
    out.sort_unstable();
    out.dedup();
    if out.binary_search(&rank).is_ok() {
        return Err(Error::argument(format!(
            "rank {rank} is to be excluded: only the ranks that stay call ncclCommShrink"
        )));
    }
    let before = out.partition_point(|&one| one < rank);
    let first = (0..size).find(|one| out.binary_search(one).is_err()).unwrap_or(rank);
    Ok((rank - before, size - out.len(), first))
}

fn shrink(
    comm: Handle,
    excluded: &[c_int],
    new: *mut Handle,
    config: *const abi::Config,
    flags: c_int,
) -> Result<Status> {
    // SAFETY: NULL or the caller's variable.
    let new = unsafe { out("newcomm", new) }?;
    *new = std::ptr::null_mut();
    let parent = handle::handle(comm)?;
    match flags {
        abi::SHRINK_DEFAULT => drop(parent.parent()?),
        abi::SHRINK_ABORT => {
            connected(&parent)?.device.abort();
            if parent.phase() == Phase::Ready {
                parent.enter(Phase::Revoked);
            }
        }
        _ => return Err(Error::argument(format!("shrinkFlags is {flags}, expected 0 or 1 (NCCL_SHRINK_ABORT)"))),
    }
    let (rank, size) = parent.rank_and_size()?;
    let (rank, size, first) = remaining(rank, size, excluded)?;
    // SAFETY: as NCCL requires: NULL, or initialised.
    let options = unsafe { options(&parent, config) }?;
    let config = options.settings()?;
    let comm = Communicator::starting(options, parent.ordinal(), Some((rank, size)));
    // The excluded ranks, and the store with one of them, may be dead: the others use a new one.
    let mut purpose = parent.next_derived().to_le_bytes().to_vec();
    purpose.extend(excluded.iter().flat_map(|rank| rank.to_le_bytes()));
    let from = parent.clone();
    let connect = move |comm: &Arc<Communicator>| {
        let roster = &connected(&from)?.roster;
        let addresses = &roster.listeners[first];
        let lookup = Lookup { addresses, name: roster.token, number: NO_NUMBER, stays: true };
        let host = join::at_new_store(&roster.token, &purpose, lookup, (rank, size), config, &|| comm.is_stopped())?;
        with_gpu(host, comm)
    };
    begin(new, comm, Some(&parent), connect, |_| ())
}

fn grow(
    comm: Handle,
    size: c_int,
    id: *const abi::UniqueId,
    rank: c_int,
    new: *mut Handle,
    config: *const abi::Config,
) -> Result<Status> {
    // SAFETY: NULL or the caller's.
    let id = unsafe { id.as_ref() }.map(Id::decode).transpose();
    if comm.is_null() {
        let id =
            id?.ok_or_else(|| Error::argument("uniqueId is NULL: a new rank needs that of ncclCommGetUniqueId"))?;
        // SAFETY: as NCCL requires: NULL, or initialised.
        let options = unsafe { Options::of(config, &Options::standard()) }?;
        return init::by_id(new, size, &id.encode(), rank, options);
    }
    let parent = handle::handle(comm)?;
    parent.parent()?;
    let (own, before) = parent.rank_and_size()?;
    let checked = (|| {
        // SAFETY: NULL or the caller's variable.
        let new = unsafe { out("newcomm", new) }?;
        *new = std::ptr::null_mut();
        let size = usize::try_from(size).ok().filter(|&size| size > before);
        let size =
            size.ok_or_else(|| Error::argument(format!("nRanks is not above {before}, the ranks that are there")))?;
        if rank != -1 {
            return Err(Error::argument(format!("rank is {rank}, expected -1: ranks that are there keep theirs")));
        }
        // SAFETY: as NCCL requires: NULL, or initialised.
        let options = unsafe { options(&parent, config) }?;
        Ok((new, size, id?, options.settings()?, options))
    })();
    let what = format!("grow {}", parent.next_derived());
    let refuse = {
        let (parent, what) = (parent.clone(), what.clone());
        let word = move |why: &Error| [REFUSED, &own.to_string(), ": ", &why.text].concat();
        move |why: &Error| refused(&parent, |parts| parts.host.offer_bytes(&what, word(why).as_bytes()))
    };
    let (new, size, id, config, options) = match checked {
        Ok(checked) => checked,
        Err(error) => {
            refuse(&error);
            return Err(error);
        }
    };
    let comm = Communicator::starting(options, parent.ordinal(), Some((own, size)));
    let from = parent.clone();
    let connect = move |comm: &Arc<Communicator>| {
        let ours = id.map(|id| id.encode().internal.to_vec()).unwrap_or_default();
        let all = connected(&from)?.host.exchange_bytes(&what, &ours)?;
        let refusal = all.iter().find_map(|bytes| std::str::from_utf8(bytes).ok()?.strip_prefix(REFUSED));
        if let Some(why) = refusal {
            return Err(Error::argument(format!("a rank does not take part: {REFUSED}{why}")));
        }
        let given = all.iter().find_map(|bytes| bytes.as_slice().try_into().ok());
        let given = given.ok_or_else(|| {
            Error::argument("no rank gave a uniqueId: one of those that are there gives that of ncclCommGetUniqueId")
        })?;
        let id = Id::decode(&abi::UniqueId { internal: given })?;
        let host = join::by_id(&id, own, size, config, &|| comm.is_stopped())?;
        from.has_grow_id.store(false, Ordering::Release);
        with_gpu(host, comm)
    };
    begin(new, comm, Some(&parent), connect, refuse)
}

/// Prefix of the message of a rank that does not take part in a grow; no id begins so.
const REFUSED: &str = "rank ";

export! {
    /// Makes a communicator for each colour, its ranks ordered by `key`, then by their rank here. Every rank calls it;
    /// with `NCCL_SPLIT_NOCOLOR` it gets none. A NULL configuration is the parent's.
    fn ncclCommSplit / pncclCommSplit [comm] (
        comm: Handle, color: c_int, key: c_int, newcomm: *mut Handle, config: *const abi::Config,
    ) {
        group::recorded(split(comm, color, key, newcomm, config))
    }

    /// Makes a communicator without the ranks of a list; those that stay call it, and keep their order. With
    /// `NCCL_SHRINK_ABORT` the calls that wait end first, and the excluded ranks may be dead.
    fn ncclCommShrink / pncclCommShrink [comm] (
        comm: Handle, exclude: *const c_int, count: c_int, newcomm: *mut Handle, config: *const abi::Config,
        flags: c_int,
    ) {
        let excluded = match usize::try_from(count) {
            Ok(count) if count > 0 && !exclude.is_null() => {
                // SAFETY: the caller's array of `count` elements.
                Ok(unsafe { std::slice::from_raw_parts(exclude, count) })
            }
            _ => Err(Error::argument(format!("excludeRanksList is {exclude:p} of {count}, expected one rank or more"))),
        };
        group::recorded(excluded.and_then(|excluded| shrink(comm, excluded, newcomm, config, flags)))
    }

    /// Writes an id by which new ranks can join this communicator: `ncclCommGrow`. One at a time.
    fn ncclCommGetUniqueId / pncclCommGetUniqueId [comm] (comm: Handle, id: *mut abi::UniqueId) {
        // SAFETY: NULL or the caller's variable.
        let to = unsafe { out("uniqueId", id) }?;
        let comm = handle::handle(comm)?;
        comm.parent()?;
        if comm.has_grow_id.swap(true, Ordering::AcqRel) {
            return Err(Error::usage("the communicator has an id that no ncclCommGrow has used yet"));
        }
        *to = unique_id::new()?.encode();
        Ok(())
    }

    /// Makes a communicator of this one's ranks, which keep their numbers, and new ones. Ranks that are there: `rank`
    /// is -1, and one of them gives the id of `ncclCommGetUniqueId`. New ranks: `comm` is NULL, with id and rank.
    fn ncclCommGrow / pncclCommGrow [comm] (
        comm: Handle, nranks: c_int, id: *const abi::UniqueId, rank: c_int, newcomm: *mut Handle,
        config: *const abi::Config,
    ) {
        group::recorded(grow(comm, nranks, id, rank, newcomm, config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_stay_keep_their_order() {
        let all: Vec<_> = [1, 3, 4].map(|rank| remaining(rank, 5, &[2, 0, 2]).unwrap()).to_vec();
        assert_eq!(all, [(0, 3, 1), (1, 3, 1), (2, 3, 1)]);
        for (rank, excluded) in [(1, vec![1]), (0, vec![5]), (0, vec![-1])] {
            assert_eq!(remaining(rank, 5, &excluded).unwrap_err().status, Status::InvalidArgument);
        }
    }
}
