//! The host functions of NCCL's device API, with which programs write their own kernels over NCCL's memory.
//!
//! Its headers compile NCCL's data structures into those kernels, so another library cannot serve them. Queries are
//! answered; a function that would make such a structure returns `ncclInvalidUsage`.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use tinynccl::cuda::DeviceComm;

use super::windows::reaches;
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, export_value, out};
use crate::abi::{CONFIG_MAGIC, Multimem, Properties, Team, Window as Opaque};
use crate::comm::handle::{self, Handle, handle};
use crate::comm::registered;

/// Ranks that reach each other's memory: all, or each itself alone.
fn lsa_size(device: &DeviceComm) -> usize {
    if reaches(device) { device.size() } else { 1 }
}

/// Makes a team from a communicator's rank, size and LSA size; the default team unless it takes calls.
fn team(comm: Handle, make: impl FnOnce(c_int, c_int, c_int) -> Team) -> Team {
    let Some(comm) = handle::find(comm) else { return Team::default() };
    let Ok(device) = comm.device() else { return Team::default() };
    make(device.rank() as c_int, device.size() as c_int, lsa_size(device) as c_int)
}

fn refused(what: &str) -> Error {
    Error::usage(format!(
        "{what} belongs to NCCL's device API, whose kernels contain NCCL's own data structures: this library has the \
         host API alone; use its collectives, or load NVIDIA's library for such kernels"
    ))
}

/// Writes the address at which our device reaches byte `offset` of `peer`'s window, or NULL.
fn point(win: *mut Opaque, offset: usize, peer: c_int, to: *mut *mut c_void) -> Result<()> {
    // SAFETY: NULL or the caller's variable.
    let to = unsafe { out("outPtr", to) }?;
    let window = registered::find(win)?;
    let peer = usize::try_from(peer).map_err(|_| Error::argument(format!("peer is {peer}, expected a rank")))?;
    *to = window.address_at(peer, offset)?.map_or(std::ptr::null_mut(), |at| at as *mut c_void);
    Ok(())
}

/// There is no multicast memory: NULL, as in NCCL on machines without it.
fn no_multicast(win: *mut Opaque, to: *mut *mut c_void) -> Result<()> {
    // SAFETY: NULL or the caller's variable.
    let to = unsafe { out("outPtr", to) }?;
    registered::find(win)?;
    *to = std::ptr::null_mut();
    Ok(())
}

export! {
    /// Writes what the communicator offers: no device API, no multicast memory, no network access from kernels.
    /// `nvmlDev` is -1: NVML's number of the GPU is not looked up.
    fn ncclCommQueryProperties / pncclCommQueryProperties [comm] (comm: Handle, properties: *mut Properties) {
        let comm = handle(comm)?;
        let device = comm.device()?;
        if properties.is_null() {
            return Err(Error::argument("props is NULL"));
        }
        // SAFETY: the caller's structure, which has these two fields in every version.
        let (size, magic) =
            unsafe { ((&raw const (*properties).size).read(), (&raw const (*properties).magic).read()) };
        // As of 2.29.2.
        let least = offset_of!(Properties, lsa_teams);
        if magic != CONFIG_MAGIC || size < least {
            return Err(Error::argument(format!(
                "props has magic {magic:#x} and size {size}, expected {CONFIG_MAGIC:#x} and {least} or more: begin \
                 with NCCL_COMM_PROPERTIES_INITIALIZER"
            )));
        }
        let (ranks, reach) = (device.size() as c_int, lsa_size(device) as c_int);
        let answer = Properties {
            size,
            magic,
            // SAFETY: as above.
            version: unsafe { (&raw const (*properties).version).read() },
            rank: device.rank() as c_int,
            ranks,
            cuda_device: comm.ordinal() as c_int,
            nvml_device: -1,
            device_api: false,
            multimem: false,
            gin: 0,
            lsa_teams: ranks / reach,
            host_rma: ranks > 1 && reaches(device),
            railed_gin: 0,
        };
        let bytes = size.min(size_of::<Properties>());
        // SAFETY: the caller's structure is `size` bytes long, and so much of ours is written.
        unsafe { properties.cast::<u8>().copy_from_nonoverlapping((&raw const answer).cast(), bytes) };
        Ok(())
    }

    /// Refused.
    fn ncclDevCommCreate / pncclDevCommCreate [comm] (
        comm: Handle, _requirements: *const c_void, _created: *mut c_void
    ) {
        handle(comm)?;
        Err::<(), _>(refused("a device communicator"))
    }

    /// Refused: there are no device communicators to destroy.
    fn ncclDevCommDestroy / pncclDevCommDestroy [comm] (comm: Handle, _created: *const c_void) {
        handle(comm)?;
        Err::<(), _>(refused("a device communicator"))
    }

    /// Writes the address at which this rank's kernels reach byte `offset` of `peer`'s buffer of a window; NULL if they
    /// do not.
    fn ncclGetPeerDevicePointer / pncclGetPeerDevicePointer [] (
        win: *mut Opaque, offset: usize, peer: c_int, pointer: *mut *mut c_void
    ) {
        point(win, offset, peer, pointer)
    }

    /// Does as `ncclGetPeerDevicePointer`: `peer` counts the ranks that reach each other's memory, which are all ranks
    /// where there are windows.
    fn ncclGetLsaDevicePointer / pncclGetLsaDevicePointer [] (
        win: *mut Opaque, offset: usize, peer: c_int, pointer: *mut *mut c_void
    ) {
        point(win, offset, peer, pointer)
    }

    /// Writes NULL: there is no multicast memory.
    fn ncclGetLsaMultimemDevicePointer / pncclGetLsaMultimemDevicePointer [] (
        win: *mut Opaque, _offset: usize, pointer: *mut *mut c_void
    ) {
        no_multicast(win, pointer)
    }

    /// Writes NULL: there is no multicast memory.
    fn ncclGetMultimemDevicePointer / pncclGetMultimemDevicePointer [] (
        win: *mut Opaque, _offset: usize, _multimem: Multimem, pointer: *mut *mut c_void
    ) {
        no_multicast(win, pointer)
    }

    /// Refused.
    fn ncclLsaBarrierCreateRequirement / pncclLsaBarrierCreateRequirement [] (
        _team: Team, _barriers: c_int, _created: *mut c_void, _requirement: *mut c_void
    ) {
        Err::<(), _>(refused("a barrier of kernels"))
    }

    /// Refused.
    fn ncclGinBarrierCreateRequirement / pncclGinBarrierCreateRequirement [comm] (
        comm: Handle, _team: Team, _barriers: c_int, _created: *mut c_void, _requirement: *mut c_void
    ) {
        handle(comm)?;
        Err::<(), _>(refused("a barrier of kernels"))
    }

    /// Refused.
    fn ncclLLA2ACreateRequirement / pncclLLA2ACreateRequirement [] (
        _blocks: c_int, _slots: c_int, _created: *mut c_void, _requirement: *mut c_void
    ) {
        Err::<(), _>(refused("an exchange of kernels"))
    }

    /// Refused.
    fn ncclGinOutboxCreateRequirement / pncclGinOutboxCreateRequirement [] (
        _blocks: c_int, _size_log2: c_int, _created: *mut c_void, _requirement: *mut c_void
    ) {
        Err::<(), _>(refused("an outbox of kernels"))
    }

    /// Refused.
    fn ncclGinInboxA2ACreateRequirement / pncclGinInboxA2ACreateRequirement [] (
        _peers: Team, _blocks: c_int, _size_log2: c_int, _created: *mut c_void, _requirement: *mut c_void
    ) {
        Err::<(), _>(refused("an inbox of kernels"))
    }
}

export_value! {
    /// All ranks; zeroes for a communicator that takes no calls.
    fn ncclTeamWorld / pncclTeamWorld (comm: Handle) -> Team, Team::default(); {
        team(comm, |rank, ranks, _| Team { ranks, rank, stride: 1 })
    }

    /// The ranks that reach each other's memory ("load-store accessible").
    fn ncclTeamLsa / pncclTeamLsa (comm: Handle) -> Team, Team::default(); {
        team(comm, |rank, _, reach| Team { ranks: reach, rank: rank % reach, stride: 1 })
    }

    /// The team of the ranks with our index in each LSA team.
    fn ncclTeamRail / pncclTeamRail (comm: Handle) -> Team, Team::default(); {
        team(comm, |rank, ranks, reach| Team { ranks: ranks / reach, rank: rank / reach, stride: reach })
    }

    /// The communicator's rank of a team's rank; -1 without a communicator that takes calls.
    fn ncclTeamRankToWorld / pncclTeamRankToWorld (comm: Handle, team: Team, rank: c_int) -> c_int, -1; {
        moved(comm, team, rank, |own, _| own)
    }

    /// The rank among those that reach each other's memory of a team's rank; -1 as above.
    fn ncclTeamRankToLsa / pncclTeamRankToLsa (comm: Handle, team: Team, rank: c_int) -> c_int, -1; {
        moved(comm, team, rank, |own, reach| own % reach)
    }

    /// Slots of 8 bytes that such elements take.
    fn ncclLLA2ACalcSlots / pncclLLA2ACalcSlots (elements: c_int, bytes: c_int) -> c_int, 0; {
        elements.saturating_mul(bytes.saturating_add(7) / 8)
    }
}

/// Our own number moved as far as `rank` is from ours in `team`.
fn moved(comm: Handle, team: Team, rank: c_int, own: impl FnOnce(c_int, c_int) -> c_int) -> c_int {
    let Some(comm) = handle::find(comm) else { return -1 };
    let Ok(device) = comm.device() else { return -1 };
    let distance = rank.wrapping_sub(team.rank).wrapping_mul(team.stride);
    own(device.rank() as c_int, lsa_size(device) as c_int).wrapping_add(distance)
}
