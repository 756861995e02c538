//! Making communicators by id: `ncclCommInitRank` and its relatives.

use std::ffi::c_int;
use std::sync::Arc;

use super::start::{begin, with_gpu};
use crate::abi::config::Options;
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::abi::{self, Status};
use crate::comm::communicator::Communicator;
use crate::comm::gpu;
use crate::comm::handle::Handle;
use crate::env::variables;
use crate::rendezvous::id::Id;
use crate::rendezvous::{join, unique_id};
use crate::submit::group;

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
    let (rank, size) = check_rank(rank, size)?;
    let id = Id::decode(id)?;
    let config = options.settings()?;
    let comm = Communicator::starting(options, gpu::current()?, Some((rank, size)));
    let connect = move |comm: &Arc<Communicator>| {
        let host = join::by_id(&id, rank, size, config, &|| comm.is_stopped())?;
        with_gpu(host, comm)
    };
    begin(new, comm, None, connect, |_| ())
}

/// Checks `rank` of `size` ranks, as C passes them.
fn check_rank(rank: c_int, size: c_int) -> Result<(usize, usize)> {
    match (usize::try_from(rank), usize::try_from(size)) {
        (Ok(rank), Ok(size)) if rank < size => Ok((rank, size)),
        _ => Err(Error::argument(format!(
            "rank {rank} of {size}: expected at least one rank, and ours from 0 to {size} - 1"
        ))),
    }
}

/// A communicator for each of these GPUs of this process, or of the first ones.
fn all(new: *mut Handle, count: c_int, devices: *const c_int) -> Result<Status> {
    let size = usize::try_from(count).ok().filter(|&size| size > 0);
    let size = size.ok_or_else(|| Error::argument(format!("ndev is {count}, expected 1 or more")))?;
    if new.is_null() {
        return Err(Error::argument("comm is NULL"));
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
                usize::try_from(device).map_err(|_| Error::argument(format!("devlist has {device}, expected GPUs")))
            })
            .collect::<Result<_>>()?,
    };
    gpu::driver()?;
    let visible = tinynccl::cuda::device_count()?;
    if let Some(missing) = devices.iter().find(|&&device| device >= visible) {
        return Err(Error::argument(format!(
            "GPU {missing} is not there: CUDA sees {visible} (CUDA_VISIBLE_DEVICES?)"
        )));
    }
    let several = variables::get("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| !matches!(value.trim(), "" | "0"));
    if let Some(second) = (1..size).find(|&i| devices[..i].contains(&devices[i])).filter(|_| !several) {
        return Err(Error::usage(format!(
            "devlist has GPU {} twice, expected each once (NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)",
            devices[second]
        )));
    }
    let options = Options { blocking: true, ..Options::standard() };
    let id = unique_id::new()?;
    let config = options.settings()?;
    group::concurrently(|| {
        for (rank, (new, device)) in handles.iter_mut().zip(devices).enumerate() {
            let (id, config) = (id.clone(), config.clone());
            let comm = Communicator::starting(options.clone(), device, Some((rank, size)));
            let connect = move |comm: &Arc<Communicator>| {
                let host = join::by_id(&id, rank, size, config, &|| comm.is_stopped())?;
                with_gpu(host, comm)
            };
            begin(new, comm, None, connect, |_| ())?;
        }
        Ok(())
    })
}

export! {
    /// Makes a communicator of `nranks` ranks, as rank `rank`, of the current GPU. All ranks call it with the same id;
    /// it returns when their rendezvous is complete. Several ranks of one thread: in a group.
    fn ncclCommInitRank / pncclCommInitRank [] (comm: *mut Handle, nranks: c_int, id: abi::UniqueId, rank: c_int) {
        group::recorded(by_id(comm, nranks, &id, rank, Options::standard()))
    }

    /// `ncclCommInitRank` with a configuration, or NULL. With `blocking = 0` it returns `ncclInProgress`, and
    /// `ncclCommGetAsyncError` reports when the communicator is ready.
    fn ncclCommInitRankConfig / pncclCommInitRankConfig [] (
        comm: *mut Handle, nranks: c_int, id: abi::UniqueId, rank: c_int, config: *const abi::Config,
    ) {
        // SAFETY: as NCCL requires: NULL, or initialised.
        let options = unsafe { Options::of(config, &Options::standard()) };
        group::recorded(options.and_then(|options| by_id(comm, nranks, &id, rank, options)))
    }

    /// `ncclCommInitRankConfig` with several ids, of which the ranks use the first one: one store serves thousands.
    fn ncclCommInitRankScalable / pncclCommInitRankScalable [] (
        comm: *mut Handle, nranks: c_int, rank: c_int, count: c_int, ids: *const abi::UniqueId,
        config: *const abi::Config,
    ) {
        group::recorded((|| {
            // SAFETY: as NCCL requires: NULL, or initialised.
            let options = unsafe { Options::of(config, &Options::standard()) }?;
            let count = usize::try_from(count).ok().filter(|&n| n > 0 && n <= usize::try_from(nranks).unwrap_or(0));
            let count = count.ok_or_else(|| Error::argument("nId is not between 1 and nranks"))?;
            if ids.is_null() {
                return Err(Error::argument("commIds is NULL"));
            }
            // SAFETY: the caller's array of that many elements.
            let ids = unsafe { std::slice::from_raw_parts(ids, count) };
            ids.iter().try_for_each(|id| Id::decode(id).map(drop))?;
            by_id(comm, nranks, &ids[0], rank, options)
        })())
    }

    /// Makes communicators for `ndev` GPUs of this process, `devlist` or the first ones: element r is rank r.
    fn ncclCommInitAll / pncclCommInitAll [] (comm: *mut Handle, ndev: c_int, devlist: *const c_int) {
        group::recorded(all(comm, ndev, devlist))
    }
}
