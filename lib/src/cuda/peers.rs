//! Reaching the other ranks' windows: by address within a process, by CUDA IPC between processes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};
use serde::{Deserialize, Serialize};

use super::driver::cuda;
use super::window::{Layout, MAX_RANKS, Window};
use crate::comm::Comm;
use crate::config::Config;
use crate::error::{Error, Result};

/// Where a rank is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Place {
    process: u32,
    device: usize,
    /// Of the GPU: two ranks may have the same.
    uuid: Vec<u8>,
    name: String,
    pub(super) multiprocessors: usize,
}

impl Place {
    pub(super) fn of(context: &Arc<CudaContext>) -> Result<Place> {
        let failed = |e| cuda("DeviceComm", "describing this rank's device", e);
        context.bind_to_thread().map_err(failed)?;
        let multiprocessors =
            context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(failed)?;
        Ok(Place {
            process: std::process::id(),
            device: context.ordinal(),
            uuid: context.uuid().map_err(failed)?.bytes.iter().map(|&b| b as u8).collect(),
            name: context.name().map_err(failed)?,
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(1),
        })
    }

    /// For people.
    pub(super) fn gpu(&self) -> String {
        format!("GPU {}, {}", self.device, self.name)
    }

    /// The windows of ranks at these places. In phases, nobody waits for another's blocks.
    pub(super) fn layout(places: &[Place], in_phases: bool, config: &Config) -> Result<Layout> {
        let multiprocessors = places.iter().map(|place| place.multiprocessors).min().unwrap_or(1);
        let same = |one: &Place| places.iter().filter(|other| one.same_device(other)).count();
        let sharing = if in_phases { 1 } else { places.iter().map(same).max().unwrap_or(1) };
        Layout::resident(places.len(), sharing, multiprocessors, config)
    }

    pub(super) fn same_device(&self, other: &Place) -> bool {
        self.uuid == other.uuid
    }

    pub(super) fn same_process(&self, other: &Place) -> bool {
        self.process == other.process
    }
}

/// What a rank tells the others about its window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Introduction {
    place: Place,
    address: u64,
    bytes: usize,
    /// `CUipcMemHandle`.
    handle: Vec<u8>,
}

impl Introduction {
    pub(super) fn new(place: Place, window: &Window) -> Result<Introduction> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the address is the start of an allocation of cuMemAlloc; writes the handle.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, window.address) }
            .result()
            .map_err(|e| cuda("DeviceComm", "exporting this rank's window", e))?;
        Ok(Introduction {
            place,
            address: window.address,
            bytes: window.bytes,
            handle: handle.reserved.iter().map(|&b| b as u8).collect(),
        })
    }
}

/// The windows of all ranks, as this device sees them.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) layout: Layout,
    /// Ranks of several processes have the same GPU.
    pub(super) shares_gpu: bool,
    /// What the ranks' GPUs are called.
    pub(super) gpus: Vec<String>,
    pub(super) addresses: [u64; MAX_RANKS],
    // Peers' windows are unmapped before ours is freed.
    pub(super) peers: Vec<Peer>,
    pub(super) window: Window,
}

impl Mapped {
    /// Offers this rank's window and maps the others'. The inner error says why that does not work, on all ranks the same.
    pub(super) fn open(host: &Comm, context: &Arc<CudaContext>) -> Result<Result<Mapped, String>> {
        let place = Place::of(context)?;
        let places: Vec<Place> = host.exchange("DeviceComm: device", &place)?;
        let gpus = places.iter().map(Place::gpu).collect();
        let shares_gpu =
            places.iter().enumerate().any(|(i, a)| places[..i].iter().any(|b| a.same_device(b) && !a.same_process(b)));
        let layout = match Place::layout(&places, shares_gpu, host.config()) {
            Ok(layout) => layout,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let offer = Window::new(context, layout.bytes())
            .and_then(|window| Introduction::new(place, &window).map(|introduction| (window, introduction)));
        let offered = offer.as_ref().map(|(_, introduction)| introduction.clone()).map_err(ToString::to_string);
        let all: Vec<Result<Introduction, String>> = host.exchange("DeviceComm: window", &offered)?;
        let mapped =
            match offer {
                Ok((window, ours)) => Mapped::all(host.rank(), context, layout, window, &ours, &all)
                    .map(|mapped| Mapped { shares_gpu, gpus, ..mapped }),
                Err(error) => Err(error.to_string()),
            };
        let verdict = mapped.as_ref().map(|_| ()).map_err(Clone::clone);
        let verdicts: Vec<Result<(), String>> = host.exchange("DeviceComm: reach", &verdict)?;
        Ok(match verdicts.into_iter().find_map(Result::err) {
            Some(why) => Err(why),
            None => mapped,
        })
    }

    fn all(
        rank: usize,
        context: &Arc<CudaContext>,
        layout: Layout,
        window: Window,
        ours: &Introduction,
        all: &[Result<Introduction, String>],
    ) -> Result<Mapped, String> {
        let mut addresses = [0; MAX_RANKS];
        let mut peers = Vec::new();
        for (peer, theirs) in all.iter().enumerate() {
            if peer == rank {
                addresses[peer] = window.address;
                continue;
            }
            let theirs = theirs.as_ref().map_err(|why| format!("rank {peer} has no window: {why}"))?;
            let opened = Peer::open(context, &layout, (rank, peer), ours, theirs).map_err(|e| e.to_string())?;
            addresses[peer] = opened.address;
            peers.push(opened);
        }
        Ok(Mapped { layout, shares_gpu: false, gpus: Vec::new(), addresses, peers, window })
    }
}

/// Another rank's window, as this device sees it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) address: sys::CUdeviceptr,
    _import: Option<Import>,
}

impl Peer {
    /// Makes the window that `theirs` tells of reachable for the kernels of `context`.
    pub(super) fn open(
        context: &Arc<CudaContext>,
        layout: &Layout,
        ranks: (usize, usize),
        ours: &Introduction,
        theirs: &Introduction,
    ) -> Result<Peer> {
        let (rank, peer) = ranks;
        let op = "DeviceComm";
        let between = format!(
            "rank {rank} (GPU {}, {}) to rank {peer} (GPU {}, {})",
            ours.place.device, ours.place.name, theirs.place.device, theirs.place.name
        );
        if theirs.bytes != layout.bytes() {
            return Err(Error::invalid(
                op,
                format!(
                    "{between}: our window has {} bytes, theirs {}: start the same build on all ranks",
                    layout.bytes(),
                    theirs.bytes
                ),
            ));
        }
        context.bind_to_thread().map_err(|e| cuda(op, "binding the device to this thread", e))?;
        if theirs.place.same_process(&ours.place) {
            if theirs.place.device != ours.place.device {
                enable(context, theirs.place.device).map_err(|e| cuda(op, format!("peer access, {between}"), e))?;
            }
            return Ok(Peer { address: theirs.address, _import: None });
        }
        let import = Import::open(context, &theirs.handle, 0)
            .map_err(|e| cuda(op, format!("mapping a window, {between}"), e))?;
        Ok(Peer { address: import.address, _import: Some(import) })
    }
}

/// Lets kernels of `context` reach the memory of another device of this process.
pub(super) fn enable(context: &Arc<CudaContext>, device: usize) -> Result<(), DriverError> {
    let other = CudaContext::new(device)?;
    context.bind_to_thread()?;
    // SAFETY: both contexts are alive.
    match unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        other => other.result(),
    }
}

/// Memory of another process, mapped here.
#[derive(Debug)]
pub(super) struct Import {
    context: Arc<CudaContext>,
    pub(super) address: sys::CUdeviceptr,
    /// The allocation's identity where it was made.
    pub(super) buffer: u64,
}

impl Import {
    /// `handle`: of cuIpcGetMemHandle of another process, which keeps the memory until this is dropped.
    pub(super) fn open(context: &Arc<CudaContext>, bytes: &[u8], buffer: u64) -> Result<Import, DriverError> {
        context.bind_to_thread()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        for (to, from) in handle.reserved.iter_mut().zip(bytes) {
            *to = *from as _;
        }
        let lazy = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the driver checks the handle; writes the address.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, lazy) }.result()?;
        Ok(Import { context: context.clone(), address, buffer })
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: mapped by `open`; whoever drops this has seen to it that no kernel uses it any more.
            if let Err(error) = unsafe { sys::cuIpcCloseMemHandle(self.address) }.result() {
                log::debug!("unmapping memory of another rank: {error:?}");
            }
        }
    }
}
