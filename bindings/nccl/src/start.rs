//! Making communicators by id: `ncclCommInitRank` and its relatives.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{self, Status};
use crate::config::Options;
use crate::export::{export, out};
use crate::fault::{Fault, Result};
use crate::group::{self, Job};
use crate::handle::{self, Handle};
use crate::id::{self, Id};
use crate::member::{Member, Ranks};
use crate::{gpu, leave, meet, settings};

/// Begins a communicator: gives the caller its handle, and does `ranks` now, at the end of the group, or in the
/// background. Errors of what is done now are the caller's; after them there is no handle.
/// `refuse` notifies the ranks of the parent that this one does not come.
pub(crate) fn begin(
    new: &mut Handle,
    member: Member,
    parent: Option<&Arc<Member>>,
    ranks: impl FnOnce(&Arc<Member>) -> Result<Ranks> + Send + 'static,
    refuse: impl FnOnce(&Fault) + Send + 'static,
) -> Result<Status> {
    let member = Arc::new(member);
    let comm = handle::new(member.clone());
    *new = comm;
    // As NCCL: the parent decides whether the caller waits, or without one the new communicator.
    let (own, blocking) = (member.clone(), parent.unwrap_or(&member).is_blocking());
    let stops: Vec<Arc<Member>> = parent.into_iter().chain([&member]).cloned().collect();
    let made = Unmade(own.clone());
    let run = move || {
        let _made = made;
        let outcome = meet::stoppable(stops, || ranks(&own));
        let met = outcome.as_ref().is_ok_and(|ranks| {
            leave::arrived(&ranks.roster.token);
            true
        });
        own.started(outcome).inspect_err(|_| {
            if met {
                leave::leave(own.clone(), Duration::ZERO);
            }
        })
    };
    // Those of one parent stay in order.
    let lane = parent.unwrap_or(&member).clone();
    let unmade = member.clone();
    let refuse = move |why: &Fault| {
        unmade.fail(why.clone());
        refuse(why);
    };
    let outcome = group::job(Job { member: lane, blocking, run: Box::new(run), refuse: Box::new(refuse) });
    if outcome.is_err() {
        *new = std::ptr::null_mut();
        let _ = handle::take(comm);
    }
    outcome
}

/// A communicator that is being created. It fails if the thread that creates it panics.
struct Unmade(Arc<Member>);

impl Drop for Unmade {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Fault::internal("making the communicator panicked: a fault of this library, please report it"));
        }
    }
}

/// Joins the ranks of an id.
pub(crate) fn by_id(
    new: *mut Handle,
    size: c_int,
    id: &abi::UniqueId,
    rank: c_int,
    options: Options,
) -> Result<Status> {
    // SAFETY: NULL or the caller's variable.
    let new = unsafe { out("comm", new) }?;
    *new = std::ptr::null_mut();
    let (rank, size) = place(rank, size)?;
    let id = Id::decode(id)?;
    let config = meet::config(&options)?;
    let member = Member::starting(options, gpu::current()?, Some((rank, size)));
    let ranks = move |member: &Arc<Member>| {
        let comm = meet::by_id(&id, rank, size, config, &|| member.is_stopped())?;
        meet::with_gpu(comm, member)
    };
    begin(new, member, None, ranks, |_| ())
}

/// Checks `rank` of `size` ranks, as C passes them.
pub(crate) fn place(rank: c_int, size: c_int) -> Result<(usize, usize)> {
    match (usize::try_from(rank), usize::try_from(size)) {
        (Ok(rank), Ok(size)) if rank < size => Ok((rank, size)),
        _ => Err(Fault::argument(format!(
            "rank {rank} of {size}: expected at least one rank, and ours from 0 to {size} - 1"
        ))),
    }
}

/// A communicator for each of these GPUs of this process, or of the first ones.
fn all(new: *mut Handle, count: c_int, devices: *const c_int) -> Result<Status> {
    let size = usize::try_from(count).ok().filter(|&size| size > 0);
    let size = size.ok_or_else(|| Fault::argument(format!("ndev is {count}, expected 1 or more")))?;
    if new.is_null() {
        return Err(Fault::argument("comm is NULL"));
    }
    // SAFETY: the caller's array of that many elements.
    let handles = unsafe { std::slice::from_raw_parts_mut(new, size) };
    handles.fill(std::ptr::null_mut());
    let devices: Vec<usize> = match devices.is_null() {
        true => (0..size).collect(),
        // SAFETY: the caller's array of that many elements.
        false => unsafe { std::slice::from_raw_parts(devices, size) }
            .iter()
            .map(|&device| {
                usize::try_from(device).map_err(|_| Fault::argument(format!("devlist has {device}, expected GPUs")))
            })
            .collect::<Result<_>>()?,
    };
    gpu::driver()?;
    let visible = tinynccl::cuda::device_count()?;
    if let Some(missing) = devices.iter().find(|&&device| device >= visible) {
        return Err(Fault::argument(format!(
            "GPU {missing} is not there: CUDA sees {visible} (CUDA_VISIBLE_DEVICES?)"
        )));
    }
    let several =
        settings::variable("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| !matches!(value.trim(), "" | "0"));
    if let Some(place) = (1..size).find(|&i| devices[..i].contains(&devices[i])).filter(|_| !several) {
        return Err(Fault::usage(format!(
            "devlist has GPU {} twice, expected each once (NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)",
            devices[place]
        )));
    }
    let options = Options { blocking: true, ..Options::standard() };
    let id = id::new()?;
    let config = meet::config(&options)?;
    group::together(|| {
        for (rank, (new, device)) in handles.iter_mut().zip(devices).enumerate() {
            let (id, config) = (id.clone(), config.clone());
            let member = Member::starting(options.clone(), device, Some((rank, size)));
            let ranks = move |member: &Arc<Member>| {
                let comm = meet::by_id(&id, rank, size, config, &|| member.is_stopped())?;
                meet::with_gpu(comm, member)
            };
            begin(new, member, None, ranks, |_| ())?;
        }
        Ok(())
    })
}

export! {
    /// Makes a communicator of `nranks` ranks, as rank `rank`, of the current GPU. All ranks call it with the same id;
    /// it returns when their rendezvous is complete. Several ranks of one thread: in a group.
    fn ncclCommInitRank / pncclCommInitRank [] (comm: *mut Handle, nranks: c_int, id: abi::UniqueId, rank: c_int) {
        group::noted(by_id(comm, nranks, &id, rank, Options::standard()))
    }

    /// `ncclCommInitRank` with a configuration, or NULL. With `blocking = 0` it returns `ncclInProgress`, and
    /// `ncclCommGetAsyncError` says when the communicator is ready.
    fn ncclCommInitRankConfig / pncclCommInitRankConfig [] (
        comm: *mut Handle, nranks: c_int, id: abi::UniqueId, rank: c_int, config: *const abi::Config,
    ) {
        // SAFETY: as NCCL requires: NULL, or initialised.
        let options = unsafe { Options::of(config, &Options::standard()) };
        group::noted(options.and_then(|options| by_id(comm, nranks, &id, rank, options)))
    }

    /// `ncclCommInitRankConfig` with several ids, of which the ranks use the first one: one store serves thousands.
    fn ncclCommInitRankScalable / pncclCommInitRankScalable [] (
        comm: *mut Handle, nranks: c_int, rank: c_int, count: c_int, ids: *const abi::UniqueId,
        config: *const abi::Config,
    ) {
        group::noted((|| {
            // SAFETY: as NCCL requires: NULL, or initialised.
            let options = unsafe { Options::of(config, &Options::standard()) }?;
            let count = usize::try_from(count).ok().filter(|&n| n > 0 && n <= usize::try_from(nranks).unwrap_or(0));
            let count = count.ok_or_else(|| Fault::argument("nId is not between 1 and nranks"))?;
            if ids.is_null() {
                return Err(Fault::argument("commIds is NULL"));
            }
            // SAFETY: the caller's array of that many elements.
            let ids = unsafe { std::slice::from_raw_parts(ids, count) };
            ids.iter().try_for_each(|id| Id::decode(id).map(drop))?;
            by_id(comm, nranks, &ids[0], rank, options)
        })())
    }

    /// Makes communicators for `ndev` GPUs of this process, `devlist` or the first ones: element r is rank r.
    fn ncclCommInitAll / pncclCommInitAll [] (comm: *mut Handle, ndev: c_int, devlist: *const c_int) {
        group::noted(all(comm, ndev, devlist))
    }
}
