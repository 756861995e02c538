//! Reaching the other ranks' windows: by address within a process; by CUDA IPC or by descriptors between processes.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::result::device;
use cudarc::driver::{CudaContext, DriverError, sys};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::mailbox::{Address, Mailbox};
use super::mapping::Mapping;
use super::{Extension, Layout, MAX_RANKS, Window, Windows};
use crate::driver::{cuda, devices};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, CudaHandles, Ll128};

/// The GPU that a rank drives, and in which process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankGpu {
    process: u32,
    device: usize,
    /// UUID of the GPU: two ranks may have the same.
    uuid: Vec<u8>,
    name: String,
    pub(crate) multiprocessors: usize,
    /// The GPUs to which it has NVLink, by UUID.
    joined: Vec<Vec<u8>>,
}

impl RankGpu {
    pub(crate) fn of(context: &Arc<CudaContext>) -> Result<RankGpu> {
        let failed = |e| cuda("DeviceComm", "describing this rank's device", e);
        context.bind_to_thread().map_err(failed)?;
        let multiprocessors =
            context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(failed)?;
        let bytes = |uuid: sys::CUuuid| -> Vec<u8> { uuid.bytes.iter().map(|&b| b as u8).collect() };
        Ok(RankGpu {
            process: std::process::id(),
            device: context.ordinal(),
            uuid: bytes(context.uuid().map_err(failed)?),
            name: context.name().map_err(failed)?,
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(1),
            joined: joined(context).map_err(failed)?.into_iter().map(bytes).collect(),
        })
    }

    /// For people.
    pub(crate) fn name(&self) -> String {
        format!("GPU {}, {}", self.device, self.name)
    }

    /// The windows of ranks that drive these GPUs. On the phased path no block waits for another rank's.
    pub(crate) fn layout(gpus: &[RankGpu], in_phases: bool, config: &Config) -> Result<Layout> {
        let multiprocessors = gpus.iter().map(|place| place.multiprocessors).min().unwrap_or(1);
        let same = |one: &RankGpu| gpus.iter().filter(|other| one.same_device(other)).count();
        let sharing = if in_phases { 1 } else { gpus.iter().map(same).max().unwrap_or(1) };
        let layout = Layout::resident(gpus.len(), sharing, multiprocessors, config)?;
        let pairs = || gpus.iter().flat_map(|one| gpus.iter().map(move |other| (one, other)));
        let whole_lines = match config.cuda_ll128 {
            Ll128::Auto => pairs().all(|(one, other)| one.keeps_lines_whole(other)),
            Ll128::On => true,
            Ll128::Off => false,
        };
        let layout = if whole_lines { layout } else { layout.without_ll128() };
        Ok(layout.within(config.cuda_memory))
    }

    /// Returns true if 128 bytes that a warp writes to the other GPU arrive together.
    fn keeps_lines_whole(&self, other: &RankGpu) -> bool {
        self.same_device(other) || self.joined.contains(&other.uuid)
    }

    pub(crate) fn same_device(&self, other: &RankGpu) -> bool {
        self.uuid == other.uuid
    }

    pub(crate) fn same_process(&self, other: &RankGpu) -> bool {
        self.process == other.process
    }
}

/// The GPUs of this process whose link to this one has all atomic operations: CUDA's term for NVLink, which PCIe lacks.
fn joined(context: &Arc<CudaContext>) -> Result<Vec<sys::CUuuid>, DriverError> {
    let mut joined = Vec::new();
    for other in devices()? {
        if other == context.cu_device() {
            continue;
        }
        let asked = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        let mut has = 0;
        // SAFETY: writes the number; both devices are the driver's.
        unsafe { sys::cuDeviceGetP2PAttribute(&mut has, asked, context.cu_device(), other) }.result()?;
        if has != 0 {
            joined.push(device::get_uuid(other)?);
        }
    }
    Ok(joined)
}

/// A rank's message to the others about its window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Introduction {
    address: u64,
    bytes: usize,
    handle: Handle,
}

/// The handle by which another process maps a window.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Handle {
    /// `CUipcMemHandle`.
    Ipc(Vec<u8>),
    /// A descriptor, sent to the receiver's mailbox.
    Descriptor(Address),
}

impl Introduction {
    /// Address of the window in its owner's process.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn new(window: &Window, mailbox: Option<&Mailbox>) -> Result<Introduction> {
        let handle = match mailbox {
            Some(mailbox) => Handle::Descriptor(mailbox.address().clone()),
            None => Handle::Ipc(ipc_handle(window)?),
        };
        Ok(Introduction { address: window.address, bytes: window.bytes, handle })
    }
}

fn ipc_handle(window: &Window) -> Result<Vec<u8>> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the address is the start of an allocation of cuMemAlloc; writes the handle.
    unsafe { sys::cuIpcGetMemHandle(&mut handle, window.address) }
        .result()
        .map_err(|e| cuda("DeviceComm", "exporting this rank's window", e))?;
    Ok(handle.reserved.iter().map(|&b| b as u8).collect())
}

/// The windows of all ranks, and facts about their GPUs.
#[derive(Debug)]
pub(crate) struct Reached {
    pub(crate) windows: Windows,
    /// Ranks of several processes have the same GPU.
    pub(crate) shares_gpu: bool,
    /// Names of the ranks' GPUs.
    pub(crate) names: Vec<String>,
}

impl Reached {
    /// Offers this rank's window and maps the others'. The inner error is the reason why that fails, the same on all
    /// ranks.
    pub(crate) fn open(host: &Comm, context: &Arc<CudaContext>) -> Result<Result<Reached, String>> {
        let ours = RankGpu::of(context)?;
        let gpus: Vec<RankGpu> = host.exchange("DeviceComm: device", &ours)?;
        let layout = match RankGpu::layout(&gpus, shares_gpu(&gpus), host.config()) {
            Ok(layout) => layout,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let by = |descriptors| Self::open_by(host, context, layout, &gpus, descriptors);
        Ok(match host.config().cuda_handles {
            CudaHandles::Ipc => by(false)?,
            CudaHandles::Fd => by(true)?,
            CudaHandles::Auto => match by(false)? {
                Ok(mapped) => Ok(mapped),
                Err(ipc) => by(true)?
                    .inspect(|_| log::info!("windows are mapped by descriptors; by CUDA IPC: {ipc}"))
                    .map_err(|fd| if ipc == fd { ipc } else { format!("{ipc}; by descriptors: {fd}") }),
            },
        })
    }

    fn open_by(
        host: &Comm,
        context: &Arc<CudaContext>,
        layout: Layout,
        gpus: &[RankGpu],
        descriptors: bool,
    ) -> Result<Result<Reached, String>> {
        let (rank, way) = (host.rank(), if descriptors { "fd" } else { "ipc" });
        // Later no descriptor could be sent, and phased calls all use slots: then the extension is there from the
        // start.
        let extended = descriptors || shares_gpu(gpus);
        let bytes = if extended { layout.bytes() } else { layout.window_bytes() };
        let offer = || {
            if !descriptors {
                let window = Window::new(context, bytes)?;
                let introduction = Introduction::new(&window, None)?;
                return Ok((window, None, introduction));
            }
            let os = |e: Errno| Error::io("DeviceComm", "a socket for descriptors", &e.into());
            let (window, mailbox) = (Window::with_descriptor(context, bytes)?, Mailbox::open().map_err(os)?);
            let introduction = Introduction::new(&window, Some(&mailbox))?;
            Ok((window, Some(mailbox), introduction))
        };
        let offer: Result<(Window, Option<Mailbox>, Introduction)> = offer();
        let offered = offer.as_ref().map(|(_, _, introduction)| introduction.clone()).map_err(ToString::to_string);
        let all: Vec<Result<Introduction, String>> = host.exchange(&format!("DeviceComm: window, {way}"), &offered)?;
        let mut received = HashMap::new();
        if descriptors {
            let posted = match &offer {
                Ok((window, Some(mailbox), _)) => post(rank, window, mailbox, &all),
                _ => Ok(()),
            };
            // After this, all sent descriptors have arrived.
            let posted: Vec<Result<(), String>> = host.exchange("DeviceComm: descriptors", &posted)?;
            if let Some(why) = posted.into_iter().find_map(Result::err) {
                return Ok(Err(why));
            }
            if let Ok((_, Some(mailbox), _)) = &offer {
                // The error below names missing ones.
                received = mailbox.collect().unwrap_or_default();
            }
        }
        let mapped = match offer {
            Ok((window, ..)) => Reached::all(rank, context, (&layout, extended), gpus, window, &all, &received),
            Err(error) => Err(error.to_string()),
        };
        let verdict = mapped.as_ref().map(|_| ()).map_err(Clone::clone);
        let verdicts: Vec<Result<(), String>> = host.exchange(&format!("DeviceComm: reach, {way}"), &verdict)?;
        Ok(match verdicts.into_iter().find_map(Result::err) {
            Some(why) => Err(why),
            None => mapped,
        })
    }

    fn all(
        rank: usize,
        context: &Arc<CudaContext>,
        (layout, extended): (&Layout, bool),
        gpus: &[RankGpu],
        window: Window,
        all: &[Result<Introduction, String>],
        received: &HashMap<usize, OwnedFd>,
    ) -> Result<Reached, String> {
        let mut addresses = [0; MAX_RANKS];
        let mut peers = Vec::new();
        for (peer, theirs) in all.iter().enumerate() {
            let theirs = theirs.as_ref().map_err(|why| format!("rank {peer} has no window: {why}"))?;
            if peer == rank {
                addresses[peer] = window.address;
                continue;
            }
            let opened = PeerWindow::open(context, window.bytes, gpus, (rank, peer), theirs, received.get(&peer))
                .map_err(|e| e.to_string())?;
            addresses[peer] = opened.address;
            peers.push(opened);
        }
        let extension = match extended {
            true => Extension::behind(&addresses, layout),
            false => Extension::later(context, rank, *layout, gpus),
        };
        let (extension, memory) = (Arc::new(extension), Arc::new(vec![window]));
        let windows = Windows { rank, layout: *layout, addresses, extension, peers, memory };
        Ok(Reached { windows, shares_gpu: shares_gpu(gpus), names: gpus.iter().map(RankGpu::name).collect() })
    }
}

/// Returns true if ranks of several processes have one GPU.
fn shares_gpu(gpus: &[RankGpu]) -> bool {
    gpus.iter().enumerate().any(|(i, a)| gpus[..i].iter().any(|b| a.same_device(b) && !a.same_process(b)))
}

/// Sends a descriptor of our window to the ranks of other processes.
fn post(rank: usize, window: &Window, mailbox: &Mailbox, all: &[Result<Introduction, String>]) -> Result<(), String> {
    let mapping = window.mapping().ok_or("the window has no descriptor")?;
    let descriptor = mapping.export().map_err(|e| format!("rank {rank}: exporting its window: {e:?}"))?;
    for (peer, theirs) in all.iter().enumerate() {
        if let Ok(Introduction { handle: Handle::Descriptor(to), .. }) = theirs
            && peer != rank
        {
            let sent = mailbox.post(to, rank, descriptor.as_fd());
            sent.map_err(|e| {
                format!("rank {rank}: sending a descriptor to rank {peer}: {e} (is it in another network namespace?)")
            })?;
        }
    }
    Ok(())
}

/// Another rank's window, as this device sees it.
#[derive(Debug)]
pub(crate) struct PeerWindow {
    pub(crate) address: sys::CUdeviceptr,
    _import: Option<Imported>,
}

/// Keeps it mapped.
#[derive(Debug)]
enum Imported {
    Ipc { _import: Import },
    Descriptor { _mapping: Mapping },
}

impl PeerWindow {
    /// Makes the memory that `theirs` describes, a window or its extension, reachable for the kernels of `context`.
    pub(super) fn open(
        context: &Arc<CudaContext>,
        bytes: usize,
        gpus: &[RankGpu],
        (rank, peer): (usize, usize),
        theirs: &Introduction,
        descriptor: Option<&OwnedFd>,
    ) -> Result<PeerWindow> {
        let op = "DeviceComm";
        let (here, there) = (&gpus[rank], &gpus[peer]);
        let between = format!("rank {rank} ({}) to rank {peer} ({})", here.name(), there.name());
        if theirs.bytes != bytes {
            return Err(Error::invalid(
                op,
                format!(
                    "{between}: our window has {bytes} bytes, theirs {}: start the same build on all ranks",
                    theirs.bytes
                ),
            ));
        }
        context.bind_to_thread().map_err(|e| cuda(op, "binding the device to this thread", e))?;
        if there.same_process(here) {
            if there.device != here.device {
                enable(context, there.device).map_err(|e| cuda(op, format!("peer access, {between}"), e))?;
            }
            return Ok(PeerWindow { address: theirs.address, _import: None });
        }
        let failed = |e| cuda(op, format!("mapping a window, {between}"), e);
        Ok(match &theirs.handle {
            Handle::Ipc(handle) => {
                let import = Import::open(context, handle, 0).map_err(failed)?;
                PeerWindow { address: import.address, _import: Some(Imported::Ipc { _import: import }) }
            }
            Handle::Descriptor(_) => {
                let missing =
                    || Error::invalid(op, format!("{between}: the descriptor of their window did not arrive"));
                let descriptor = descriptor.ok_or_else(missing)?;
                let mapping = Mapping::import(context, descriptor.as_fd(), theirs.bytes).map_err(failed)?;
                PeerWindow { address: mapping.address, _import: Some(Imported::Descriptor { _mapping: mapping }) }
            }
        })
    }
}

/// Lets kernels of `context` reach the memory of another device of this process.
pub(crate) fn enable(context: &Arc<CudaContext>, device: usize) -> Result<(), DriverError> {
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
pub(crate) struct Import {
    context: Arc<CudaContext>,
    pub(crate) address: sys::CUdeviceptr,
    /// The allocation's identity where it was made.
    pub(crate) buffer: u64,
}

impl Import {
    /// `handle`: of cuIpcGetMemHandle of another process, which keeps the memory until this is dropped.
    pub(crate) fn open(context: &Arc<CudaContext>, bytes: &[u8], buffer: u64) -> Result<Import, DriverError> {
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
            // SAFETY: mapped by `open`; the owner drops this only when no kernel uses it any more.
            if let Err(error) = unsafe { sys::cuIpcCloseMemHandle(self.address) }.result() {
                log::debug!("unmapping memory of another rank: {error:?}");
            }
        }
    }
}
